"""Plans for many ranks, from a network's name, its factory or its known shapes, without building it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from mukron.imports import import_function
from mukron.models import get_model
from mukron.optim import spec_of
from mukron.optim.communication import Communication, Speed
from mukron.optim.prediction import RanksPrediction, predict
from mukron.optim.ranked_run import RankedRun
from mukron.optim.shapes import NetworkShapes, known_shapes, shapes_of, takes_tokens
from mukron.params import build_without_memory, plain_width
from mukron.readers import shown
from mukron.study.errors import StudyError

SLOWEST, FASTEST = 1.0, 1e30  # a second
LARGEST_SIZE = 2**31  # of a sample

OwnNetwork = str | Callable[..., nn.Module]


def plan_for_ranks(
    ranks: int,
    *,
    width: float | None = None,
    model: str | None = None,
    factory: OwnNetwork | None = None,
    shapes: str | NetworkShapes | None = None,
    model_options: Mapping[str, Any] | None = None,
    sample: Sequence[int] | None = None,
    method: str = "kfac",
    method_options: Mapping[str, Any] | None = None,
    batch: int | None = None,
    positions: int | None = None,
    sharding: str = "ddp",
    communication: str = "auto",
    bandwidth: float | None = None,
    speed: float | None = None,
) -> RanksPrediction:
    """Predict what a step in several processes costs; the arguments are those of ``mukron.plan``."""
    if batch is None:
        raise StudyError("ranks= needs batch=, the samples of all ranks together")
    run = RankedRun(
        *(ranks, batch, positions or 1, method, _read_options(method, method_options or {})),
        communication=_read_communication(communication),
        speed=_read_speed(bandwidth, speed),
        sharding=sharding,
    )
    if sum(network is not None for network in (model, factory, shapes)) != 1:
        raise StudyError('ranks= needs one of model="NAME", factory="MODULE:FUNCTION" and shapes="NAME"')
    if shapes is not None:
        if model_options or sample is not None or width is not None:
            raise StudyError("shapes= is a network of fixed sizes: leave out width=, model_options= and sample=")
        known = known_shapes(shapes) if isinstance(shapes, str) else shapes
        if isinstance(shapes, str) and positions is None:
            raise StudyError(f"shapes={shapes!r} is a network of tokens: give positions=, as in positions=2048")
        left = run.step.exclude
        if left is None:  # as the optimizer leaves out what it does by default
            left = (known.layers[-1].name,) if run.spec.method.matrices_only else ()
        return predict(known.without(left), run)
    network = _network(model, factory, width, model_options or {})
    given = None if sample is None else _read_sample(sample)
    if given is not None and positions is not None:
        raise StudyError(f"{given} says how many positions each layer sees: leave out positions=")
    notes: tuple[str, ...] = ()
    if sample is None and positions is None:
        sample, notes = _usual_sample(network, model)
    with nullcontext() if given is None else _one_line(f"the network does not take {given}"):
        layers = shapes_of(network, run.spec, run.known, sample)
    return replace(predict(layers, run), notes=notes)


def _usual_sample(network: nn.Module, model: str | None) -> tuple[Sequence[int] | None, tuple[str, ...]]:
    """Of tokens, the shape of a sample that a built-in network usually takes, and a note that says so.

    Of the user's own network it is not known, and one token would be a guess far too low.
    """
    usual = None if model is None else get_model(model).sample
    if usual is not None:
        (length,) = shape = usual(network)
        return shape, (f"Samples of {length} tokens, the usual number for {model}; give positions for another.",)
    if takes_tokens(network):
        raise StudyError(
            f"{type(network).__name__}: this network takes tokens, and what travels depends on how many a sample has: "
            "give positions=, as in positions=1024, or 1 if every layer sees one vector a sample"
        )
    return None, ()


def _network(
    model: str | None,
    factory: OwnNetwork | None,
    width: float | None,
    options: Mapping[str, Any],
) -> nn.Module:
    """A network on the meta device."""
    if width is None:
        raise StudyError("model= and factory= need width=, the width of the network")
    if not (math.isfinite(width) and width > 0):
        raise StudyError(f"width={width:g}: expected a positive number")
    if model is not None:
        with _one_line(f"model={model!r} cannot be built at width={width:g}"):
            return build_without_memory(_with(get_model(model).factory, options), plain_width(width))
    own = import_function(factory, "factory") if isinstance(factory, str) else factory
    if not callable(own):
        raise StudyError(f'factory={own!r:.80}: expected a function of the width, or "MODULE:FUNCTION"')
    return build_without_memory(_with(own, options), plain_width(width))  # a traceback shows where the user's own fails


def _with(make: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """The network as a function of its width, with its other arguments."""
    if not options:
        return make

    def network(width: float) -> nn.Module:
        try:
            return make(width, **options)
        except TypeError as error:
            raise StudyError(f"model_options={dict(options)}: {error}") from error

    return network


def _read_options(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The method's options, each as its record reads it."""
    known, chosen = spec_of(method).known_options, {}
    for name, value in options.items():
        what = f"method_options: {name}={shown(value)}"
        if name not in known:
            raise StudyError(f"{what}: {method} has no such option; it has {', '.join(known)}")
        if name == "communication":
            raise StudyError(f"{what}: give it as communication={value!r}")
        try:
            chosen[name] = known[name].read(value)
        except ValueError as error:
            raise StudyError(f"{what}: {error}") from None
    return chosen


def _read_communication(communication: str) -> Communication:
    exchange = Communication.of(communication)
    if exchange.bandwidth is not None:
        raise StudyError(f"communication={communication!r}: give the bandwidth as bandwidth={exchange.bandwidth:g}")
    if exchange.measured:
        raise StudyError(f"communication={communication!r}: a plan measures nothing; give bandwidth= and speed=")
    return exchange


def _read_speed(bandwidth: float | None, speed: float | None) -> Speed:
    for name, rate in (("bandwidth", bandwidth), ("speed", speed)):
        if rate is not None and not SLOWEST <= rate <= FASTEST:
            raise StudyError(f"{name}={rate:g}: expected a positive number a second, {SLOWEST:g} to {FASTEST:g}")
    return Speed(*(usual if rate is None else rate for rate, usual in zip((bandwidth, speed), Speed(), strict=True)))


def _read_sample(sample: Sequence[int]) -> str:
    """Check the shape of a sample; return it as errors show it."""
    sizes = [sample] if isinstance(sample, (str, int)) else list(sample)
    given = f"sample=({','.join(map(str, sizes))})"
    if isinstance(sample, (str, int)) or not all(isinstance(size, int) and 0 < size <= LARGEST_SIZE for size in sizes):
        raise StudyError(f"{given}: expected the sizes of a sample, as in sample=(3, 32, 32)")
    return given


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Say what a request came to, in place of a traceback into the network."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise StudyError(f"{what}: {first}") from error
