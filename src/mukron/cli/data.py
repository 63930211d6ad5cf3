"""``mukron data``: which data sets there are, getting them, checking them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mukron.cli.common import errors, show
from mukron.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress

    from mukron.data import Download, StoredDataset

data_app = typer.Typer(no_args_is_help=True, help="Data sets by name: list them, download them, check their files.")

DataDir = Annotated[
    Path | None, typer.Option(help="The folder of all data sets; else $MUKRON_DATA, else a cache folder.")
]


@data_app.command("list")
def list_(data_dir: DataDir = None) -> None:
    """All data sets, and which of them are on this machine."""
    from mukron.data import DATASETS, data_folder, where

    def row(name: str) -> tuple[str, ...]:
        source = DATASETS[name]
        numbers = [f"{number:,}" if number else "-" for number in (source.train, source.test, source.classes)]
        return name, source.kind, *numbers, _bytes(source.size), _place(where(name, data_dir))

    with errors():
        show(
            Table(
                f"Data sets, in {data_folder(data_dir)}",
                ("name", "kind", "train", "test", "classes", "download", "here"),
                tuple(map(row, DATASETS)),
                notes=("Get one with 'mukron data fetch NAME'; --data-dir or MUKRON_DATA names another folder.",),
            )
        )


@data_app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="One or more of 'mukron data list'.")],
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Download again, in place of what is there.")] = False,
) -> None:
    """Download data sets, unless they are here already; either way their checksums are checked."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from mukron.data import fetch, get_source

    with errors():
        for name in names:
            get_source(name)  # a wrong name is said before the first download
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
            bar = None if progress.disable else partial(Bar, progress)  # without a bar pooch says a line a file
            for name in names:
                found = fetch(name, data_dir, force=force, progress=bar)
                print(f"{name}: {_place(found)}")


@data_app.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]", help="All that are here, if none.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Compute the checksums of data sets on this machine anew; exit code 1 if anything is wrong."""
    from mukron.data import DATASETS, data_folder, problems, where

    with errors():
        found = [where(name, data_dir) for name in names or DATASETS]
        if not names:
            found = [each for each in found if each.files]
        wrong = {each.source.name: problems(each) for each in found}
    for each in found:
        checked = "right" if any(file.sha256 for file in each.source.files) else "has no checksums"
        for problem in wrong[each.source.name] or [f"{checked}, {_place(each)}"]:
            print(f"{each.source.name}: {problem}")
    if not found:
        print(f"no data sets in {data_folder(data_dir)}")
    if any(wrong.values()):
        raise typer.Exit(1)


class Bar:
    """A Rich bar that pooch can move."""

    def __init__(self, progress: Progress, download: Download) -> None:
        self._progress = progress
        self._task = progress.add_task(download.name, total=download.size)
        self.total: Any = download.size  # pooch writes what the server says here; the size is known already

    def update(self, amount: int) -> None:
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        pass


def _bytes(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _place(found: StoredDataset) -> str:
    if not found.source.files:
        return "built in"
    if not found.files:
        return "no"
    return f"{found.folder} without {', '.join(found.missing)}" if found.missing else str(found.folder)
