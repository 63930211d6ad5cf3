"""Mixed precision: autocast and GradScaler as in any training loop. Factors stay in float32."""

import torch
from torch.nn import functional as F

import mukron
from mukron.models import CNN

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
model = CNN(16).to(device)
opt = mukron.KFAC(model, lr=0.1, damping=1.0, memory=mukron.EMA(0.9), factor_every=2, inverse_every=4)
scaler = torch.amp.GradScaler(device)
x, y = torch.randn(32, 1, 28, 28, device=device), torch.randint(10, (32,), device=device)

for step in range(12):
    opt.zero_grad()
    with torch.autocast(device, dtype=dtype):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(opt)
    scaler.update()
    if step % 4 == 3:
        print(f"step {step + 1:2d}  loss {loss.item():.4f}  skipped {opt.skipped}")
