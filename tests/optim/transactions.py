"""What the tests of skipped and rescued steps share: options by name, tiny networks, bad batches, comparisons.

A case is a dictionary from the name of an option to the name of its value, so that the id of a test reads as its
options. ``build`` turns it into a network and its optimizer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from states import contents
from torch import Tensor, nn
from torch.nn import functional as F

import mukron

BATCH, WIDTH, BASE_WIDTH, INPUTS, CLASSES, TOKENS = 5, 10, 5, 6, 3, 7

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

# Values of the options, the default of these tests first. What is made by a function is made when a test runs: a name
# that the library lacks fails the tests that use it, not all.
MOMENTUM: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {},
    "heavy-ball": lambda: {"momentum": 0.9},
    "nesterov": lambda: {"momentum": 0.9, "nesterov": True},
    "gradient": lambda: {"momentum": mukron.GradientMomentum(0.9)},
}
MEMORY: dict[str, Callable[[], Any]] = {
    "batch": mukron.Batch,
    "ema": lambda: mukron.EMA(0.9),
    "sum": mukron.Sum,
    "window": lambda: mukron.Window(2),
}
DECAY: dict[str, dict[str, Any]] = {
    "none": {},
    "decoupled": {"weight_decay": 0.01},
    "coupled": {"weight_decay": 0.01, "decoupled": False},
}
EVERY: dict[str, dict[str, int]] = {
    "1/1": {},
    "1/2": {"factor_every": 1, "inverse_every": 2},
    "2/2": {"factor_every": 2, "inverse_every": 2},
}
CAUSES = (
    "nan-input",
    "inf-input",
    "overflow",
    "nan-loss",
    "nan-weight-gradient",
    "nan-bias-gradient",
    "nan-gain-gradient",
    "second-moment-overflow",
)

TRUST = (None, "spectral:0.01", "graft:sgd", "graft:adam", "rms:0.2", "kl:0.001")
COMMON: dict[str, tuple[Any, ...]] = {
    "cause": CAUSES,
    "after": (2, 0, 1),  # good steps before the bad batch: at a refresh, at the very first step, between two refreshes
    "model": ("mlp", "embedding", "conv"),
    "fallback": ("sgd", "adamw"),
    "trust": TRUST,
    "momentum": tuple(MOMENTUM),
    "decay": tuple(DECAY),
    "plan": (False, True),  # with a Parametrization
    "dtype": ("float32", "float64"),
}
FACTORED: dict[str, tuple[Any, ...]] = {"fused": (False, True), "every": tuple(EVERY)}
KFAC_SOLVERS, SHAMPOO_SOLVERS = ("cholesky", "eigh", "newton"), ("eigh", "newton", "tracked")
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "kfac": {
        **COMMON,
        **FACTORED,
        "memory": tuple(MEMORY),
        "solver": KFAC_SOLVERS,
        "fisher": ("mc", "empirical", "exact"),
    },
    "foof": {**COMMON, **FACTORED, "memory": tuple(MEMORY), "solver": KFAC_SOLVERS},
    "shampoo": {**COMMON, **FACTORED, "memory": ("sum", "ema", "batch"), "solver": SHAMPOO_SOLVERS},
    "soap": {**COMMON, "every": tuple(EVERY), "memory": ("ema", "sum", "batch"), "solver": ("qr", "eigh")},
    "muon": {name: values for name, values in COMMON.items() if name != "trust"},
    "gauss-newton": COMMON,
}
METHODS: dict[str, Callable[..., Any]] = {
    "kfac": mukron.KFAC,
    "foof": mukron.FOOF,
    "shampoo": lambda *arguments, **options: mukron.Shampoo(*arguments, damping=1e-3, **{"trust": None, **options}),
    "soap": mukron.SOAP,
    "muon": lambda *arguments, trust=None, **options: mukron.Muon(*arguments, **options),  # noqa: PLW0108
    "gauss-newton": mukron.GaussNewton,
}
OF_GRADIENTS = ("shampoo", "soap", "muon")  # methods that measure nothing but gradients

# Pairs of values that cannot be together in a case. Everything else must be covered.
# The options above leave out what an optimizer refuses or does not have: Shampoo with a window ("Shampoo's factors are
# matrices"), factor_every=2 with inverse_every=1 (it must be a multiple), Nesterov without momentum; FOOF and Shampoo
# have no Fisher; Gauss-Newton has no memory, solver, interval or fused gradients, and Muon neither those nor a trust.
EXCLUDED_PAIRS: dict[Pair, str] = {
    (("cause", "nan-input"), ("model", "embedding")): "tokens are integers",
    (("cause", "inf-input"), ("model", "embedding")): "tokens are integers",
    (("cause", "overflow"), ("model", "embedding")): "tokens are integers: their factor holds frequencies",
    (("cause", "second-moment-overflow"), ("fallback", "sgd")): "SGD keeps no second moments",
}


def excluded(method: str, case: Mapping[str, Any]) -> str | None:
    """Why a case is not a test; None: it is one."""
    for ((a, x), (b, y)), reason in EXCLUDED_PAIRS.items():
        if case[a] == x and case[b] == y:
            return reason
    if case["cause"] == "overflow" and case.get("every") == "2/2" and case["after"] == 1:
        return "between two refreshes nothing is squared, and every number is finite"
    return None


def covering(method: str) -> tuple[list[Case], list[Pair]]:
    """Cases in which every pair of option values occurs, and the pairs that no case can hold.

    Greedy: the first pair that is still missing is completed at random, often, and the completion that covers most
    missing pairs is taken. The same cases in every process.
    """
    space, draw = OPTIONS[method], random.Random(0)
    missing = dict.fromkeys(
        ((a, x), (b, y)) for a, b in itertools.combinations(space, 2) for x in space[a] for y in space[b]
    )
    cases: list[Case] = []
    impossible: list[Pair] = []
    while missing:
        pair = next(iter(missing))
        if pair in EXCLUDED_PAIRS:
            impossible.append(pair)
            del missing[pair]
            continue
        best: list[Pair] = []
        chosen: Case = {}
        for _ in range(100):
            case = {name: draw.choice(values) for name, values in space.items()} | dict(pair)
            gain = [] if excluded(method, case) else [each for each in _pairs(case) if each in missing]
            if len(gain) > len(best):
                best, chosen = gain, case
        cases.append(chosen)
        for each in best:
            del missing[each]
    return cases, impossible


def _pairs(case: Mapping[str, Any]) -> Iterator[Pair]:
    return itertools.combinations(case.items(), 2)  # type: ignore[return-value]


def name_of(method: str, case: Mapping[str, Any]) -> str:
    """The id of a test: its method and every option that is not at its default."""
    defaults = {name: values[0] for name, values in OPTIONS[method].items()}
    parts = [method]
    for name, value in case.items():
        if name in ("cause", "model"):
            parts.append(str(value))
        elif value != defaults.get(name):
            parts.append(name if value is True else f"{name}={value}")
    return ",".join(parts)


# Networks. Each has preconditioned layers with biases, and a norm whose gain and offset take the fallback rule.


class MLP(nn.Module):
    """Its middle layer is wide enough, beside a batch of five, that ``fused=True`` forms no gradient of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, width), nn.LayerNorm(width)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.norm(torch.tanh(self.first(x))))))


class Embedded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Embedding(TOKENS, width), nn.LayerNorm(width)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.norm(self.first(tokens)).mean(1))))


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, width, 2), nn.GroupNorm(1, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(torch.tanh(self.first(x)))).mean((2, 3)))


MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "embedding": Embedded, "conv": Convolution}


@lru_cache(maxsize=3)
def base_shapes(model: str) -> Any:
    return mukron.base_shapes(MODELS[model], width=BASE_WIDTH)


def build(method: str, case: Mapping[str, Any], **options: Any) -> tuple[nn.Module, Any]:
    """A network and its optimizer, the same at every call."""
    torch.manual_seed(0)
    kind = case.get("model", "mlp")
    model = MODELS[kind](WIDTH).to(getattr(torch, case.get("dtype", "float32")))
    plan = mukron.parametrize(model, base_shapes(kind)) if case.get("plan") else None
    if kind != "embedding":
        with torch.no_grad():
            model.first.weight[:, 0] = 0  # of a feature that is zero in every good batch
    options = {
        **{name: case[name] for name in ("fallback", "trust", "solver", "fused", "fisher") if name in case},
        **MOMENTUM[case.get("momentum", "none")](),
        **DECAY[case.get("decay", "none")],
        **EVERY[case.get("every", "1/1")],
        **({"memory": MEMORY[case["memory"]]()} if "memory" in case else {}),
        **options,
    }
    return model, METHODS[method](model, plan, lr=0.05, **{"trust": None, **options})


class Data(NamedTuple):
    x: Tensor
    y: Tensor


def batches(case: Mapping[str, Any], count: int, seed: int = 0) -> list[Data]:
    """Good batches. Their feature (or channel) 0 is zero, so that nothing but A sees a large number there."""
    generator = torch.Generator().manual_seed(seed)
    kind, dtype = case.get("model", "mlp"), getattr(torch, case.get("dtype", "float32"))
    found = []
    for _ in range(count):
        if kind == "embedding":
            x = torch.randint(TOKENS, (BATCH, 3), generator=generator)
        else:
            shape = (BATCH, INPUTS) if kind == "mlp" else (BATCH, 2, 3, 3)
            x = torch.randn(shape, generator=generator).to(dtype)
            x[:, 0] = 0
        found.append(Data(x, torch.randint(CLASSES, (BATCH,), generator=generator)))
    return found


def backward(model: nn.Module, data: Data, scale: float = 1.0) -> Tensor:
    loss = F.cross_entropy(model(data.x), data.y) * scale
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Any, data: Data) -> None:
    optimizer.zero_grad()
    backward(model, data)
    optimizer.step()


def bad_gradients(method: str, model: nn.Module, data: Data, cause: str) -> None:
    """Forward and backward pass of a batch that must not change anything."""
    x = data.x.clone()
    large = {torch.float32: 1e22, torch.float64: 1e160}[model.head.weight.dtype]  # its square is not finite
    if cause in ("nan-input", "inf-input"):
        x[1, 1] = float(cause.removesuffix("-input"))
        backward(model, Data(x, data.y))
    elif cause == "nan-loss":
        backward(model, data, float("nan"))
    elif cause == "overflow" and method in OF_GRADIENTS:
        backward(model, data, 1000 * large)  # gradients are finite, their squares are not
    elif cause == "overflow":
        x[1, 0] = large  # A (of Gauss-Newton: K) is not finite, but gradients are
        backward(model, Data(x, data.y))
    else:
        backward(model, data)
        _spoil(model, cause, 1000 * large)
    if cause == "overflow":
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def _spoil(model: nn.Module, cause: str, large: float) -> None:
    """One number of one parameter's gradient."""
    parameter, value = {
        "nan-weight-gradient": (model.first.weight, float("nan")),
        "nan-bias-gradient": (model.head.bias, float("nan")),
        "nan-gain-gradient": (model.norm.weight, float("nan")),
        "second-moment-overflow": (model.norm.weight, large),
    }[cause]
    if parameter.grad is None:  # fused; what a penalty beside the layer leaves here counts all the same
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.view(-1)[1] = value


def bad_step(method: str, model: nn.Module, optimizer: Any, data: Data, cause: str) -> None:
    optimizer.zero_grad()
    bad_gradients(method, model, data, cause)
    optimizer.step()


# Comparisons, bit for bit.


def snapshot(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that a step may change, as users can see it, but for the count of skipped steps."""
    saved = contents(optimizer)
    others = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {
        "weights": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "state": saved["state"],
        "param_groups": saved["param_groups"],
        "others": _without_skipped(others),
        "steps": optimizer.steps,
    }


def _without_skipped(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_skipped(entry) for key, entry in value.items() if "skipped" not in str(key)}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values are not the same, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path + _by_how_much(a, b)]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = [f"{path}.{key}: only before, {a[key]!r:.60}" for key in a if key not in b]
        found += [f"{path}.{key}: only after, {b[key]!r:.60}" for key in b if key not in a]
        return found + [entry for key in a if key in b for entry in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [entry for i, (x, y) in enumerate(zip(a, b, strict=True)) for entry in differences(x, y, f"{path}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r:.40} and {b!r:.40}"]


def _by_how_much(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f": {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return f": differs by {float((a.double() - b.double()).abs().max()):.2g}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All entries of a nested value, with where they stand."""
    if isinstance(value, Mapping | list | tuple):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in entries:
            yield from leaves(entry, f"{path}.{key}")
    else:
        yield path, value


def counters(optimizer: Any) -> dict[str, int]:
    """All whole numbers in the state (counts and step numbers, also as tensors), by where they stand."""
    found = {}
    for path, value in leaves(contents(optimizer)["state"]):
        if isinstance(value, int) or (isinstance(value, Tensor) and value.ndim == 0 and float(value).is_integer()):
            found[path] = int(value)
    return found


def moments(optimizer: Any) -> dict[str, Tensor]:
    """Adam's moments of a fallback or a graft. They depend on gradients alone, never on a factorization."""
    return {path: value for path, value in leaves(contents(optimizer)["state"]) if "exp_avg" in path}
