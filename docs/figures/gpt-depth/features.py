"""How the change of every feature of a GPT grows with its depth, by method: slopes of log change over log depth.

Prints a table, with intervals of 95%. ``mean`` is the slope of the mean over all blocks, as ``mukron check depth`` has
it. ``half`` is measured in the middle of the stream, where half of all branches stand before a layer at every depth.
One small step from the start. Arguments are depths, the number of seeds, and methods, by default all. Takes a few
minutes on one core.

    cd docs/figures/gpt-depth
    python features.py 2,4,8,16 8 > features.csv
    python features.py 8,16,32,64 4 SGD AdamW Muon SOAP Shampoo K-FAC FOOF Gauss-Newton > features-deeper.csv
"""

import re
import sys
from collections import defaultdict
from statistics import fmean

import torch
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.models import GPT
from mukron.params import base_shapes, parametrize
from mukron.train.probes import Features

WIDTH, BASE_DEPTH, TOKENS = 32, 2, (4, 17)
VOCABULARY = {"Gauss-Newton": 4, "Gauss-Newton, default steps": 4}  # else 32: a backward pass per output

METHODS = {  # plain steps, the laws' own, and the default ones, which are bounded
    "SGD": lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.05)),
    "AdamW": lambda model, plan: torch.optim.AdamW(plan.param_groups("adamw", lr=0.002, eps=1e-12)),
    "Muon": lambda model, plan: mukron.Muon(model, plan, lr=0.01),
    "SOAP": lambda model, plan: mukron.SOAP(model, plan, lr=0.002, trust=None),
    "SOAP, default steps": lambda model, plan: mukron.SOAP(model, plan, lr=0.002),
    "Shampoo": lambda model, plan: mukron.Shampoo(model, plan, lr=0.005, trust=None),
    "Shampoo, default steps": lambda model, plan: mukron.Shampoo(model, plan, lr=0.005),
    "K-FAC, damping 10": lambda model, plan: mukron.KFAC(model, plan, lr=1e-3, damping=10.0, trust=None, class_dim=-1),
    "K-FAC": lambda model, plan: mukron.KFAC(model, plan, lr=1e-3, trust=None, class_dim=-1),
    "K-FAC, default steps": lambda model, plan: mukron.KFAC(model, plan, lr=1e-3, class_dim=-1),
    "FOOF": lambda model, plan: mukron.FOOF(model, plan, lr=0.05, trust=None),
    "FOOF, default steps": lambda model, plan: mukron.FOOF(model, plan, lr=0.005),
    "Gauss-Newton": lambda model, plan: mukron.GaussNewton(model, plan, lr=1e-4, trust=None, exclude=("positions",)),
    "Gauss-Newton, default steps": lambda model, plan: mukron.GaussNewton(model, plan, lr=1e-4),
}


def changes(method, depth, seed):
    """By feature, its change: by name of a layer, with the block's number as a star, a list over blocks."""
    vocabulary = VOCABULARY.get(method, 32)

    def gpt(width, depth):
        return GPT(width, depth, vocabulary=vocabulary, context=TOKENS[1] - 1, base_depth=BASE_DEPTH)

    tokens = torch.randint(32, TOKENS, generator=torch.Generator().manual_seed(1)) % vocabulary
    torch.manual_seed(seed)
    model = gpt(WIDTH, depth)
    plan = parametrize(model, base_shapes(gpt, WIDTH, depth=BASE_DEPTH))
    optimizer = METHODS[method](model, plan)
    probe = Features(model, optimizer, tokens[:, :-1])
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    found = defaultdict(dict)
    for name, change in probe.read().items():
        if name.startswith("features/") or name == "output":
            block = re.search(r"blocks\.(\d+)\.", name)
            place = name.removeprefix("features/")
            found[re.sub(r"blocks\.\d+\.", "blocks.*.", place)][int(block[1]) if block else 0] = change
    return found


def in_the_middle(name, by_block, depth):
    """What a branch of attention reads at depth / 2; what an MLP reads half a block before and half a block after."""
    blocks = (depth // 2,) if "attention" in name or "norm1" in name else (depth // 2 - 1, depth // 2)
    return fmean(by_block[block] for block in blocks)


def cells(points):
    exponent = fit_exponent([depth for depth, _ in points], [change for _, change in points])
    return f"{exponent.slope:+.3f},{exponent.low:+.3f},{exponent.high:+.3f}"


def rows(method, depths, seeds):
    measured = [(depth, changes(method, depth, seed)) for depth in depths for seed in range(seeds)]
    for name in measured[0][1]:
        mean = cells([(depth, fmean(found[name].values())) for depth, found in measured])
        half = ",,"
        if "*" in name:
            half = cells([(depth, in_the_middle(name, found[name], depth)) for depth, found in measured])
        yield f'"{method}",{name},{mean},{half}'


if __name__ == "__main__":
    print("method,feature,mean,mean low,mean high,half,half low,half high")
    depths, seeds, *methods = sys.argv[1:]
    for method in methods or METHODS:
        for row in rows(method, [int(depth) for depth in depths.split(",")], int(seeds)):
            print(row, flush=True)
