"""See features being learned at every width: measure how much they move, and fit the power of the width.

    python examples/feature_learning.py                       # the table
    python examples/feature_learning.py --figure features     # and features.svg, features.png, features.csv

A three-layer MLP is trained for three full-batch steps at widths 256 to 2048 with torch's own SGD and AdamW, under the
standard parametrization (SP) and under muP. The slope of log |change| against log width is 0 where a layer learns alike
at every width, negative where it stops learning, positive where it blows up. Beside it stands what theory predicts.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.models import MLP
from mukron.theory import feature_slopes, solve

INPUTS, CLASSES, SAMPLES, BASE_WIDTH = 32, 10, 64, 64
WIDTHS, SEEDS, STEPS = (256, 512, 1024, 2048), range(3), 3
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LAYERS = ("input", "hidden", "output")
# Under SP some layers move by a power of the width: small steps keep all of it in the linear regime.
LEARNING_RATES = {("sgd", "mup"): 0.1, ("adamw", "mup"): 0.01, ("sgd", "sp"): 1e-6, ("adamw", "sp"): 1e-6}


def make(width: int) -> MLP:
    model = MLP(width, inputs=INPUTS, classes=CLASSES).double()
    for weight in model.parameters():
        nn.init.kaiming_normal_(weight, nonlinearity="linear")  # std = fan-in^-1/2
    return model


def features(model: MLP, x: torch.Tensor) -> list[torch.Tensor]:
    """h_1 and h_2, after the activation, and the output."""
    kept = []
    with torch.no_grad():
        for layer in model:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                kept.append(x)
    return [*kept, x]


def change_of_features(method: str, scheme: str, width: int, seed: int) -> list[float]:
    """The coordinate size (root mean square) of each layer's change after a few full-batch steps."""
    data = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(SAMPLES, INPUTS, generator=data, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=data)
    torch.manual_seed(seed)
    model = make(width)
    plan = mukron.parametrize(model, mukron.base_shapes(make, width=BASE_WIDTH), scheme)
    optimizer = OPTIMIZERS[method](plan.param_groups(method, lr=LEARNING_RATES[method, scheme]))
    before = features(model, x)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [float((h - h0).square().mean().sqrt()) for h, h0 in zip(features(model, x), before, strict=True)]


def changes(method: str, scheme: str) -> np.ndarray:
    """[widths, layers], the mean over seeds."""
    return np.array(
        [np.mean([change_of_features(method, scheme, width, seed) for seed in SEEDS], axis=0) for width in WIDTHS]
    )


def slopes(sizes: np.ndarray) -> list[float]:
    return [float(slope) for slope in np.polyfit(np.log(WIDTHS), np.log(sizes), 1)[0]]


def predicted_slopes(method: str, scheme: str) -> list[float]:
    return [float(slope) for slope in feature_slopes(method, solve(method, scheme)).values()]


def draw(results: dict[tuple[str, str], np.ndarray], path: Path) -> None:
    """One panel a method and scheme, one line a layer, each over its size at the narrowest width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "mukron", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = plt.subplots(1, len(results), figsize=(10, 2.9), sharey=True, layout="constrained")
    titles = {"sp": "SP", "mup": "muP", "sgd": "SGD", "adamw": "AdamW"}
    style = list(zip(LAYERS, ("#0072B2", "#E69F00", "#009E73"), ("o", "s", "^"), strict=True))
    for axis, ((method, scheme), sizes) in zip(axes, results.items(), strict=True):
        for (layer, colour, marker), column, slope in zip(style, sizes.T, slopes(sizes), strict=True):
            label = f"{layer}, slope {slope:+.2f}"
            axis.loglog(WIDTHS, column / column[0], color=colour, marker=marker, markersize=4, label=label)
        axis.set(title=f"{titles[method]}, {titles[scheme]}", xlabel="width", xticks=WIDTHS, xticklabels=WIDTHS)
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8, loc="upper left")
    axes[0].set_ylabel("change of features\nover that at width 256")
    axes[0].set_ylim(0.2, 400)
    for ending, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
        figure.savefig(path.with_suffix(ending), **options)
    with path.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("method", "scheme", "layer", "width", "change"))
        for (method, scheme), sizes in results.items():
            for width, row in zip(WIDTHS, sizes, strict=True):
                for layer, size in zip(LAYERS, row, strict=True):
                    table.writerow((method, scheme, layer, width, f"{size:.6g}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="write FIGURE.svg, FIGURE.png and FIGURE.csv")
    path = parser.parse_args().figure
    results = {}
    print(f"{'method':8}{'scheme':8}" + "".join(f"{layer + ' (predicted)':>22}" for layer in LAYERS))
    for method in OPTIMIZERS:
        for scheme in ("sp", "mup"):
            sizes = results[method, scheme] = changes(method, scheme)
            both = zip(slopes(sizes), predicted_slopes(method, scheme), strict=True)
            cells = "".join(f"{f'{slope:+.3f} ({predicted:+.1f})':>22}" for slope, predicted in both)
            print(f"{method:8}{scheme:8}{cells}", flush=True)
    if path is not None:
        draw(results, path)


if __name__ == "__main__":
    main()
