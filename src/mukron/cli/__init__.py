"""The command line: each command parses its options, calls the library and prints the result. One file per command."""

from __future__ import annotations

from typing import Annotated

import typer

from mukron import __version__
from mukron.cli.bench import bench_app
from mukron.cli.check import check_app
from mukron.cli.common import Command, Root, errors, traceback_wanted
from mukron.cli.data import data_app
from mukron.cli.explain import explain
from mukron.cli.plan import plan
from mukron.cli.reproduce import reproduce
from mukron.cli.train import train
from mukron.cli.transfer import transfer, tune
from mukron.workers.launch import local_rank, refuse_torchrun

app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    add_completion=True,  # mukron --install-completion
    pretty_exceptions_enable=False,
    help="Tune a network while it is narrow, train it while it is wide, with second-order optimizers.",
)
app.command(cls=Command)(explain)
app.add_typer(check_app, name="check")
app.command(cls=Command)(transfer)
app.command(cls=Command)(tune)
app.command()(plan)
app.command(cls=Command)(train)
app.command()(reproduce)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mukron {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="After an error, print how the code came to it.")
    ] = False,
) -> None:
    traceback_wanted.set(traceback)
    command = context.invoked_subcommand
    if command not in (None, "train"):
        with errors(shown=local_rank() == 0):
            refuse_torchrun(f"mukron {command}", "transfer and tune have --workers, for several processes and GPUs")
