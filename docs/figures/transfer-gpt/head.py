"""Which difference between muP and SP lets SP learn faster in its first steps? One run, one line of head.csv.

Called as ``python head.py WIDTH HEAD EMBEDDINGS MATRICES SEED FOLDER``: the factor of the head's initial weights under
muP with base width 64, the powers of two of two learning rates, of embeddings and norms and of all other matrices, and
the folder of the text. Network, data, batch size and schedule are those of the study beside this file.
"""

import sys

import torch
from torch.nn import functional as F

from mukron import base_shapes, parametrize
from mukron.data import load
from mukron.models import GPT

width, factor, embeddings, matrices, seed = int(sys.argv[1]), *map(float, sys.argv[2:5]), int(sys.argv[5])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
text = load("shakespeare", sys.argv[6]).train
inputs, targets = text.inputs.to(device).long(), text.targets.to(device).long()

torch.manual_seed(seed)
model = GPT(width, depth=2)
parametrize(model, base_shapes(lambda width: GPT(width, depth=2), width=64))
model.head.weight.data *= factor
model = model.to(device)
groups: dict[float, list[torch.Tensor]] = {}
for name, parameter in model.named_parameters():
    inner = parameter.ndim == 2 and not name.startswith(("tokens", "positions"))
    groups.setdefault(matrices if inner else embeddings, []).append(parameter)
optimizer = torch.optim.AdamW([{"params": group, "lr": 2**power} for power, group in groups.items()], weight_decay=0.0)
epoch = len(inputs) // 64 + bool(len(inputs) % 64)
rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / (epoch // 2)) * (1 - k / (4 * epoch)))

draws, means = torch.Generator().manual_seed(seed), []
for _ in range(4):
    losses = []
    for batch in torch.randperm(len(inputs), generator=draws).split(64):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[batch.to(device)]).flatten(0, 1), targets[batch.to(device)].flatten())
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.detach())
    means.append(f"{torch.stack(losses).mean():.3f}")
print(",".join([*sys.argv[1:6], *means]))
