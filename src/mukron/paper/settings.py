"""What the recipes share: the paper's settings (its appendix B), and how a smoke run is derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mukron.optim import spec_of
from mukron.paper.recipe import Scale
from mukron.study.design import Design
from mukron.train import RunConfig

PAPER_SAMPLES = 1024  # in nearly all of the paper's experiments
HEURISTIC, RESCALED = "heuristic", "rescaled"
DEEP_MODELS = ("resnet18", "resnet50", "vgg19")  # their steps take long
SYNTHETIC_DATA = {  # data of smoke runs, for models that cannot be trained on digits
    "vgg19": "mukron.paper.synthetic:large_digits",
    "cbow": "mukron.paper.synthetic:sentences",
}

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
    "and does not give it. The authors' public code initializes with kaiming_normal_(a=1), which is this variance."
)
TORCHS = "Torch's own initial weights, uniform with a third of the variance: "  # a result follows
FLOOR = "Damping: the rescaled rule without mukron's floor, as the paper has it."


def powers(low: int, high: int, step: int = 1) -> tuple[float, ...]:
    """Returns the powers of two 2^low, ..., 2^high.

    Args:
        low: The lowest exponent.
        high: The highest exponent.
        step: The step between exponents.

    Returns:
        The powers.

    Example:
        >>> powers(-2, 1)
        (0.25, 0.5, 1.0, 2.0)
    """
    return tuple(2.0**z for z in range(low, high + 1, step))


def rescaled(rho: float) -> str:
    """Returns the rescaled damping rule without a floor, as the paper defines it.

    Args:
        rho: The rule's number.

    Returns:
        The rule as configurations spell it.

    Example:
        >>> rescaled(10)
        'rescaled:10,0'
    """
    return f"{RESCALED}:{rho:g},0"


def heuristic(rho: float) -> str:
    """Returns the heuristic damping rule.

    Args:
        rho: The rule's number.

    Returns:
        The rule as configurations spell it.

    Example:
        >>> heuristic(0.001)
        'heuristic:0.001'
    """
    return f"{HEURISTIC}:{rho:g}"


def roots(scale: Scale) -> str:
    """Returns the solver of Shampoo's roots: matrix products at the paper's scale (a GPU), else eigenvalues.

    Args:
        scale: The scale.

    Returns:
        The solver's name.

    Example:
        >>> roots(Scale.PAPER)
        'newton'
    """
    return scale.choose("eigh", "eigh", "newton")


def setting(scale: Scale, **fields: Any) -> RunConfig:
    """Returns the configuration of a run; a smoke run trains the same on a few digits for a few steps.

    Steps are the paper's plain ones, without a bound, unless the recipe says otherwise.

    Args:
        scale: The scale.
        **fields: The fields of ``RunConfig`` at the paper's scale.

    Returns:
        The configuration.

    Example:
        >>> setting(Scale.SMOKE, model="mlp", data="mnist", method="kfac", epochs=20).data
        'digits'
    """
    if "trust" in spec_of(fields["method"]).known_options:
        fields["method_options"] = {**fields.get("method_options", {})}
        fields["method_options"].setdefault("trust", "none")
    return RunConfig(**fields if scale is not Scale.SMOKE else _smoke(fields))


def _smoke(fields: Mapping[str, Any]) -> dict[str, Any]:
    model, batch = fields["model"], fields.get("batch")
    steps = 1 if model in DEEP_MODELS else 2  # steps per epoch, if there are batches, and epochs
    record = tuple(name for name in fields.get("record", ()) if name != "words")  # synthetic text has no word lists
    changes: dict[str, Any] = {
        "data": SYNTHETIC_DATA.get(model, "digits"),
        "data_options": {},
        "samples": 8,
        "test_samples": 8,
    }
    changes |= {"epochs": steps, "batch": None if batch is None else min(batch, 8 // steps), "evaluate_every": 1}
    changes |= {"warmup": 0.0, "augment": (), "record": record}
    if fields["method"] == "shampoo":  # in blocks: no roots of large matrices
        changes["method_options"] = {**fields.get("method_options", {}), "block": 64}
    return {**fields, **changes}


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
    """Returns a part that is a study; a smoke run takes two widths and settings (deep networks one) and one seed.

    Args:
        scale: The scale.
        config: The run, without scheme, width, learning rate, damping and seed.
        scheme: The scheme, or several, as in "mup/rescaled:1,0".
        widths: The widths.
        lr: The learning rates.
        damping: Factors on each scheme's damping.
        seeds: The number of seeds.
        metric: The metric by which the best setting is chosen.

    Returns:
        The part.

    Example:
        >>> config = setting(Scale.SMALL, model="mlp", method="kfac")
        >>> study(Scale.SMALL, config, "mup", widths=(64, 128), lr=powers(-4, -1), seeds=2).total
        16
    """
    if scale is Scale.SMOKE:
        few = 1 if config.model in DEEP_MODELS else 2
        widths, lr, damping, seeds = widths[:few], _few(lr, few), _few(damping, few), 1
    schemes = (scheme,) if isinstance(scheme, str) else scheme
    return Design(config, widths=widths, schemes=schemes, lr=lr, damping=damping, seeds=seeds, metric=metric)


def _few(values: tuple[float, ...], few: int) -> tuple[float, ...]:
    """Returns the first and the middle value."""
    return (values[0], values[len(values) // 2])[: min(few, len(values))]
