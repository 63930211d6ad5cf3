"""How many directions K-FAC's factors of the GPT really have, by width.

Prints a table: the effective rank (tr M)^2 / tr M^2 of A and B, and their largest eigenvalue over the mean one, the
median over all matrices of the blocks, at the start and after AdamW steps under muP. Takes a few minutes on one core.

    python docs/figures/gpt-damping/spectra.py tinyshakespeare.txt > docs/figures/gpt-damping/spectra.csv
"""

import sys
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from mukron.bench.gpt.task import WINDOW, load_text, network
from mukron.params import base_shapes, parametrize

WIDTHS, STEPS, RATE, BATCH, MEASURED = (64, 128, 256, 512), 200, 0.002, 8, 32


def batch(text, generator, samples):
    starts = torch.randint(len(text) - WINDOW, (samples, 1), generator=generator)
    return text[starts + torch.arange(WINDOW + 1)]


def rank_and_peak(rows):
    """(tr M)^2 / tr M^2, and the largest eigenvalue over the mean one."""
    values = torch.linalg.eigvalsh((rows.T @ rows).double()).clamp_min(0)
    return float(values.sum() ** 2 / values.square().sum()), float(values[-1] / values.mean())


def measured(model, text):
    """Medians over the matrices of the blocks, for targets drawn from the model."""
    rows, hooks = {"A": {}, "B": {}}, []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("branches"):
            hooks.append(layer.register_forward_pre_hook(lambda _, x, n=name: rows["A"].update({n: x[0].detach()})))
            hooks.append(layer.register_full_backward_hook(lambda _, x, d, n=name: rows["B"].update({n: d[0]})))
    logits = model(batch(text, torch.Generator().manual_seed(2), MEASURED)[:, :-1])
    torch.manual_seed(3)
    targets = torch.distributions.Categorical(logits=logits.detach()).sample()
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    found = {name: [rank_and_peak(part.flatten(0, 1)) for part in of.values()] for name, of in rows.items()}
    return [median(pair[k] for pair in found[name]) for name in ("A", "B") for k in (0, 1)]


if __name__ == "__main__":
    text, _ = load_text(Path(sys.argv[1]), "cpu")
    print("width,steps,loss,rank of A,largest of A over mean,rank of B,largest of B over mean")
    for width in WIDTHS:
        torch.manual_seed(0)
        model = network(width)
        plan = parametrize(model, base_shapes(network, width=min(WIDTHS)))
        optimizer, generator = torch.optim.AdamW(plan.param_groups("adamw", lr=RATE)), torch.Generator().manual_seed(1)
        loss = torch.tensor(torch.nan)
        for step in range(STEPS + 1):
            if step in (0, STEPS):
                numbers = ",".join(f"{number:.3g}" for number in measured(model, text))
                print(f"{width},{step},{float(loss):.2f},{numbers}", flush=True)
            tokens = batch(text, generator, BATCH)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
