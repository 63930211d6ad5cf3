"""``mukron bench``: what a step costs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mukron.cli.common import errors, show

bench_app = typer.Typer(no_args_is_help=True, help="Measure steps of this library beside torch's own.")


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

    with errors():
        measured, table = measure(width, batch, memory_width, rounds, device, progress)
        show(table)
        if json_file is not None:
            json_file.write_text(
                json.dumps({"title": table.title, "notes": table.notes, "rows": as_dict(measured)}, indent=1)
            )
