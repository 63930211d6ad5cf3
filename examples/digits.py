"""Same steps, lower loss: SGD, AdamW, K-FAC and Shampoo on scikit-learn's digits, the best of five learning rates each.

python examples/digits.py                              # the table
python examples/digits.py --write docs/optimizers.md   # and into the page, between its markers
"""

import argparse
import re
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from mukron import KFAC, Shampoo
from mukron.models import MLP

WIDTH, BATCH, STEPS, SEEDS = 256, 256, 200, range(3)
OPTIMIZERS = {
    "SGD, momentum 0.9": (
        lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        (0.03, 0.1, 0.3, 0.5, 1.0),
    ),
    "AdamW": (
        lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        (0.001, 0.003, 0.01, 0.03, 0.1),
    ),
    "K-FAC": (lambda model, lr: KFAC(model, lr=lr), (0.03, 0.05, 0.1, 0.2, 0.3)),
    "Shampoo": (lambda model, lr: Shampoo(model, lr=lr), (0.03, 0.05, 0.1, 0.2, 0.3)),
}


def final_loss(make, lr, seed, steps):
    """The training loss over all images after so many steps of shuffled batches."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    x = (x - x.mean()) / x.std()
    torch.manual_seed(seed)
    model = MLP(WIDTH, inputs=64)
    optimizer = make(model, lr)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < BATCH:
            order = torch.randperm(len(x))
        batch, order = order[:BATCH], order[BATCH:]
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    return loss if loss == loss else float("inf")  # a loss that is not a number is no loss


def compare(steps=STEPS, seeds=SEEDS):
    """By optimizer: the best learning rate and its losses, over seeds; the worst seed decides what is best."""
    results = {}
    for name, (make, rates) in OPTIMIZERS.items():
        losses = {lr: [final_loss(make, lr, seed, steps) for seed in seeds] for lr in rates}
        best = min(losses, key=lambda lr: max(losses[lr]))
        results[name] = (best, losses)
        print(f"{name:32} best lr {best:<8g} loss {max(losses[best]):.2e}", flush=True)
    return results


def table(results, steps):
    lines = [f"| {steps} steps | learning rates tried | best | training loss, worst of {len(SEEDS)} seeds |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, (best, losses) in results.items():
        tried = ", ".join(f"{lr:g}" for lr in losses)
        lines.append(f"| {name} | {tried} | {best:g} | {max(losses[best]):.1e} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace what stands between the page's <!-- digits --> markers")
    page = parser.parse_args().write
    made = table(compare(), STEPS)
    print(made)
    if page is not None:
        marker = "<!-- digits -->"
        text = re.sub(
            rf"{marker}.*{marker}", lambda _: f"{marker}\n{made}\n{marker}", page.read_text(), flags=re.DOTALL
        )
        page.write_text(text)


if __name__ == "__main__":
    main()
