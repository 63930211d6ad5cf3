"""``mukron plan``: turns settings tuned at a narrow width into those of a wide network, or plans for many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mukron.cli.common import check_outputs, errors, print_text, show, trust_named
from mukron.cli.ranks import (
    RanksBandwidthOption,
    RanksBatchOption,
    RanksCommunicationOption,
    RanksFactoryOption,
    RanksMethodOption,
    RanksModelOption,
    RanksPositionsOption,
    RanksSampleOption,
    RanksSettingsOption,
    RanksShapesOption,
    RanksShardingOption,
    RanksSpeedOption,
    plan_ranks,
)
from mukron.cli.train import TrustOption

if TYPE_CHECKING:
    from mukron.train import RunConfig

OF_STUDIES = {"folder", "config", "scheme", "tuned_at", "device", "measure", "code", "data_dir", "whole"}
OF_STUDIES |= {"factory", "data", "loss", "trust"}
OF_RANKS = {
    *("model", "factory", "shapes", "settings", "method", "batch", "positions", "sample", "sharding"),
    *("communication", "bandwidth", "speed"),
}


def plan(
    context: typer.Context,
    width: Annotated[float | None, typer.Option(help="The width to train at.")] = None,
    folder: Annotated[
        Path, typer.Option("--from", help="Folder of a study, as written by 'mukron tune' or 'mukron transfer'.")
    ] = Path("tuned"),
    config: Annotated[
        Path | None, typer.Option(help="A run's JSON file to take the settings from, instead of a study.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Scheme to choose from the study: SCHEME or SCHEME/DAMPING, as in mup/rescaled.")
    ] = None,
    tuned_at: Annotated[
        float | None,
        typer.Option(help="Width of the study whose best run is taken (default: the narrowest)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device to measure on: cpu or cuda (default: that of the study).")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure time and memory of a step at that width.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the plan and its numbers to this file.")
    ] = None,
    code: Annotated[Path | None, typer.Option(help="Write the script to this file (default: print it).")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    data: Annotated[
        str | None, typer.Option(help="The study's own data, MODULE:FUNCTION: a file's functions run only if named.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="The study's own loss, MODULE:FUNCTION, in the same way.")] = None,
    trust: TrustOption = False,
    whole: Annotated[bool, typer.Option("--whole", help="One row per parameter, even if rows are equal.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(help="Plan for so many processes instead: what travels, who owns what, time and memory."),
    ] = None,
    model: RanksModelOption = None,
    factory: RanksFactoryOption = None,
    shapes: RanksShapesOption = None,
    settings: RanksSettingsOption = None,
    method: RanksMethodOption = "kfac",
    batch: RanksBatchOption = None,
    positions: RanksPositionsOption = None,
    sample: RanksSampleOption = None,
    sharding: RanksShardingOption = "ddp",
    communication: RanksCommunicationOption = "auto",
    bandwidth: RanksBandwidthOption = None,
    speed: RanksSpeedOption = None,
) -> None:
    """Print the settings of a wide network, from those tuned at a narrow width, the cost of a step, and the code.

    With --ranks: predict what a step of a network in many processes costs, without a study and without building it.
    """
    with errors():
        _check_options(context, ranks)
        check_outputs(files=(json_file, code))
        if ranks is not None:
            network: dict[str, Any] = {"model": model, "factory": factory, "shapes": shapes, "width": width}
            run = {"method": method, "batch": batch, "positions": positions, "sharding": sharding}
            exchange = {"communication": communication, "bandwidth": bandwidth, "speed": speed}
            plan_ranks(ranks, settings or [], sample, json_file, **network, **run, **exchange)
            return
        assert width is not None
        from mukron import commands
        from mukron.params.storage import write_json, write_text
        from mukron.study import functions
        from mukron.train import RunConfig

        if config is not None:
            if scheme is not None or tuned_at is not None:
                raise ValueError("--scheme and --tuned-at choose a run of a study; --config is one already")
            lines = [f"Settings of {config}."]
            tuned = RunConfig.load(config)
        else:
            tuned, lines = functions.best_run(functions.load_study(folder), scheme, tuned_at)
        tuned = trust_named(tuned, {"model": factory, "data": data, "loss": loss}).trusted(trust)
        with _spinner(f"measuring a step at width {width:g} (skip with --no-measure)", measure):
            planned = commands.plan(width, tuned, device=device, data_dir=data_dir, steps=3 if measure else 0)
        print_text("\n".join([*lines, _describe_settings(tuned), ""]))
        show(planned.layers(whole=whole))
        show(planned.cost())
        if planned.by_layer is not None:
            show(planned.by_layer)
        if json_file is not None:
            write_json(json_file, planned.to_dict(), seal=False)
        if code is None:
            print_text(planned.code())
        else:
            write_text(code, planned.code())
            Console(stderr=True).print(f"wrote {code}", highlight=False, markup=False, soft_wrap=True)


def _check_options(context: typer.Context, ranks: int | None) -> None:
    """Refuses options of the other kind of plan, and a plan without a width."""
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    others = given - {"width", "json_file", "ranks"} - (OF_RANKS if ranks is not None else OF_STUDIES)
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    if others:
        named = ", ".join(sorted(flags[name] for name in others))
        raise ValueError(
            f"{named}: {'of a plan from a study; leave out --ranks' if ranks is not None else 'needs --ranks'}"
        )
    if ranks is None and "width" not in given:
        raise ValueError("Missing option '--width': the width to train at")


def _describe_settings(tuned: RunConfig) -> str:
    damping = "" if tuned.damping is None else f", damping {tuned.damping.text()}"
    return f"{tuned.model} on {tuned.data}, {tuned.method}, {tuned.scheme}: lr {tuned.lr:.4g}{damping}."


@contextmanager
def _spinner(text: str, measure: bool) -> Iterator[None]:
    """Shows a spinner on a terminal while a step is measured."""
    console = Console(stderr=True)
    if not (measure and console.is_terminal):
        yield
        return
    with console.status(text):
        yield
