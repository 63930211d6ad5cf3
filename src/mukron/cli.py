"""The command line: parse, call, print."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
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
        float | None, typer.Option(min=0, help="The width to explain; four times the base if not given.")
    ] = None,
    base_width: Annotated[float | None, typer.Option(min=0, help="The width that settings are tuned at.")] = None,
    output_exponent: Annotated[str | None, typer.Option(help='b of the output weights, or "zero".')] = None,
    role: Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")] = None,
) -> None:
    """Print how initial weights, learning rates and damping scale with the width, and why.

    Alone it prints the theory, role by role. With --model or --factory it prints every parameter of that network.
    """
    with _errors():
        if model is None and factory is None:
            if width or base_width or output_exponent or role:
                raise ValueError(
                    "a width or an output exponent needs a network: --model NAME or --factory MODULE:FUNCTION"
                )
            _print(comparison_table(scheme) if method == "all" else method_table(method, scheme))
            return
        methods = list(METHODS) if method == "all" else [get_method(method).name]
        get_scheme(scheme)  # a wrong name is said before a network is built
        plan = _plan(model, factory, width, base_width, scheme, output_exponent, role or [])
        for name in methods:
            _print(plan.explain(name))


bench_app = typer.Typer(no_args_is_help=True, help="Measure steps of this library beside torch's own.")
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench() -> None:
    pass


@bench_app.command("kfac-step")
def kfac_step(
    width: Annotated[int, typer.Option(min=1, help="Hidden width for the times.")] = 1024,
    batch: Annotated[int, typer.Option(min=2, help="Samples a step.")] = 256,
    memory_width: Annotated[int, typer.Option(min=1, help="Hidden width for the memory.")] = 8192,
    rounds: Annotated[int, typer.Option(min=2, help="Times each method steps.")] = 20,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers there too.")] = None,
) -> None:
    """Time and memory of one step of SGD, AdamW, K-FAC and FOOF on a 784-M-M-10 MLP, in turns."""
    from rich.progress import track

    from mukron.bench import as_dict
    from mukron.bench import kfac_step as measure

    def progress(numbers: Iterable[int]) -> Iterable[int]:
        return track(list(numbers), description="steps", console=Console(stderr=True))

    with _errors():
        measured, table = measure(width, batch, memory_width, rounds, device, progress)
        _print(table)
        if json_file is not None:
            json_file.write_text(
                json.dumps({"title": table.title, "notes": table.notes, "rows": as_dict(measured)}, indent=1)
            )


def _plan(
    model: str | None,
    factory: str | None,
    width: float | None,
    base_width: float | None,
    scheme: str,
    exponent: str | None,
    roles: list[str],
) -> Parametrization:
    """The plan of a network that is built on the meta device: no width is too large to explain."""
    from mukron.models import get_model
    from mukron.params import base_shapes, build_without_memory, parametrize

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
    declared = dict(_split(role, "=", "--role", "NAME=ROLE, as in position=input") for role in roles)
    shapes = base_shapes(make, _number(base_width), roles=declared)
    network = build_without_memory(make, _number(width or 4 * base_width))
    return parametrize(network, shapes, scheme, output_exponent=exponent)


def _number(width: float) -> float:
    return int(width) if float(width).is_integer() else width


def _split(text: str, separator: str, option: str, form: str) -> tuple[str, str]:
    before, found, after = text.partition(separator)
    if not (before and found and after):
        raise ValueError(f"{option} {text!r}: expected {form}")
    return before, after


def _import(path: str) -> Callable[..., Any]:
    """The function at MODULE:FUNCTION, modules of the current folder included."""
    module, name = _split(path, ":", "--factory", "MODULE:FUNCTION, as in mypackage.nets:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except (ModuleNotFoundError, TypeError) as error:
        raise ValueError(
            f"--factory {path!r}: {error} (a module's name, not a file's; this folder counts too)"
        ) from error
    function: Callable[..., Any] | None = getattr(imported, name, None)
    if not callable(function):
        raise ValueError(f"--factory {path!r}: module {module!r} has no function or class {name!r}")
    return function


@contextmanager
def _errors() -> Iterator[None]:
    """A wrong request ends in one line that says what to do, not in a traceback."""
    try:
        yield
    except ValueError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe gets whole lines
        print(f"{table}\n")
        return
    notes = list(table.notes)
    columns, rows = table.columns, table.rows
    if columns[-1] == "why" and table.width > console.width:  # reasons go by role: say each once, below
        role = columns.index("role")
        notes = [*dict.fromkeys(f"{row[role]}: {row[-1]}" for row in rows), "", *notes]
        columns, rows = columns[:-1], tuple(row[:-1] for row in rows)
    tight = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    drawn = RichTable(title=table.title, title_justify="left", **tight)  # type: ignore[arg-type]
    for number, column in enumerate(columns):
        drawn.add_column(column, overflow="fold", no_wrap=number < 2)  # names and roles stay whole
    for row in rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn, highlight=False)
    console.print(*notes, sep="\n", highlight=False, markup=False)


if __name__ == "__main__":
    app()
