"""See features being learned at every width: SGD and AdamW under the standard parametrization (SP) and under muP.

    python examples/feature_learning.py                       # the table
    python examples/feature_learning.py --figure features     # and features.svg, features.png, features.csv

A three-layer MLP is trained for three full-batch steps at widths 256 to 2048. The slope of log |change| against log
width is 0 where a layer learns alike at every width, negative where it stops learning, positive where it blows up.
Beside it stands what theory predicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import nn
from torch.optim import Optimizer

from mukron import Parametrization, figures
from mukron.diagnose import Check, Measurement, coordinate_check
from mukron.models import MLP

INPUTS, CLASSES, SAMPLES, BASE_WIDTH = 32, 10, 64, 64
WIDTHS, SEEDS, STEPS = (256, 512, 1024, 2048), range(3), 3
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LAYERS = {"fc1": "input", "fc2": "hidden", "output": "output"}
TITLES = {"sp": "SP", "mup": "muP", "sgd": "SGD", "adamw": "AdamW"}
# Under SP some layers move by a power of the width: small steps keep all of it in the linear regime.
LEARNING_RATES = {("sgd", "mup"): 0.1, ("adamw", "mup"): 0.01, ("sgd", "sp"): 1e-6, ("adamw", "sp"): 1e-6}


def make(width: int) -> MLP:
    model = MLP(width, inputs=INPUTS, classes=CLASSES).double()
    for weight in model.parameters():
        nn.init.kaiming_normal_(weight, nonlinearity="linear")  # std = fan-in^-1/2
    return model


def optimizer(method: str, lr: float) -> Callable[[nn.Module, Parametrization], Optimizer]:
    return lambda _, plan: OPTIMIZERS[method](plan.param_groups(method, lr=lr))


def check(method: str, scheme: str) -> Check:
    data = torch.Generator().manual_seed(100)
    x = torch.randn(SAMPLES, INPUTS, generator=data, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=data)
    step = optimizer(method, LEARNING_RATES[method, scheme])
    wanted = {"widths": WIDTHS, "seeds": SEEDS, "steps": STEPS, "scheme": scheme}
    return coordinate_check(make, step, (x, y), base_width=BASE_WIDTH, **wanted)


def slopes(result: Check) -> dict[str, tuple[float, float]]:
    """Measured and predicted, by layer."""
    verdicts = {verdict.layer: verdict for verdict in result.features if verdict.reading == "features"}
    return {LAYERS[layer]: (verdicts[layer].measured.slope, verdicts[layer].predicted) for layer in LAYERS}


@figures.styled
def draw(results: dict[tuple[str, str], Check], path: Path) -> None:
    """One panel per method and scheme, one line per layer, each over its size at the narrowest width."""
    figure, axes = figures.panels(1, len(results), size=(2.6, 2.9), sharey=True)
    for axis, ((method, scheme), result) in zip(axes[0], results.items(), strict=True):
        for number, (layer, role) in enumerate(LAYERS.items()):
            rows = result.record.select("features", layer)
            means = [fmean(row.value for row in rows if row.width == width) for width in WIDTHS]
            label = f"{role}, slope {slopes(result)[role][0]:+.2f}"
            axis.plot(WIDTHS, [mean / means[0] for mean in means], label=label, **figures.line(number))
        axis.set(title=f"{TITLES[method]}, {TITLES[scheme]}", yscale="log")
        figures.widths_axis(axis, WIDTHS)
        axis.legend(loc="upper left")
    axes[0, 0].set(ylabel=f"change of features\nover that at width {WIDTHS[0]}", ylim=(0.2, 400))
    figures.save(figure, path)
    numbers = [
        (method, scheme, *row)
        for (method, scheme), result in results.items()
        for layer in LAYERS
        for row in result.record.select("features", layer)
    ]
    figures.write_csv(path, ("method", "scheme", *Measurement._fields), numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="write FIGURE.svg, FIGURE.png and FIGURE.csv")
    path = parser.parse_args().figure
    results = {}
    print(f"{'method':8}{'scheme':8}" + "".join(f"{role + ' (predicted)':>22}" for role in LAYERS.values()))
    for method in OPTIMIZERS:
        for scheme in ("sp", "mup"):
            results[method, scheme] = check(method, scheme)
            both = slopes(results[method, scheme]).values()
            cells = "".join(f"{f'{measured:+.3f} ({predicted:+.1f})':>22}" for measured, predicted in both)
            print(f"{method:8}{scheme:8}{cells}", flush=True)
    if path is not None:
        draw(results, path)


if __name__ == "__main__":
    main()
