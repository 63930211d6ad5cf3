"""Coordinate checks of damping rules on a GPT: fixed tokens in a batch, and tokens proportional to the width.

Trains a GPT of one block on the bytes of a text that comes with the package, at several widths. Fits the change of the
output of each matrix in the block, and the part of it that is the matrix's own update, by a power of the width. Steps
are plain (no trust, no momentum), factors are averaged, and the batch is the same at every step. Runs that
coordinates.csv holds are not run again; then the table of docs/gpt-damping.md is written. About 20 minutes on one core.

    python docs/figures/gpt-damping/coordinates.py
"""

import csv
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from mukron import FOOF, KFAC, Shampoo
from mukron.damping import Rule
from mukron.data import load
from mukron.diagnose import TrainingSetup, record_runs
from mukron.diagnose.record import OUTPUT
from mukron.diagnose.runs import suitable_rate
from mukron.exponents import fit_exponent
from mukron.models import GPT
from mukron.params import base_shapes, parametrize

HERE = Path(__file__).resolve().parent
NUMBERS, PAGE, MARKER = HERE / "coordinates.csv", HERE.parents[1] / "gpt-damping.md", "<!-- coordinates -->"
WIDTHS, SEEDS, STEPS, STABLE = (64, 128, 256), (0, 1), 10, 0.12
PLAIN = {"memory": "ema:0.95", "trust": None, "momentum": 0.0}
METHODS = {  # each with its learning rate at most, which is lowered until steps are small at the narrowest width
    "K-FAC": (partial(KFAC, class_dim=-1, **PLAIN), 0.01),
    # positions are called once for all samples: FOOF's steps for them grow with the batch, and hide those of the block
    "FOOF": (partial(FOOF, exclude=("tokens", "positions"), **PLAIN), 0.02),
    "Shampoo": (partial(Shampoo, **PLAIN), 0.005),
    "SGD": (lambda model, plan, lr, damping: torch.optim.SGD(plan.param_groups("sgd", lr=lr)), 0.1),
}
POSITIONS = 16
BATCHES = {"16": lambda width: 16, "512": lambda width: 512, "8 x width": lambda width: 8 * width}
DAMPINGS = {
    "K-FAC": {"rescaled": ("0.0625", "1", "16"), "mean-eigenvalue": ("0.0625", "1", "16")},
    "FOOF": {"rescaled": ("0.0625", "1", "16"), "mean-eigenvalue": ("0.0625", "1", "16")},
    "Shampoo": {
        "max-eigenvalue": ("1e-8", "1e-6", "1e-2"),
        "rescaled": ("1e-5", "1e-3", "1e-1"),
        "mean-eigenvalue": ("1e-5", "1e-3", "1e-1"),
    },
    "SGD": {"": ("",)},  # without damping: what the batches alone do
}
KEYS = ("method", "rule", "damping", "batch", "width", "seed")


def network(width):
    return GPT(width, depth=1)


def is_kept(row):
    """The change of a layer's output, or a block matrix's part in it."""
    if row.quantity == "features":
        return row.layer not in ("head", OUTPUT)  # whose change has a part that falls with the width
    return row.quantity == "update" and row.layer.startswith("blocks") and "norm" not in row.layer


def measured(method, rule, damping, batch):
    """The changes after the last step: one row a width and seed."""
    make, lr = METHODS[method]
    split, shapes = load("coriolanus", length=POSITIONS).train, base_shapes(network, width=WIDTHS[0])
    samples = {width: BATCHES[batch](width) // POSITIONS for width in WIDTHS}
    fewest = samples[WIDTHS[0]]  # features are measured on the tokens that every width learns

    def start(width, seed, lr):
        torch.manual_seed(seed)
        model = network(width)
        plan = parametrize(model, shapes)
        own = Rule.parse(f"{rule}:{damping}") if rule else None
        optimizer, inputs = make(model, plan, lr=lr, damping=own), split.inputs[: samples[width]]
        return TrainingSetup(model, plan, optimizer, lambda _: model(inputs))

    def loss(logits, _):
        return F.cross_entropy(logits.flatten(0, 1), split.targets[: len(logits)].flatten())

    common = split.inputs[:fewest], split.targets[:fewest]
    lr = suitable_rate(lambda lr: start(WIDTHS[0], 0, lr), common, loss, lr, STEPS)
    record = record_runs(
        lambda width, seed: start(int(width), seed, lr),
        *(common, loss),
        **{"widths": WIDTHS, "seeds": SEEDS, "steps": STEPS, "probes": ("features",)},
    )
    if record.broken:
        raise RuntimeError(f"{method}, {rule}:{damping}, {batch} tokens: {record.broken}")
    for width in WIDTHS:
        for seed in SEEDS:
            own = [row for row in record.rows if (row.width, row.seed, row.step) == (width, seed, STEPS)]
            changes = {row.layer: f"{row.value:.6g}" for row in own if is_kept(row)}
            of_run = dict(zip(KEYS, (method, rule, damping, batch, width, seed), strict=True))
            yield {**of_run, "lr": f"{lr:g}", **changes}


def read():
    """The rows of coordinates.csv by method, rule, damping and batch."""
    runs = {}
    if NUMBERS.exists():
        with NUMBERS.open(newline="") as file:
            for row in csv.DictReader(file):
                runs.setdefault(tuple(row[key] for key in KEYS[:4]), []).append(row)
    return runs


def slopes(rows):
    """The exponents of the changes of the outputs of all matrices in the block, and of their own updates."""
    widths, numbers = [float(row["width"]) for row in rows], [name for name in rows[0] if "blocks" in name]
    found = {name: fit_exponent(widths, [float(row[name]) for row in rows]).slope for name in numbers}
    updates = [slope for name, slope in found.items() if name.endswith(".weight")]
    features = [slope for name, slope in found.items() if not name.endswith((".weight", "norm1", "norm2"))]
    return features, updates


def is_stable(rows):
    features, updates = slopes(rows)
    return max(map(abs, (*features, *updates))) < STABLE


def cell(rows):
    """The ranges of the exponents of features and of own updates; bold: all are stable."""
    bold = "**" if is_stable(rows) else ""
    return bold + "; ".join(f"{min(found):+.2f} to {max(found):+.2f}" for found in slopes(rows)) + bold


def table(runs):
    """Markdown: a row a method, batch and rule, with one column each for a small, a usual and a large damping."""
    lines = ["| method | tokens | rule | small damping | middle | large |", "| --- | --- | --- | --- | --- | --- |"]
    for method, rules in DAMPINGS.items():
        for batch in BATCHES:
            for rule, dampings in rules.items():
                of = [(damping, runs.get((method, rule, damping, batch))) for damping in dampings]
                cells = ["not run" if rows is None else f"{damping}: {cell(rows)}".lstrip(": ") for damping, rows in of]
                cells += [""] * (3 - len(cells))
                lines.append(f"| {' | '.join((method, batch, rule or 'none', *cells))} |")
    return "\n".join(lines)


def run():
    done = read()
    wanted = [
        (method, rule, damping, batch)
        for batch in BATCHES
        for method, rules in DAMPINGS.items()
        for rule, dampings in rules.items()
        for damping in dampings
    ]
    for key in wanted:
        if key in done:
            continue
        rows = list(measured(*key))  # all widths and seeds, or nothing
        new = not NUMBERS.exists()
        with NUMBERS.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
        print(*key, cell(rows), flush=True)


def write():
    """Replace what stands between the page's markers."""
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARKER)
    PAGE.write_text(f"{before}{MARKER}\n{table(read())}\n{MARKER}{after}", encoding="utf-8")


if __name__ == "__main__":
    run()
    write()
