"""What all commands share: errors on one line, tables that fit the terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from typer.core import TyperCommand, TyperGroup

from mukron.cli.numbers import is_power, read_number
from mukron.imports import NAMED_BY, UntrustedError
from mukron.printable import printable
from mukron.readers import shown as shortened
from mukron.table import EVERY_COLUMN, Table
from mukron.workers.exits import BROKEN, STOPPED, WRONG_REQUEST

if TYPE_CHECKING:
    from mukron.train import RunConfig

MEMORY_ERROR = re.compile("OutOfMemory|can't allocate memory|DefaultCPUAllocator", re.IGNORECASE)  # as torch says it
TRACEBACK = "--traceback"
traceback_wanted = ContextVar("traceback_wanted", default=False)
METHODS_PLACEHOLDER = "{methods}"  # in help texts: what a run's method may be
ALL_METHODS_PLACEHOLDER = "{all methods}"  # in help texts: every method that theory knows
BUILT_IN = "mlp, cnn, myrtle5, resmlp, resnet18, resnet50, vgg19, cbow, gpt"  # for help texts, without loading torch


def method_list() -> str:
    """What a run's method may be, from the records of the methods. Loads torch."""
    from mukron.optim import spec

    return ", ".join(spec.method_names())


def all_methods_list() -> str:
    """Every method that theory knows, with those that the optimizers add to it."""
    import mukron.optim  # noqa: F401
    from mukron.theory import FAMILIES, METHODS

    return ", ".join([*METHODS, *(family.pattern for family in FAMILIES.values())])


class _ListsMethods:
    """A command whose help lists the methods. Their records need torch, which is loaded when the help is asked for."""

    params: list[Any]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        lists: dict[str, Callable[[], str]] = {
            METHODS_PLACEHOLDER: method_list,
            ALL_METHODS_PLACEHOLDER: all_methods_list,
        }
        for parameter in self.params:
            for placeholder, names in lists.items():
                if placeholder in (getattr(parameter, "help", None) or ""):
                    parameter.help = parameter.help.replace(placeholder, names())
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Root(TyperGroup):
    """All of ``mukron``. --traceback may stand anywhere in a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        others = [argument for argument in args if argument != TRACEBACK]
        return super().parse_args(ctx, [*([TRACEBACK] if len(others) < len(args) else []), *others])


class Command(_ListsMethods, TyperCommand):
    pass


class Group(_ListsMethods, TyperGroup):
    pass


IN_PYTHON = {  # what errors of the library advise, and how it is written on the command line
    r"\bscheme='([^']+)': ": r"--scheme \1: ",
    r"say which with scheme=": "say which with --scheme",
    r"\btuned_at=": "--tuned-at ",
    r"\btuned=FOLDER": "--from FOLDER",
    r"mukron\.tune\(\.\.\.\)": "'mukron tune'",
    r"^over=": "--over ",
    r"^(lr|damping): several, but over='([^']*)'; give over='lr,damping'": (
        r"--\1: several, but the study is --over \2; say --over lr,damping"
    ),
    r"\bwidths=\(64, 512\)": "--widths 64:512",
    r"^model=('[^']+'): its width has no default; give widths or base_width": (
        r"--factory \1: its width has no default; give --widths or --base-width"
    ),
    r'base_shapes\(\.\.\., roles=\{"([^"]+)": "(\w+)"\}\)': r"--role \1=\2",
    r"\bloss='([\w:]+)'": r"--loss \1",
    r"\bdata='([\w:]+)'": r"--data \1",
    r"\bsample=\(3, 32, 32\)": "--sample 3,32,32",
    r"\bsample=\(([-\d,]+)\)": r"--sample \1",
    r"^ranks= needs one of model=.*": "--ranks needs one of --model NAME, --factory MODULE:FUNCTION and --shapes NAME",
    r"^ranks= needs batch=": "--ranks needs --batch",
    r"^shapes= is a network of fixed sizes: .*": (
        "--shapes is a network of fixed sizes: leave out --width, --set NAME and --sample"
    ),
    r"^model= and factory= need width=": "--model and --factory need --width",
    r"^model='(\w+)' cannot be built at width=": r"--model \1 cannot be built at --width ",
    r"^(width|bandwidth|speed)=(\S+): expected a positive number": r"--\1 \2: expected a positive number",
    r"\bleave out positions=": "leave out --positions",
    r"\bgive positions=, as in positions=": "give --positions, as in --positions ",
    r"^shapes='([^']+)' is a network of tokens": r"--shapes \1 is a network of tokens",
    r"\bcommunication='([^']*)'": r"--communication \1",
    r"\bgive the bandwidth as bandwidth=": "give the bandwidth as --bandwidth ",
    r"\bgive bandwidth= and speed=": "give --bandwidth and --speed",
    r"^method_options: (\w+)=": r"--set method_options.\1=",
}


@contextmanager
def errors(*, continues: bool = False, shown: bool = True) -> Iterator[None]:
    """Turns errors into one line and an exit code: 2 for an invalid request, 3 for any other error.

    The line of the latter names the place in the code; ``mukron --traceback`` prints how it was reached.

    Args:
        continues: Whether the same command continues where it was interrupted; then that is said.
        shown: Whether to print the message for an invalid request. Of several processes that refuse the same, one does.

    Raises:
        typer.Exit: With that exit code; 130 after Ctrl-C.
    """
    try:
        yield
    except ValueError as error:
        said = error.for_command_line() if isinstance(error, UntrustedError) else str(error)
        for in_python, here in IN_PYTHON.items():
            said = re.sub(in_python, here, said)
        if traceback_wanted.get():
            traceback.print_exc()
        if shown:
            _print_error(said)
        raise typer.Exit(WRONG_REQUEST) from None
    except KeyboardInterrupt:
        say("interrupted; the same command continues" if continues else "interrupted")
        raise typer.Exit(STOPPED) from None
    except (typer.Exit, typer.Abort):
        raise
    except RecursionError:
        _print_unexpected("data or a network is nested too deeply")
        raise typer.Exit(BROKEN) from None
    except BrokenPipeError:  # the reader, as in "| head", has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is left to flush
        raise typer.Exit(141) from None
    except ConnectionError as error:  # another process of the run has ended
        _print_error(str(error))
        raise typer.Exit(BROKEN) from None
    except OSError as error:  # a file that cannot be read or written, a full disk
        if shown:
            _print_unexpected(f"{error.filename}: {error.strerror}" if error.filename else str(error), place=False)
        raise typer.Exit(WRONG_REQUEST) from None
    except Exception as error:  # in the user's code or in ours; exit codes 1 and 2 have other meanings
        first = str(error).strip().partition("\n")[0]
        if isinstance(error, MemoryError) or MEMORY_ERROR.search(f"{type(error).__name__} {first}"):
            _print_unexpected(f"out of memory ({first[:200]}); give a smaller batch or width", place=False)
        else:
            _print_unexpected(f"{type(error).__name__}: {first}" if first else type(error).__name__)
        raise typer.Exit(BROKEN) from None


def _print_unexpected(text: str, place: bool = True) -> None:
    """Prints one line about the error that is handled now, and its traceback if that was asked for."""
    if traceback_wanted.get():
        traceback.print_exc()
    frame = traceback.extract_tb(sys.exc_info()[2])[-1]
    where = f" ({frame.filename}, line {frame.lineno})" if place else ""
    _print_error(text + where + ("" if traceback_wanted.get() else "; mukron --traceback shows more"))


def _print_error(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]error:[/] {escape(printable(text))}", highlight=False, emoji=False
    )


def show(table: Table) -> None:
    """Prints a table, fitted to the terminal.

    Args:
        table: The table.

    Example:
        >>> show(Table("Runs", ("name", "loss"), (("a", "0.5"),)))
        Runs
        <BLANKLINE>
        name  loss
        ----  ----
        a     0.5
        <BLANKLINE>
    """
    console = Console()
    if not console.is_terminal:  # a file or a pipe gets lines of any length
        print(f"{table.text(width=None)}\n")
        return
    table = table.narrowed(console.width)
    tight = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    drawn = RichTable(title=escape(printable(table.title)), title_justify="left", **tight)  # type: ignore[arg-type]
    for number, column in enumerate(table.columns):
        drawn.add_column(
            escape(printable(column)), overflow="fold", no_wrap=number < 2
        )  # names and roles are not wrapped
    for row in table.rows:
        drawn.add_row(*(escape(printable(cell)) for cell in row))
    console.print(drawn, highlight=False)
    notes = [printable(note).replace(EVERY_COLUMN, "A file or a pipe gets every column.") for note in table.notes]
    console.print(*notes, sep="\n", highlight=False, markup=False)


def names_in(text: str | None) -> tuple[str, ...]:
    """Reads names that are separated by commas.

    Args:
        text: The names, or nothing.

    Returns:
        The names, each once.

    Example:
        >>> names_in("kfac, foof,kfac"), names_in(None)
        (('kfac', 'foof'), ())
    """
    return tuple(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def say(line: str) -> None:
    """Prints a line of progress, which is no result: to the error stream.

    Args:
        line: The line.
    """
    Console(stderr=True, soft_wrap=True).print(printable(line), highlight=False, markup=False)


def check_outputs(*, files: Sequence[Path | None] = (), folders: Sequence[Path | None] = ()) -> None:
    """Refuses places that cannot be written to before any work is done. Folders that are missing are made.

    Args:
        files: Files that will be written; None is left out.
        folders: Folders that files will be written to.

    Raises:
        ValueError: A place cannot be written to.
    """
    from mukron.params.storage import is_stream

    for path in filter(None, files):
        if path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; name a file")
    for path in filter(None, [*files, *folders]):
        if is_stream(path) and path in files:
            continue
        folder = path.parent if path in files else path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except FileExistsError:
            raise ValueError(f"cannot write to {folder}: it is a file; name a folder") from None
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror}") from None


def trust_named(config: RunConfig, named: Mapping[str, str | None]) -> RunConfig:
    """Trusts the functions of a stored run that the command names too.

    Args:
        config: The run, as a file has it.
        named: By field, the function that the command names.

    Returns:
        The run.

    Raises:
        ValueError: If the run has another value in this field.

    Example:
        >>> from mukron.train import RunConfig
        >>> stored = RunConfig.from_dict({"data": "mine:load"}, "study.json")
        >>> trust_named(stored, {"data": "mine:load"}).trusted(False).data
        'mine:load'
    """
    chosen = {name: value for name, value in named.items() if value is not None}
    for name, value in chosen.items():
        if value != getattr(config, name):
            raise ValueError(f"{NAMED_BY[name]} {value}: the file has {name}={getattr(config, name)!r}")
    return config.replace(**chosen)


def split(text: str, separator: str, option: str, form: str) -> tuple[str, str]:
    """Splits an option's value in two.

    Args:
        text: The value.
        separator: What separates the two parts.
        option: The option's name, for the error message.
        form: The expected form, for the error message.

    Returns:
        The two parts.

    Raises:
        ValueError: If a part is missing.

    Example:
        >>> split("lr=0.1", "=", "--set", "FIELD=VALUE")
        ('lr', '0.1')
    """
    before, separated, after = text.partition(separator)
    if not (before and separated and after):
        raise ValueError(f"{option} {text!r}: expected {form}")
    return before, after


def value_of(text: str) -> Any:
    """Reads a value of --set: JSON, a power such as 2^-5, True, False and None as Python spells them, or else text.

    Args:
        text: The value as it was typed.

    Returns:
        The value.

    Example:
        >>> value_of("false"), value_of("False"), value_of("0.5"), value_of("2^-2"), value_of("cosine")
        (False, False, 0.5, 0.25, 'cosine')
    """
    python: dict[str, bool | None] = {"True": True, "False": False, "None": None}
    if text in python:
        return python[text]
    if is_power(text):
        return read_number(text)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a deep nest
        raise ValueError(f"{shortened(text)}: {error}") from None


def print_text(text: str) -> None:
    """Prints a text of any characters: control characters are escaped, and what stdout cannot encode is replaced.

    Args:
        text: The text.

    Example:
        >>> print_text("one" + chr(27) + "two")
        one\\x1btwo
    """
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, errors="replace").decode(encoding))


def bench_command(context: typer.Context) -> str:
    """Returns a command of ``mukron bench`` as it was typed, without absolute paths, which show the user's folders.

    Args:
        context: The command's context.

    Returns:
        The command.
    """
    arguments = ["mukron", "bench", str(context.info_name)]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, Path) and value.is_absolute():
            continue
        flag = parameter.opts[0]
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-"))
        else:
            arguments += [flag, str(value)]
    return shlex.join(arguments)
