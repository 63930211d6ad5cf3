"""``mukron plan --ranks``: what training in several processes will cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from mukron.cli.common import BUILT_IN, show, split, value_of

OF_METHOD = "method_options."  # settings that go to the optimizer, as in a run's configuration

RanksModelOption = Annotated[
    str | None, typer.Option(help=f"With --ranks: a built-in network, with --width: {BUILT_IN}.")
]
RanksFactoryOption = Annotated[
    str | None, typer.Option(help="Your own network, MODULE:FUNCTION: the study's; with --ranks, called with --width.")
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
    int | None,
    typer.Option(
        min=1,
        help="With --ranks: positions of a sample that share each weight: tokens of a sequence (default: the usual "
        "number of a built-in network of tokens, 1 without tokens).",
    ),
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


def plan_ranks(ranks: int, settings: list[str], sample: str | None, json_file: Path | None, **options: Any) -> None:
    """Prints what a run in several processes will cost.

    Args:
        ranks: How many there are.
        settings: Arguments of the network, NAME=VALUE, and of the method.
        sample: The shape of a sample, as in 3,32,32.
        json_file: Where to write the numbers too.
        options: All else, as ``plan_for_ranks`` takes it.
    """
    from mukron.optim.prediction_tables import prediction_tables
    from mukron.params.storage import stamp, write_json
    from mukron.study.ranks import plan_for_ranks

    of_network, of_method = _read_settings(settings)
    shape = None if sample is None else _read_sample(sample)
    plan = plan_for_ranks(ranks, model_options=of_network, method_options=of_method, sample=shape, **options)
    for table in prediction_tables(plan):
        show(table)
    if json_file is not None:
        write_json(json_file, stamp("ranks", 1, plan.to_dict()), seal=False)


def _read_settings(settings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of --set by name, those of the network and those of the method."""
    of_network, of_method = {}, {}
    for setting in settings:
        if setting.startswith(OF_METHOD):
            name, text = split(setting.removeprefix(OF_METHOD), "=", "--set", f"{OF_METHOD}NAME=VALUE")
            of_method[name] = re.split(",(?![^{]*})", text) if name == "exclude" else value_of(text)
        else:
            name, text = split(setting, "=", "--set", "NAME=VALUE, as in tied=true")
            of_network[name] = value_of(text)
    return of_network, of_method


def _read_sample(text: str) -> list[int]:
    """The shape of a sample, as in 3,32,32."""
    sizes = text.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise ValueError(f"--sample {text!r}: expected the sizes of a sample, as in 3,32,32")
    return [int(size) for size in sizes]
