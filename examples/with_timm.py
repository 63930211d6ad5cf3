"""Models and schedulers of timm: Shampoo in muP, and AdamW with the same plan."""

import torch
from timm.models import VisionTransformer
from timm.scheduler import CosineLRScheduler
from torch.nn.functional import cross_entropy

import mukron


def network(width):
    sizes = {"embed_dim": width, "num_heads": width // 8, "depth": 2}
    return VisionTransformer(img_size=16, patch_size=4, num_classes=4, **sizes)


torch.manual_seed(0)
shapes = mukron.base_shapes(network, width=16)
x, y = torch.randn(64, 3, 16, 16), torch.arange(64) % 4

for name in ("Shampoo", "AdamW"):
    torch.manual_seed(1)
    model = network(width=64)
    plan = mukron.parametrize(model, shapes)
    if name == "Shampoo":
        optimizer = mukron.Shampoo(model, plan, lr=0.05)
    else:
        optimizer = plan.optimizer(torch.optim.AdamW, lr=2e-3, weight_decay=0.05)  # or a class of timm.optim
    rates = {"warmup_t": 4, "warmup_lr_init": 5e-4, "lr_min": 1e-4}  # at the base width
    schedule = CosineLRScheduler(optimizer, t_initial=20, t_in_epochs=False, **rates)
    for step in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step_update(step + 1)
        if step % 5 == 4:
            print(f"{name}: step {step + 1}  loss {loss:.3f}")
