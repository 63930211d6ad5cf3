"""``mukron data``: lists, downloads and verifies data sets."""

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

DataFolderOption = Annotated[
    Path | None, typer.Option(help="Folder of all data sets (default: $MUKRON_DATA, or a cache folder).")
]


@data_app.command("list")
def list_(data_dir: DataFolderOption = None) -> None:
    """List all data sets, and which of them are on this machine."""
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
    data_dir: DataFolderOption = None,
    force: Annotated[bool, typer.Option("--force", help="Download again and replace existing files.")] = False,
) -> None:
    """Download data sets that are missing, and verify the checksums of all files."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from mukron.data import fetch, get_source

    with errors():
        for name in names:
            get_source(name)  # reports a wrong name before the first download
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
            # Without a bar, pooch prints a line per file.
            bar = None if progress.disable else partial(DownloadBar, progress)
            for name in names:
                files = fetch(name, data_dir, force=force, progress=bar)
                print(f"{name}: {_place(files)}")


@data_app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Data sets to verify (default: all on this machine)."),
    ] = None,
    data_dir: DataFolderOption = None,
) -> None:
    """Verify the checksums of data sets on this machine; exit code 1 if one is wrong, 2 if there is none."""
    from mukron.data import DATASETS, data_folder, problems, where

    with errors():
        present = [where(name, data_dir) for name in names or DATASETS]
        if not names:
            present = [dataset_files for dataset_files in present if dataset_files.files]
        if not present:
            raise ValueError(f"no data sets in {data_folder(data_dir)}; get one with 'mukron data fetch NAME'")
        wrong = {dataset_files.source.name: problems(dataset_files) for dataset_files in present}
    for dataset_files in present:
        checked = "right" if any(file.sha256 for file in dataset_files.source.files) else "has no checksums"
        for problem in wrong[dataset_files.source.name] or [f"{checked}, {_place(dataset_files)}"]:
            print(f"{dataset_files.source.name}: {problem}")
    if any(wrong.values()):
        raise typer.Exit(1)


class DownloadBar:
    """A Rich progress bar with the interface that pooch expects.

    Args:
        progress: The display that the bar is added to.
        download: What is downloaded.
    """

    def __init__(self, progress: Progress, download: Download) -> None:
        self._progress = progress
        self._task = progress.add_task(download.name, total=download.size)
        self.total: Any = download.size  # pooch overwrites it with the server's answer

    def update(self, amount: int) -> None:
        """Advances the bar by a number of bytes."""
        self._progress.update(self._task, advance=amount)

    def reset(self) -> None:
        """Sets the bar to its start."""
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Does nothing: the display removes its bars."""


def _bytes(size: int) -> str:
    if not size:
        return "-"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _place(dataset_files: StoredDataset) -> str:
    if not dataset_files.source.files:
        return "built in"
    if not dataset_files.files:
        return "no"
    return (
        f"{dataset_files.folder} without {', '.join(dataset_files.missing)}"
        if dataset_files.missing
        else str(dataset_files.folder)
    )
