"""What a reader of a result has to know of how it was run, read off the configurations of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mukron.optim import spec_of
from mukron.paper.recipe import Checking, Part, Regression
from mukron.study.design import Design
from mukron.theory import method_title
from mukron.train import RunConfig

ROUNDED_PRODUCTS = "tf32"
OWN_WEIGHTS = ("mlp", "cnn")  # networks whose initial weights have a choice, sigma


def disclosures(parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Returns what is to be disclosed of a recipe's parts, in sentences.

    Args:
        parts: The parts by name.

    Returns:
        The sentences; none for a recipe that runs nothing.

    Example:
        >>> disclosures({"MLP": Checking(RunConfig(method="sgd", lr=0.5), (64.0, 128.0))})
        ('Learning rates: MLP 0.5.', "Initial weights of mlp: torch's own, uniform with variance 1 / (3 fan-in).")
    """
    return tuple(_disclosed(parts))


def _disclosed(parts: Mapping[str, Part]) -> Iterator[str]:
    parts = {name: part for name, part in parts.items() if not isinstance(part, Regression)}
    configs = [part.config for part in parts.values()]
    checks = {name: part.config.lr for name, part in parts.items() if isinstance(part, Checking)}
    if checks:
        yield f"Learning rates: {'; '.join(f'{name} {lr:g}' for name, lr in checks.items())}."
    if any(_draws_targets(config) for config in configs):
        yield (
            "Fisher: Monte-Carlo, one target drawn from the model for each sample and step. The paper does not say how "
            "it takes the expectation over targets."
        )
    if which := _rounded(parts):
        yield f"Matrix products and convolutions in tf32, 10 bits of mantissa: {which}."
    if any("heuristic" in rule for part in parts.values() for rule in _rules(part)):
        yield (
            "Heuristic damping: the product of rho_A and rho_B is rho, as implementations have it; the paper prints "
            "rho_B = 1 / rho_A, a product of 1."
        )
    for model in OWN_WEIGHTS:
        own = [config for config in configs if config.model == model and "sigma" not in config.model_options]
        if own:
            yield f"Initial weights of {model}: torch's own, uniform with variance 1 / (3 fan-in)."


def _rounded(parts: Mapping[str, Part]) -> str:
    """Returns which parts round products to tf32: by their methods, if these tell them from the others."""
    rounded = {name: part.config.method for name, part in parts.items() if part.config.dtype == ROUNDED_PRODUCTS}
    exact = {part.config.method for part in parts.values() if part.config.dtype != ROUNDED_PRODUCTS}
    if rounded and not exact:
        return "all parts"
    if set(rounded.values()) & exact:
        return "; ".join(rounded)
    return ", ".join(method_title(method) for method in dict.fromkeys(rounded.values()))


def _draws_targets(config: RunConfig) -> bool:
    """Whether the run's Fisher is of targets drawn once: what is used for the plain step where nothing is said."""
    options = config.method_options
    if "fisher" not in spec_of(config.method).known_options:
        return False
    if options.get("fisher"):
        return str(options["fisher"]) == "mc"
    return str(options.get("trust", "")) == "none"


def _rules(part: Part) -> Iterator[str]:
    if not isinstance(part, Design):
        yield "" if part.config.damping is None else part.config.damping.text()
    else:
        yield from (scheme.partition("/")[2] for scheme in part.schemes)
