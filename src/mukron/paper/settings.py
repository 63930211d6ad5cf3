"""What the recipes have in common: the paper's settings (its appendix B), and how a smoke run is made of them."""

from __future__ import annotations

from typing import Any

from mukron.paper.recipe import Scale
from mukron.study.design import Design
from mukron.train import RunConfig

SAMPLES = 1024  # of nearly all of the paper's experiments
HEURISTIC, RESCALED = "heuristic", "rescaled"

FULL_BATCH = "Batch size: not given; all samples in one batch."
BATCH_128 = "Batch size: not given for this figure; 128, as the paper has it for ResNet-18 elsewhere."
MOMENTUM = "Momentum: not given; 0.9, since the appendix names the figures without momentum."
GRID = "Learning rates and widths: the paper shows them in its plots alone; these are ours."
SEEDS = "Seeds: not given; 2, and 1 of ResNet-18."
BASE = (
    "Base width: muP says how settings change with the width, not what they are; the paper's constants are those at "
    "the base width."
)
FLOOR = "Damping: the rescaled rule without mukron's floor, as the paper has it."


def powers(low: int, high: int, step: int = 1) -> tuple[float, ...]:
    """2^low, ..., 2^high."""
    return tuple(2.0**z for z in range(low, high + 1, step))


def rescaled(rho: float) -> str:
    """The paper's rule: no floor."""
    return f"{RESCALED}:{rho:g},0"


def heuristic(rho: float) -> str:
    return f"{HEURISTIC}:{rho:g}"


def setting(scale: Scale, **fields: Any) -> RunConfig:
    """The paper's run; for smoke the same one on a few digits, for two steps or so."""
    if scale is Scale.SMOKE:
        data = "mukron.paper.made:large_digits" if fields.get("model") == "vgg19" else "digits"
        data = "mukron.paper.made:sentences" if fields.get("model") == "cbow" else data
        batch = fields.get("batch")
        fields |= {"data": data, "data_options": {}, "samples": 32, "test_samples": 32, "epochs": 2, "warmup": 0.0}
        fields |= {"batch": None if batch is None else min(batch, 16), "augment": (), "evaluate_every": 1}
        fields["record"] = tuple(each for each in fields.get("record", ()) if each != "words")
    return RunConfig(**fields)


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
    """A part: of what is given for the paper's scale, smoke takes two ends and one seed."""
    if scale is Scale.SMOKE:
        widths, lr, damping, seeds = widths[:2], _ends(lr), _ends(damping), 1
    schemes = (scheme,) if isinstance(scheme, str) else scheme
    return Design(config, tuple(widths), schemes, tuple(lr), tuple(damping), tuple(range(seeds)), None, metric)


def _ends(values: tuple[float, ...]) -> tuple[float, ...]:
    return values[:1] if len(values) == 1 else (values[0], values[len(values) // 2])
