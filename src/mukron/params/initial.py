"""Initial values: from what the user's initializer drew to what the scheme asks for.

The scheme fixes the std at any width from the std at the base width:  std = std_base * r_in^-b.
The initializer has its own dependence on the width, which must be known to correct for it. Initializers follow simple
laws, std ~ R^-k with k = 0 (GPT-2's 0.02), 1/2 (fan-in) or 1, where R is the growth of some dimension of the network.
The law of a parameter comes from the first of these that determines it:

1. A factory is built at two widths from the same random numbers. The values of a parameter then differ by one factor,
   which is the law without any sampling noise, even for a single number (``SameRandomNumbers``, ``scale_change``).
2. The measured std at both widths, whose relative noise is (2 N)^-1/2 for N normal numbers, if that suffices to tell
   the laws apart (``correction``).
3. The larger tensors of the same kind, such as the other biases of linear layers, or torch's own initializer, if all
   tensors of the kind agree with it (``law_of_kind``).

A known law gives an exact power as correction, the same for every seed. What no law explains, such as an orthogonal
matrix that turns from tall to wide, is corrected as measured if there are enough numbers. With few numbers the nearest
law is taken, so nothing is ever corrected by more than a law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LAWS = (Fraction(0), Fraction(1, 2), Fraction(1))
NOISE_SIGMAS = 4.0
STD_TOLERANCE = 0.005  # relative error of a std that does not matter
ENOUGH = 256  # numbers needed to trust a measured std that contradicts every law
PROBE_TOLERANCE = 0.02  # of the ratio between values drawn from the same random numbers; covers bfloat16's rounding
FEWEST_VALUES = 8  # numbers of a tensor whose std counts as evidence for others
RANDOM = {
    *("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
    *("normal", "normal_", "poisson", "random_", "uniform_"),
    *("kaiming_normal_", "kaiming_uniform_", "orthogonal_", "sparse_", "trunc_normal_"),  # of nn.init
    *("xavier_normal_", "xavier_uniform_"),
}
RENEWAL_INTERVAL = 1000  # random operations after which repeated draws get new numbers in any case
BLOCK = 16  # torch draws normal values in blocks of this size; the last, partial block differs between sizes


@dataclass(frozen=True)
class Spread:
    """Std of initial values: the root mean square of their distance from ``center``, measured over ``numbers``."""

    std: float  # 0: they are all equal
    numbers: int
    center: float = 0.0  # 0 unless the initializer clearly draws around something else, as around 1 for a gain
    kurtosis: float = 3.0  # 3 for normal values, 1.8 for uniform ones; determines the noise of a measured std


@dataclass(frozen=True)
class Law:
    """How an initializer depends on the width: std ~ R^-exponent, with R the growth of one side of one parameter."""

    exponent: Fraction
    parameter: str | None = None  # whose side it is; None if the exponent is 0
    side: str = "r_in"  # or "r_out"


@dataclass(frozen=True)
class StdAtTwoWidths:
    """The std of one parameter at both widths, and how much the fans of its layer grew in between."""

    base: Spread
    std: float
    numbers: int
    r_in: Fraction
    r_out: Fraction
    default: bool  # whether torch's own initializer, uniform in +-fan_in^-1/2, may have drawn it at both widths

    def growth(self, side: str) -> Fraction:
        return self.r_in if side == "r_in" else self.r_out

    @property
    def change(self) -> float:
        return math.log(self.std / self.base.std)

    @property
    def variance(self) -> float:
        return _variance(self.base, self.numbers)


def measure(draws: Sequence[Tensor]) -> Spread:
    """The spread of one parameter over several draws of its initializer."""
    values = torch.cat([draw.detach().flatten().double() for draw in draws])
    numbers = values.numel()
    if not numbers or not values.isfinite().all():
        return Spread(math.nan if numbers else 0.0, numbers)
    if bool((values == values[0]).all()):
        return Spread(0.0, numbers, float(values[0]))
    mean, deviation = float(values.mean()), float(values.std(correction=0))
    clearly_off = abs(mean) > 8 * deviation / math.sqrt(numbers) and numbers >= 16
    center = mean if clearly_off else 0.0
    std = distance(values, center)
    kurtosis = float(((values - center) / std).pow(4).mean()) if numbers >= 64 else 3.0
    return Spread(std, numbers, center, max(1.2, kurtosis))


def distance(values: Tensor, center: float) -> float:
    """The root mean square distance of a tensor's entries from ``center``."""
    values = values.detach()
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    return float((values - center if center else values).square().mean().sqrt())


def is_constant(values: Tensor) -> bool:
    """Whether all entries are equal."""
    return not values.numel() or bool((values == values.flatten()[0]).all())


class SameRandomNumbers(TorchFunctionMode):
    """Restarts torch's generator before every random operation.

    Two networks that are built alike at different widths then draw each of their tensors from the same numbers. What
    is drawn repeatedly in one shape, as by rejection sampling, gets new numbers each time, and so does everything after
    every ``RENEWAL_INTERVAL`` operations: no loop that waits for other numbers runs forever.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.operations = 0
        self.last = ""  # name and shape of the last random operation
        self.repeated = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in RANDOM:
            tensor = args[0] if args else kwargs.get("tensor")  # nn.init names its first argument
            shape = tensor.shape if isinstance(tensor, Tensor) else (args, kwargs.get("size"))
            operation = f"{name} {shape}"
            self.repeated = self.repeated + 1 if operation == self.last else 0
            self.last = operation
            seed = hash((self.seed, self.repeated, self.operations // RENEWAL_INTERVAL)) % 2**31
            self.operations += 1
            torch.default_generator.manual_seed(seed)
            if kwargs.get("generator") is not None:  # one of the user's own, which is left as it is
                kwargs = {**kwargs, "generator": torch.Generator(kwargs["generator"].device).manual_seed(seed)}
        return func(*args, **kwargs)


def scale_change(base: Sequence[Tensor], wider: Sequence[Tensor]) -> float | None:
    """The logarithm of the factor between one parameter's draws at two widths, from the same random numbers.

    Args:
        base: Draws at the base width, one per seed.
        wider: Draws at another width from the same seeds.

    Returns:
        log a if the values are related by y = a x, or by y = a x + c around another center; otherwise None.
    """
    size = min(base[0].numel(), wider[0].numel())
    if base[0].numel() != wider[0].numel() and size > BLOCK:
        size -= size % BLOCK
    x, y = (torch.cat([draw.detach().flatten()[:size].double() for draw in draws]) for draws in (base, wider))
    for shift in (False, True):
        if shift:
            x, y = x - x.mean(), y - y.mean()
        power = float(x.square().sum())
        if not 0 < power < math.inf or x.numel() < (4 if shift else 2):
            return None
        factor = float(x @ y) / power
        largest_error = float((y - factor * x).abs().max())
        if factor > 0 and largest_error <= PROBE_TOLERANCE * factor * math.sqrt(power / x.numel()):
            return math.log(factor)
    return None


def law_of_change(change: float, sources: Iterable[tuple[str, str, Fraction]]) -> Law | None:
    """The law that explains an exactly known change.

    Args:
        change: Logarithm of the factor by which values changed with the width.
        sources: Parameter, side and growth of what the initializer may have followed, the likeliest first.

    Returns:
        The first law that fits; None if none does.
    """
    if abs(change) <= PROBE_TOLERANCE:
        return Law(Fraction(0))
    for parameter, side, ratio in sources:
        for exponent in LAWS[1:]:
            if ratio != 1 and abs(change + float(exponent) * math.log(ratio)) <= PROBE_TOLERANCE:
                return Law(exponent, parameter, side)
    return None


def law_of_kind(target: StdAtTwoWidths, kind: Sequence[StdAtTwoWidths]) -> tuple[Fraction, Fraction] | None:
    """The law of a tensor with too few numbers, from all tensors of its kind.

    The most likely law is taken if all others that predict something else for ``target`` are excluded by
    ``NOISE_SIGMAS``. If not, torch's own initializer is assumed where all tensors agree with it, and a constant std
    where all have the same std at both widths.

    Args:
        target: The tensor in question.
        kind: All tensors of its kind, such as the biases of linear layers.

    Returns:
        Growth R and exponent k of the law std ~ R^-k for ``target``; None if it cannot be determined.
    """
    laws = [(LAWS[0], "r_in"), *((exponent, side) for side in ("r_in", "r_out") for exponent in LAWS[1:])]
    measured = [entry for entry in kind if min(entry.numbers, entry.base.numbers) >= FEWEST_VALUES]

    def prediction(law: tuple[Fraction, str], entry: StdAtTwoWidths) -> float:
        exponent, side = law
        return -float(exponent) * math.log(entry.growth(side))

    misfit = {
        law: sum(
            (entry.change - prediction(law, entry)) ** 2 / (entry.variance + STD_TOLERANCE**2) for entry in measured
        )
        for law in laws
    }
    best = min(laws, key=lambda law: misfit[law])
    others = [law for law in laws if prediction(law, target) != prediction(best, target)]
    if any(misfit[law] - misfit[best] < NOISE_SIGMAS**2 for law in others):
        if all(entry.default for entry in kind):
            best = Fraction(1, 2), "r_in"
        elif _have_one_std(measured):
            best = LAWS[0], "r_in"
        else:
            return None
    return target.growth(best[1]), best[0]


def may_be_default(largest: float, std: float, numbers: int, base: Spread, fan_in: int, base_fan_in: int) -> bool:
    """Whether torch's initializer of linear layers and convolutions, uniform in +-fan_in^-1/2, may have drawn values.

    Args:
        largest: The largest size of the values here.
        std: Their std around zero.
        numbers: How many there are.
        base: The values at the base width.
        fan_in: The layer's fan-in here.
        base_fan_in: Its fan-in at the base width.
    """
    bound, base_bound = fan_in**-0.5, base_fan_in**-0.5
    if largest > 1.01 * bound or base.std > 1.01 * base_bound or base.center:
        return False
    measured = ((std, numbers, bound), (base.std, base.numbers, base_bound))
    return all(
        count < FEWEST_VALUES or _may_have_std(one, count, limit / math.sqrt(3), kurtosis=1.8)
        for one, count, limit in measured
    )


def _have_one_std(kind: Sequence[StdAtTwoWidths]) -> bool:
    """Whether all tensors may have been drawn with the same std at both widths."""
    measured = [pair for entry in kind for pair in ((entry.std, entry.numbers), (entry.base.std, entry.base.numbers))]
    total = sum(numbers for _, numbers in measured)
    pooled = math.sqrt(sum(numbers * std**2 for std, numbers in measured) / max(1, total))
    return bool(measured) and all(_may_have_std(std, numbers, pooled, kurtosis=3.0) for std, numbers in measured)


def _may_have_std(measured: float, numbers: int, std: float, kurtosis: float) -> bool:
    """Whether a measured std agrees with the true one: a variance over N numbers has noise ((kurtosis - 1) / N)^1/2."""
    return abs((measured / std) ** 2 - 1) <= NOISE_SIGMAS * math.sqrt((kurtosis - 1) / numbers) + 2 * STD_TOLERANCE


def laws_are_distinct(numbers: int, base: Spread, ratios: Iterable[Fraction]) -> bool:
    """Whether a measured change of std is precise enough to tell every law from the next, for every growth."""
    logs = [math.log(ratio) for ratio in ratios if ratio != 1]
    half_gap = 0.25 * min(logs, default=math.inf)  # half of the distance between k = 0 and k = 1/2
    return NOISE_SIGMAS * math.sqrt(_variance(base, numbers)) + STD_TOLERANCE <= half_gap


def correction(
    std: float,
    numbers: int,
    base: Spread,
    r: Fraction,
    b: Fraction,
    ratios: Iterable[Fraction],
    law: tuple[Fraction, Fraction] | None = None,
) -> float:
    """The factor that takes ``numbers`` values of the measured ``std`` to the std ``base.std * r**-b``.

    Args:
        std: Measured std of the values.
        numbers: How many values there are.
        base: Spread at the base width.
        r: Growth of the parameter's fan-in.
        b: Exponent of the scheme.
        ratios: Growth of the network's dimensions, for the laws that an initializer may have followed.
        law: The growth R and exponent k of a law that is known, std ~ R^-k. Few numbers do not overrule it.

    Returns:
        The factor, an exact power wherever a law explains the values.
    """
    change = math.log(std / base.std) if std > 0 and base.std > 0 else math.nan
    noise = math.sqrt(_variance(base, numbers))
    enough = min(numbers, base.numbers) >= ENOUGH
    if law is not None:
        ratio, exponent = law
        explained = abs(change + float(exponent) * math.log(ratio)) <= NOISE_SIGMAS * noise + STD_TOLERANCE
        if explained or not enough:
            return _power(ratio, exponent, r, b)
    candidates = {(ratio, exponent): -float(exponent) * math.log(ratio) for ratio in {r, *ratios} for exponent in LAWS}
    (ratio, exponent), predicted = min(
        candidates.items(), key=lambda item: (abs(item[1] - change), item[0][0] != r, item[0])
    )
    if abs(change + float(b) * math.log(r)) <= 2 * noise + STD_TOLERANCE:
        return 1.0
    if abs(predicted - change) > NOISE_SIGMAS * noise + STD_TOLERANCE and enough:
        return math.exp(-float(b) * math.log(r) - change)
    return _power(ratio, exponent, r, b)


def _power(ratio: Fraction, exponent: Fraction, r: Fraction, b: Fraction) -> float:
    """ratio^exponent r^-b, in one power where that is possible, so that 1 is exactly 1."""
    if ratio == r or exponent == 0:
        return math.pow(r, exponent - b)
    return math.pow(ratio, exponent) * math.pow(r, -b)


def _variance(base: Spread, numbers: int) -> float:
    """Variance of the logarithm of a std measured here and at the base."""
    return (base.kurtosis - 1) / 4 * (1 / numbers + 1 / base.numbers) if numbers and base.numbers else math.inf
