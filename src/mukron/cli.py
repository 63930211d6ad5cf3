"""The command line: parse, call, print."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from mukron import __version__
from mukron.table import Table
from mukron.theory import METHODS, comparison_table, get_method, get_scheme, method_table

if TYPE_CHECKING:
    from mukron.params import Parametrization

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune a network while it is narrow, train it while it is wide, with second-order optimizers.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mukron {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def explain(
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}, shampoo:E, kronecker:E_A,E_B, or all.")] = "kfac",
    scheme: Annotated[str, typer.Option(help="mup, sp, ntk, or uniform:R with R from 0 (mup) to 1/2 (ntk).")] = "mup",
    model: Annotated[str | None, typer.Option(help="A built-in network: mlp, cnn, resnet18, vgg19, cbow.")] = None,
    factory: Annotated[
        str | None, typer.Option(help="Your own network: MODULE:FUNCTION, called with its width.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="The width to explain; four times the base if not given.")
    ] = None,
    base_width: Annotated[int | None, typer.Option(min=1, help="The width that settings are tuned at.")] = None,
    output_exponent: Annotated[str | None, typer.Option(help='b of the output weights, or "zero".')] = None,
) -> None:
    """Print how initial weights, learning rates and damping scale with the width, and why.

    Alone it prints the theory, role by role. With --model or --factory it prints every parameter of that network.
    """
    with _errors():
        if model is None and factory is None:
            if width or base_width or output_exponent:
                raise ValueError(
                    "a width or an output exponent needs a network: --model NAME or --factory MODULE:FUNCTION"
                )
            _print(comparison_table(scheme) if method == "all" else method_table(method, scheme))
            return
        methods = list(METHODS) if method == "all" else [get_method(method).name]
        get_scheme(scheme)  # a wrong name is said before a network is built
        plan = _plan(model, factory, width, base_width, scheme, output_exponent)
        for name in methods:
            _print(plan.explain(name))


def _plan(
    model: str | None, factory: str | None, width: int | None, base_width: int | None, scheme: str, exponent: str | None
) -> Parametrization:
    """The plan of a network that is built on the meta device: no width is too large to explain."""
    import torch

    from mukron.models import get_model
    from mukron.params import base_shapes, build, parametrize

    if model is not None and factory is not None:
        raise ValueError("give --model or --factory, not both")
    if model is not None:
        entry = get_model(model)
        make, base_width = entry.factory, base_width or entry.base_width
    else:
        assert factory is not None
        make = _import(factory)
        if base_width is None:
            raise ValueError("--factory needs --base-width, the width that settings are tuned at")
    shapes = base_shapes(make, width=base_width)
    with torch.device("meta"):
        network = build(make, width or 4 * base_width)
    return parametrize(network, shapes, scheme, output_exponent=exponent)


def _import(path: str) -> Callable[..., Any]:
    """The function at MODULE:FUNCTION, modules of the current folder included."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"--factory {path!r}: expected MODULE:FUNCTION, as in mypackage.nets:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--factory {path!r}: no module named {error.name!r} (looked in this folder too)") from error
    except AttributeError as error:
        raise ValueError(f"--factory {path!r}: module {module!r} has no {name!r}") from error
    if not callable(found):
        raise ValueError(f"--factory {path!r}: {name!r} is not a function or class")
    function: Callable[..., Any] = found
    return function


@contextmanager
def _errors() -> Iterator[None]:
    """A wrong request ends in one line that says what to do, not in a traceback."""
    try:
        yield
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe gets whole lines
        print(f"{table}\n")
        return
    drawn = RichTable(title=table.title, caption="\n".join(table.notes), title_justify="left", caption_justify="left")
    for column in table.columns:
        drawn.add_column(column, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_escaped, row))
    console.print(drawn, highlight=False)


if __name__ == "__main__":
    app()
