"""Models and schedulers of timm: Shampoo in muP, and timm's own AdamW with the groups of the same plan."""

import torch
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.functional import cross_entropy

import mukron
from mukron.integrations import for_timm


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
        groups = for_timm(plan, "adamw", lr=2e-3, weight_decay=0.05)
        optimizer = create_optimizer_v2(model, "adamw", lr=2e-3, param_group_fn=groups)
    schedule = CosineLRScheduler(optimizer, t_initial=20, t_in_epochs=False)
    for step in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step_update(step + 1)
        if step % 5 == 4:
            print(f"{name}: step {step + 1}  loss {loss:.3f}")
