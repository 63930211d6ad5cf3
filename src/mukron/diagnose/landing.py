"""The NNGP trap: from an output layer of zero, K-FAC's first step arrives at kernel regression.

The first steps of other methods do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from mukron import figures
from mukron.data import Dataset, centred_one_hot
from mukron.diagnose.nngp import approach, feature_kernel, one_step_rate, one_step_ridge
from mukron.diagnose.nngp_record import Approach, ApproachStep
from mukron.models import MLP
from mukron.notebook import Shown
from mukron.optim import KFAC, Shampoo
from mukron.params import Parametrization, base_shapes, parametrize
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.table import Table
from mukron.typed import fields_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND, VERSION = "landing", 1
BASE_WIDTH, RESCALED_DAMPING = 64, 1.0
AFTER = 0.01  # K-FAC's learning rate after the first step


@dataclass(frozen=True, repr=False)
class Landing(Shown):
    """How the outputs of each method approach kernel regression on the initial features, step by step.

    Attributes:
        runs: The runs, by method and output layer.

    Example:
        >>> from mukron.diagnose import Approach, ApproachStep
        >>> from mukron.diagnose.landing import Landing
        >>> states = ApproachStep(0, 0.5, 0.0, 1.0, 0.0), ApproachStep(1, 0.1, 1.0, 0.0, 1.0)
        >>> Landing({"K-FAC": Approach(states, ridge=0.1)}).table().columns[1]
        'step 1'
    """

    runs: Mapping[str, Approach]

    def table(self) -> Table:
        """Tabulate the correlations with kernel regression, with one row per run."""
        steps = sorted({0, 1, 2, 5, 10, *(run.rows[-1].step for run in self.runs.values())} - {0})
        rows = []
        for name, run in self.runs.items():
            states = {row.step: row for row in run.rows}
            cells = [f"{states[step].correlation:.4f}" if step in states else "-" for step in steps]
            rows.append((name, *cells, f"{run.rows[-1].loss:.4f}"))
        columns = ("", *(f"step {step}" for step in steps), "last loss")
        note = "correlation of the change of the outputs with kernel regression on the first features"
        return Table("Who lands on kernel regression?", columns, tuple(rows), (note,))

    @figures.styled
    def figure(self) -> Figure:
        """Draw the correlations and the losses over the steps; it needs matplotlib."""
        figure, axes = figures.panels(1, 2, size=(4.2, 2.9))
        for axis, quantity in zip(axes[0], ("correlation", "loss"), strict=True):
            for number, (name, run) in enumerate(self.runs.items()):
                points = [(row.step, getattr(row, quantity)) for row in run.rows if row.step > 0]
                axis.plot(*zip(*points, strict=True), label=name, **figures.line(number))
            axis.set(title=f"{quantity} with kernel regression" if quantity == "correlation" else "loss", xlabel="step")
        axes[0, 1].set_yscale("log")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
        return figure

    plot = figure

    def _summary(self) -> list[str]:
        table = self.table()
        return [
            table.title,
            *(f"{row[0]}: correlation {row[-2]} after the last step, loss {row[-1]}" for row in table.rows),
        ]

    def _tables(self) -> list[Table]:
        return [self.table()]

    def to_dict(self) -> dict[str, Any]:
        """Return the runs as plain data for JSON."""
        return stamp(KIND, VERSION, {"runs": {name: run.to_dict() for name, run in self.runs.items()}})

    @classmethod
    def load(cls, path: str | Path) -> Landing:
        """Load the runs from an ``nngp.json``.

        Args:
            path: The path of the file.

        Returns:
            The runs.

        Raises:
            ValueError: The file does not hold such runs, or is damaged.
        """
        content = check_stamp(read_json(path), KIND, VERSION, str(path))
        with damaged(str(path)):
            return cls({name: Approach.from_dict(run) for name, run in fields_of(content["runs"], "runs").items()})

    def save(self, folder: str | Path) -> list[Path]:
        """Write nngp.json, nngp.svg, nngp.png and nngp.csv.

        Args:
            folder: The folder to write to. It is created if it does not exist.

        Returns:
            The paths of the files.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "nngp.json", self.to_dict())
        rows = [(name, *row) for name, run in self.runs.items() for row in run.rows]
        images = figures.save(self.figure(), folder / "nngp")
        return [folder / "nngp.json", *images, figures.write_csv(folder / "nngp", ("run", *ApproachStep._fields), rows)]


def landing(
    dataset: Dataset,
    *,
    width: int = 256,
    steps: int = 30,
    seed: int = 0,
    activation: str = "relu",
    progress: Callable[[int, int, str], None] | None = None,
) -> Landing:
    """Compare methods in how their outputs approach kernel regression on the initial features.

    Each method trains a three-layer MLP on the full batch with the squared error, beginning with an output layer of
    zero; K-FAC also begins with the output layer of muP.

    Args:
        dataset: The data set; all its training samples are used.
        width: The width of the MLP.
        steps: The number of steps of every run.
        seed: The seed of the initial weights.
        activation: The activation of the MLP.
        progress: Called with the number of runs that are done, the number of all runs, and the run that begins.

    Returns:
        The runs.

    Example:
        >>> from mukron.data import load
        >>> from mukron.diagnose.landing import landing
        >>> runs = landing(load("digits", samples=8), width=64, steps=1).runs
        >>> round(runs["K-FAC, output layer at zero"].rows[1].correlation, 3)
        1.0
    """
    x, classes = dataset.prepare(dataset.train.inputs), dataset.classes
    targets = centred_one_hot(dataset.train.targets, classes)

    def factory(width: int) -> nn.Module:
        return MLP(width, inputs=x[0].numel(), classes=classes, activation=activation)

    shapes = base_shapes(factory, BASE_WIDTH)

    def start(exponent: str | None) -> tuple[nn.Module, Parametrization]:
        torch.manual_seed(seed)
        model = factory(width).to(x.device)
        return model, parametrize(model, shapes, output_exponent=exponent)

    methods: dict[str, tuple[str | None, Callable[[nn.Module, Parametrization], Optimizer]]] = {
        "K-FAC, output layer at zero": ("zero", lambda model, plan: _landing_kfac(model, plan, classes)),
        "Shampoo, output layer at zero": (
            "zero",
            lambda model, plan: Shampoo(model, plan, lr=0.01, damping=1e-3, trust=None),
        ),
        "SGD, output layer at zero": ("zero", lambda _, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.2))),
        "K-FAC, output layer as muP has it": (None, lambda model, plan: _kfac(model, plan, lr=0.1)),
    }
    runs = {}
    for number, (name, (exponent, optimizer)) in enumerate(methods.items()):
        if progress is not None:
            progress(number, len(methods), name)
        model, plan = start(exponent)
        ridge = one_step_ridge(feature_kernel(model, x), damping=RESCALED_DAMPING, base_size=BASE_WIDTH)
        with warnings.catch_warnings():
            # K-FAC warns of the effect that is shown here.
            warnings.filterwarnings("ignore", message="output layer", category=UserWarning)
            built = optimizer(model, plan)
        runs[name] = approach(model, built, x, targets, steps=steps, ridge=ridge)
    return Landing(runs)


def _kfac(model: nn.Module, plan: Parametrization, lr: float) -> KFAC:
    return KFAC(model, plan, lr=lr, damping=RESCALED_DAMPING, fisher="exact", likelihood="gaussian", trust=None)


def _landing_kfac(model: nn.Module, plan: Parametrization, classes: int) -> KFAC:
    """Return K-FAC whose first step has the size that arrives at kernel regression, and whose later steps are small."""
    optimizer = _kfac(model, plan, lr=one_step_rate(damping=RESCALED_DAMPING, classes=classes))

    def lower_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = AFTER

    optimizer.register_step_post_hook(lower_rate)
    return optimizer


__all__ = ["Landing", "landing"]
