"""``mukron plan --ranks``: what training in several processes will cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mukron.cli.common import BUILT_IN, show, split, value_of
from mukron.cli.explain import with_options
from mukron.imports import import_function

if TYPE_CHECKING:
    from mukron.optim.ranked_run import RankedRun
    from mukron.optim.shapes import NetworkShapes

SLOWEST, FASTEST = 1.0, 1e30  # a second
MOST_POSITIONS = 2**31  # size of a sample
OF_METHOD = "method_options."  # settings that go to the optimizer, as in a run's configuration

RanksModelOption = Annotated[
    str | None, typer.Option(help=f"With --ranks: a built-in network, with --width: {BUILT_IN}.")
]
RanksFactoryOption = Annotated[
    str | None, typer.Option(help="With --ranks: your own network, MODULE:FUNCTION, called with --width.")
]
RanksShapesOption = Annotated[
    str | None, typer.Option(help="With --ranks: a network of known shapes: llama-7b, llama-13b, llama-70b.")
]
RanksSettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="With --ranks: an argument of the network, NAME=VALUE, or METHOD_OPTIONS.NAME=VALUE, an option of the "
        "method, as in method_options.factor_every=10; may be repeated.",
    ),
]
RanksMethodOption = Annotated[str, typer.Option(help="With --ranks: kfac, foof, gauss-newton, shampoo, soap or muon.")]
RanksBatchOption = Annotated[int | None, typer.Option(min=1, help="With --ranks: samples of all ranks together.")]
RanksPositionsOption = Annotated[
    int, typer.Option(min=1, help="With --ranks: positions of a sample that share each weight: tokens of a sequence.")
]
RanksSampleOption = Annotated[
    str | None,
    typer.Option(help="With --ranks: the shape of a sample, as in 3,32,32, where layers see different positions."),
]
RanksShardingOption = Annotated[
    str,
    typer.Option(
        help="With --ranks: ddp (DistributedDataParallel), fsdp (fully_shard), or plain (the optimizer averages "
        "gradients: process_group=)."
    ),
]
RanksCommunicationOption = Annotated[
    str, typer.Option(help="With --ranks: how curvature travels: auto, rows, owner or factors.")
]
RanksBandwidthOption = Annotated[
    float | None, typer.Option(help="With --ranks: bytes a second that arrive on a rank.", show_default="5e10")
]
RanksSpeedOption = Annotated[
    float | None, typer.Option(help="With --ranks: multiplications a second of a rank.", show_default="5e13")
]


@dataclass(frozen=True)
class NetworkRequest:
    """Which network the command line asks for.

    Attributes:
        model: A built-in one, by name.
        factory: The user's own, MODULE:FUNCTION.
        shapes: One whose shapes are known, by name.
        width: Of a built-in network or of the user's own.
        settings: Its arguments, NAME=VALUE.
        sample: The shape of a sample, as in 3,32,32.
    """

    model: str | None
    factory: str | None
    shapes: str | None
    width: float | None
    settings: list[str]
    sample: str | None

    def read(self, run: RankedRun) -> NetworkShapes:
        """The shapes of its layers; a model is built on the meta device."""
        from mukron.models import get_model
        from mukron.optim.shapes import known_shapes, shapes_of
        from mukron.params import build_without_memory, plain_width

        if sum(name is not None for name in (self.model, self.factory, self.shapes)) != 1:
            raise ValueError("--ranks needs one of --model NAME, --factory MODULE:FUNCTION and --shapes NAME")
        if self.shapes is not None:
            if self.settings or self.sample is not None or self.width is not None:
                raise ValueError(f"--shapes {self.shapes} has fixed sizes: leave out --width, --set NAME and --sample")
            shapes, left = known_shapes(self.shapes), run.step.exclude
            if left is None:  # as the optimizer leaves out what it does by default
                left = (shapes.layers[-1].name,) if run.spec.method.matrices_only else ()
            return shapes.without(left)
        if self.width is None:
            raise ValueError("--model and --factory need --width, the width of the network")
        if not (math.isfinite(self.width) and self.width > 0):
            raise ValueError(f"--width {self.width:g}: expected a positive number")
        sample = None if self.sample is None else _read_sample(self.sample)
        if sample is not None and run.positions > 1:
            raise ValueError(f"--sample {self.sample} says how many positions each layer sees: leave out --positions")
        if self.model is not None:
            make = with_options(get_model(self.model).factory, self.settings)
            with _one_line(f"--model {self.model} cannot be built at --width {self.width:g}"):
                network = build_without_memory(make, plain_width(self.width))
        else:
            assert self.factory is not None
            make = with_options(import_function(self.factory, "--factory"), self.settings)
            network = build_without_memory(
                make, plain_width(self.width)
            )  # a traceback shows where the user's own fails
        with _one_line(f"the network does not take --sample {self.sample}") if sample else nullcontext():
            return shapes_of(network, run.spec, run.known, sample)


def _read_sample(text: str) -> list[int]:
    """The shape of a sample, as in 3,32,32."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and 0 < int(size) <= MOST_POSITIONS for size in sizes):
        raise ValueError(f"--sample {text!r}: expected the sizes of a sample, as in 3,32,32")
    return [int(size) for size in sizes]


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Says what a request came to, in place of a traceback into the network."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{what}: {first}") from error


def plan_ranks(
    network: NetworkRequest,
    json_file: Path | None,
    method: str,
    rates: tuple[float | None, float | None],
    ranks: int,
    batch: int | None,
    positions: int,
    sharding: str,
    communication: str,
) -> None:
    """Prints what a run in several processes will cost.

    Args:
        network: The network.
        json_file: Where to write the numbers too.
        method: Of the optimizer.
        rates: Bytes and multiplications a second; None: the usual ones.
        ranks: How many there are.
        batch: Samples of all of them.
        positions: Of a sample.
        sharding: How weights lie on ranks, and who averages gradients.
        communication: How curvature travels.
    """
    from mukron.optim.communication import Communication, Speed
    from mukron.optim.prediction import predict
    from mukron.optim.prediction_tables import prediction_tables
    from mukron.optim.ranked_run import RankedRun
    from mukron.params.storage import stamp, write_json

    if batch is None:
        raise ValueError("--ranks needs --batch, the samples of all ranks together")
    for option, rate in zip(("--bandwidth", "--speed"), rates, strict=True):
        if rate is not None and not SLOWEST <= rate <= FASTEST:
            raise ValueError(f"{option} {rate:g}: expected a positive number a second, {SLOWEST:g} to {FASTEST:g}")
    own = [setting.removeprefix(OF_METHOD) for setting in network.settings if setting.startswith(OF_METHOD)]
    network = replace(network, settings=[text for text in network.settings if not text.startswith(OF_METHOD)])
    exchange = Communication.of(communication)
    if exchange.bandwidth is not None:
        raise ValueError(f"--communication {communication}: give the bandwidth as --bandwidth {exchange.bandwidth:g}")
    if exchange.measured:
        raise ValueError(f"--communication {communication}: a plan measures nothing; give --bandwidth and --speed")
    speed = Speed(*(usual if rate is None else rate for rate, usual in zip(rates, Speed(), strict=True)))
    run = RankedRun(
        *(ranks, batch, positions, method, _options(method, own)),
        communication=exchange,
        speed=speed,
        sharding=sharding,
    )
    plan = predict(network.read(run), run)
    for table in prediction_tables(plan):
        show(table)
    if json_file is not None:
        write_json(json_file, stamp("ranks", 1, plan.to_dict()))


def _options(method: str, settings: list[str]) -> dict[str, Any]:
    """Options of a method from NAME=VALUE."""
    from mukron.optim.spec import spec_of

    known, options = spec_of(method).known_options, {}
    for setting in settings:
        name, text = split(setting, "=", "--set", f"{OF_METHOD}NAME=VALUE")
        if name not in known:
            raise ValueError(f"--set {OF_METHOD}{setting}: {method} has no such option; it has {', '.join(known)}")
        if name == "communication":
            raise ValueError(f"--set {OF_METHOD}{setting}: give it as --communication {text}")
        value = re.split(",(?![^{]*})", text) if name == "exclude" else value_of(text)
        try:
            options[name] = known[name].read(value)
        except ValueError as error:
            raise ValueError(f"--set {OF_METHOD}{setting}: {error}") from None
    return options
