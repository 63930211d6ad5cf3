"""One training of the GPT: 4 blocks, heads of 64, bytes as tokens, warm-up and linear decay of the learning rate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mukron.bench.gpt.references import REFERENCE_METHODS
from mukron.bench.measure import product_precision
from mukron.bench.networks import CharGPT
from mukron.bench.stability.runs import make_optimizer
from mukron.bench.stability.text import markov_text
from mukron.damping import Rule
from mukron.data.tokens import BYTES
from mukron.linalg import FactorizationError
from mukron.optim.spec import SPECS, spec_of
from mukron.params import base_shapes, parametrize
from mukron.train.randomness import own_random_numbers
from mukron.typed import NullIsInfinite

WINDOW, LAYERS, HEAD_SIZE, BATCH = 128, 4, 64, 32
WARMUP, LAST_RATE = 20, 0.1  # steps to the full learning rate; what is left of it at the end
TRAINING_PART = 0.9  # of the text; the rest is for validation
# Gauss-Newton has a backward pass for each of 128 x 256 outputs of a sample, and rows of all of them.
OUR_METHODS = tuple(name for name, spec in SPECS.items() if name != "sgd" and "jacobian" not in spec.captures)


@dataclass(frozen=True)
class GPTRun:
    """One training: all that distinguishes it from others.

    Attributes:
        method: A method of this library, AdamW with muP's groups, or one of ``REFERENCE_METHODS``.
        width: The size of a token's vector.
        base: The width of the parametrization's base; references have none.
        lr: The learning rate. All other options are the class's defaults.
        seed: The seed of the initial weights and of the batches.
        steps: The number of steps.
        depth: The number of blocks.
        base_depth: That of the parametrization's base; branches are multiplied by base depth / depth.
        scheme: "mup", or "sp": the standard parametrization, without that multiplier.
        weight_decay: Decoupled; lr times decay is the same at every width.
        damping: A damping rule as text, such as "rescaled:0.25". Empty: the method's own.
        seconds: The time that this number of steps was to take; 0: the number was given.

    Example:
        >>> GPTRun("kfac", 256, 256, lr=0.1, seed=0, steps=500).width
        256
    """

    method: str
    width: int
    base: int
    lr: float
    seed: int
    steps: int
    depth: int = LAYERS
    base_depth: int = LAYERS
    scheme: str = "mup"
    weight_decay: float = 0.0
    damping: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class GPTOutcome:
    """What was measured. A number that is not finite is infinite.

    Attributes:
        validation: The mean loss over the whole validation text, in nats per byte.
        training: The mean loss of the last tenth of the batches.
        largest: The largest loss of a batch.
        seconds: The time of the training.

    Example:
        >>> GPTOutcome(1.56, 1.41, 5.55, seconds=31.0).validation
        1.56
    """

    validation: NullIsInfinite
    training: NullIsInfinite
    largest: NullIsInfinite
    seconds: NullIsInfinite


@lru_cache(maxsize=2)
def load_text(file: Path | None, device: str) -> tuple[Tensor, Tensor]:
    """Return the bytes of a text: those to train on, and those for validation.

    Args:
        file: The file. None: a synthetic text.
        device: Where the bytes are to lie.

    Returns:
        Two vectors of whole numbers.

    Raises:
        ValueError: The file cannot be read, or is too short.

    Example:
        >>> train, validation = load_text(None, "cpu")
        >>> len(train), len(validation)
        (450000, 50000)
    """
    try:
        content = markov_text(500_000).encode() if file is None else file.read_bytes()
    except OSError as error:
        raise ValueError(f"the text {file} cannot be read: {error.strerror}") from None
    if len(content) < 20 * (WINDOW + 1):
        raise ValueError(f"the text {file} has {len(content)} bytes; at least {20 * (WINDOW + 1)} are needed")
    numbers = torch.tensor(list(content), dtype=torch.long, device=device)
    split = int(TRAINING_PART * len(numbers))
    return numbers[:split], numbers[split:]


def train_gpt(run: GPTRun, file: Path | None, device: str, precision: str) -> GPTOutcome:
    """Train, and measure the loss of the whole validation text.

    Args:
        run: The run.
        file: The text. None: a synthetic one.
        device: "cpu" or "cuda".
        precision: Of float32 products on a GPU: "float32" or "tf32".

    Returns:
        What was measured.

    Example:
        >>> outcome = train_gpt(GPTRun("foof", 64, 64, lr=0.1, seed=0, steps=2), None, "cpu", "float32")
        >>> 5 < outcome.training < 6
        True
    """
    train, validation = load_text(file, device)
    with _alone(device, precision):
        model = _initial(run, device)
        begin = time.perf_counter()
        try:
            numbers = torch.stack([*_losses(run, model, train)]).double()
        except RuntimeError as error:
            if not isinstance(error.__cause__, FactorizationError):
                raise
            return GPTOutcome(inf, inf, inf, time.perf_counter() - begin)  # damping too small for an inverse
        last = float(numbers[-max(1, run.steps // 10) :].mean())
        seconds = time.perf_counter() - begin
        measured = (validation_loss(model, validation), last, float(numbers.max()))
        whole, last, largest = (number if isfinite(number) else inf for number in measured)
    return GPTOutcome(whole, last, largest, seconds)


def step_milliseconds(run: GPTRun, file: Path | None, device: str, precision: str) -> float:
    """Measure what a step costs, all of it: passes, refreshes of inverses, the optimizer, the schedule.

    Args:
        run: The run, of which the first steps are not counted.
        file: The text. None: a synthetic one.
        device: "cpu" or "cuda".
        precision: Of float32 products on a GPU: "float32" or "tf32".

    Returns:
        Milliseconds per step, averaged over steps.

    Example:
        >>> step_milliseconds(GPTRun("foof", 64, 64, lr=0.1, seed=0, steps=22), None, "cpu", "float32") > 0
        True
    """
    train, _ = load_text(file, device)
    with _alone(device, precision):
        losses = _losses(run, _initial(run, device), train)
        for _ in islice(losses, WARMUP):
            pass
        begin = _now(device)
        counted = sum(1 for _ in losses)
        return 1e3 * (_now(device) - begin) / counted


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _alone(device: str, precision: str) -> Iterator[None]:
    with own_random_numbers(torch.device(device)), product_precision(precision), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that the fallback rule trains, and of skipped steps
        yield


def _initial(run: GPTRun, device: str) -> nn.Module:
    torch.manual_seed(run.seed)
    return network(run.width, run.depth, _multiplier(run)).to(device)


def _losses(run: GPTRun, model: nn.Module, train: Tensor) -> Iterator[Tensor]:
    """Trains the network, and yields the loss of every batch after its step."""
    optimizers = _optimizers(run, model)
    schedules = [LambdaLR(optimizer, partial(_rate, steps=run.steps)) for optimizer in optimizers]
    draws = torch.Generator().manual_seed(run.seed + 1)
    window = torch.arange(WINDOW + 1, device=train.device)
    for _ in range(run.steps):
        starts = torch.randint(len(train) - WINDOW, (BATCH, 1), generator=draws).to(train.device)
        batch = train[starts + window]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        yield loss.detach()


def network(width: int, depth: int = LAYERS, multiplier: float = 1.0) -> nn.Module:
    """Build the GPT; a narrow one has one head.

    Args:
        width: The size of a token's vector.
        depth: The number of blocks.
        multiplier: Of what each branch adds to the residual stream.
    """
    return CharGPT(width, BYTES, WINDOW, depth, min(HEAD_SIZE, width), multiplier)


def _multiplier(run: GPTRun) -> float:
    return run.base_depth / run.depth if run.scheme == "mup" else 1.0


def validation_loss(model: nn.Module, validation: Tensor) -> float:
    """The mean loss of a text, cut into windows that do not overlap.

    Args:
        model: The network.
        validation: The bytes.
    """
    windows = (len(validation) - 1) // WINDOW
    inputs = validation[: windows * WINDOW].view(windows, WINDOW)
    targets = validation[1 : windows * WINDOW + 1].view(windows, WINDOW)
    total = 0.0
    with torch.no_grad():
        for x, y in zip(torch.split(inputs, BATCH * 4), torch.split(targets, BATCH * 4), strict=True):
            total += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
    return total / (windows * WINDOW)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP) * (1 - (1 - LAST_RATE) * step / steps)


def _optimizers(run: GPTRun, model: nn.Module) -> list[Optimizer]:
    if run.method in REFERENCE_METHODS and not REFERENCE_METHODS[run.method].with_plan:
        return REFERENCE_METHODS[run.method].optimizers(model, run.lr)
    deep: dict[str, Any] = {} if run.depth == run.base_depth else {"depth": run.base_depth}
    plan = parametrize(model, base_shapes(partial(network, depth=run.depth), width=run.base, **deep), run.scheme)
    if run.method in REFERENCE_METHODS:
        return REFERENCE_METHODS[run.method].optimizers(model, run.lr, plan)
    if not spec_of(run.method).layerwise:
        return [AdamW(plan.param_groups("adamw", lr=run.lr, weight_decay=run.weight_decay))]
    arguments = {"parametrization": plan, "lr": run.lr, "weight_decay": run.weight_decay}
    arguments |= {"damping": Rule.parse(run.damping)} if run.damping else {}
    return [make_optimizer(spec_of(run.method), model, arguments, {"class_dim": -1})]


def check_method(name: str) -> None:
    """Refuse a method that the benchmark does not have.

    Args:
        name: Its name.

    Raises:
        ValueError: It is not known, or this torch does not have it.
    """
    known = (*OUR_METHODS, *REFERENCE_METHODS)
    if name not in known:
        raise ValueError(f"--methods {name!r}; known: {', '.join(known)}")
    if name in REFERENCE_METHODS and (missing := REFERENCE_METHODS[name].missing()):
        raise ValueError(f"--methods {name}: {missing}")
