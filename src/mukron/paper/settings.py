"""What the recipes have in common: the paper's settings (its appendix B), and how a smoke run is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mukron.paper.recipe import Scale
from mukron.study.design import Design
from mukron.train import RunConfig

SAMPLES = 1024  # of nearly all of the paper's experiments
HEURISTIC, RESCALED = "heuristic", "rescaled"
DEEP = ("resnet18", "resnet50", "vgg19")  # whose steps take long
MADE = {"vgg19": "mukron.paper.made:large_digits", "cbow": "mukron.paper.made:sentences"}  # where digits do not fit

FULL_BATCH = "Batch size: not given; all samples in one batch."
BATCH_128 = "Batch size: not given for this figure; 128, as the paper has it for ResNet-18 elsewhere."
MOMENTUM = "Momentum: not given; 0.9, since the appendix names the figures without momentum."
GRID = "Learning rates and widths: the paper shows them in its plots alone; these are ours."
SEEDS = "Seeds: not given; 2 at the paper's scale, and 1 of ResNet-18."
BASE = (
    "Base width: muP says how settings change with the width, not what they are; the paper's constants are those at "
    "the base width."
)
NORMAL = {"sigma": 1.0}  # options of the MLP and the CNN
WEIGHTS = (
    "Initial weights of the MLP and the CNN: normal with variance 1 / fan-in; the paper has another constant for the 1 "
    "and does not give it."
)
TORCHS = "Torch's own initial weights, uniform with a third of the variance: "  # what was found with them
FLOOR = "Damping: the rescaled rule without mukron's floor, as the paper has it."


def powers(low: int, high: int, step: int = 1) -> tuple[float, ...]:
    """2^low, ..., 2^high."""
    return tuple(2.0**z for z in range(low, high + 1, step))


def rescaled(rho: float) -> str:
    """The paper's rule: no floor."""
    return f"{RESCALED}:{rho:g},0"


def heuristic(rho: float) -> str:
    return f"{HEURISTIC}:{rho:g}"


def roots(scale: Scale) -> str:
    """How Shampoo's are computed: by matrix products on a GPU, by eigenvalues on cores."""
    return scale.choose("eigh", "eigh", "newton")


def setting(scale: Scale, **fields: Any) -> RunConfig:
    """The paper's run; for smoke the same one on a few digits, for a few steps."""
    return RunConfig(**fields if scale is not Scale.SMOKE else _smoke(fields))


def _smoke(fields: Mapping[str, Any]) -> dict[str, Any]:
    model, batch = fields["model"], fields.get("batch")
    steps = 1 if model in DEEP else 2  # an epoch, where there are batches; and epochs
    record = tuple(each for each in fields.get("record", ()) if each != "words")  # a made language has no word lists
    made: dict[str, Any] = {"data": MADE.get(model, "digits"), "data_options": {}, "samples": 8, "test_samples": 8}
    made |= {"epochs": steps, "batch": None if batch is None else min(batch, 8 // steps), "evaluate_every": 1}
    made |= {"warmup": 0.0, "augment": (), "record": record}
    if fields["method"] == "shampoo":  # of long sides the diagonal: no roots of large matrices
        made["method_options"] = {**fields.get("method_options", {}), "max_size": 64}
    return {**fields, **made}


def study(
    scale: Scale,
    config: RunConfig,
    scheme: str | tuple[str, ...],
    *,
    widths: tuple[float, ...],
    lr: tuple[float, ...],
    damping: tuple[float, ...] = (1.0,),
    seeds: int = 2,
    metric: str = "test_accuracy",
) -> Design:
    """A part: of what is given for the paper's scale, smoke takes two settings, two widths (deep networks one), and
    one seed."""
    if scale is Scale.SMOKE:
        few = 1 if config.model in DEEP else 2
        widths, lr, damping, seeds = widths[:few], _few(lr, few), _few(damping, few), 1
    schemes = (scheme,) if isinstance(scheme, str) else scheme
    return Design(config, widths=widths, schemes=schemes, lr=lr, damping=damping, seeds=seeds, metric=metric)


def _few(values: tuple[float, ...], few: int) -> tuple[float, ...]:
    """The first and the middle one."""
    return (values[0], values[len(values) // 2])[: min(few, len(values))]
