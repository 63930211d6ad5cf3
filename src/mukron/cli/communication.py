"""``mukron bench communication``: how many bytes arrive on a rank in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mukron.cli.common import bench_command, check_outputs, errors, say, show
from mukron.cli.numbers import read_numbers

CountedWidthsOption = Annotated[str, typer.Option(help="Hidden widths, as in 256,1024 or 256:4096.")]
CountedBatchesOption = Annotated[str, typer.Option(help="Batches, of all processes together, as in 64,256,1024.")]
CountedRanksOption = Annotated[str, typer.Option(help="Numbers of processes, as in 2,4.")]
CountedBandwidthOption = Annotated[
    float, typer.Option(help="Bytes a second that 'auto' chooses by; with few of them it is bytes that decide.")
]
CountedOutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder for the numbers and the figure.")]
CountedPageOption = Annotated[
    Path | None,
    typer.Option(help="A page to write the tables into, between its two markers <!-- communication -->."),
]


def communication(
    context: typer.Context,
    widths: CountedWidthsOption = "256,1024",
    batches: CountedBatchesOption = "64,192,256,768,1024",
    ranks: CountedRanksOption = "2,4",
    bandwidth: CountedBandwidthOption = 1e7,
    out: CountedOutOption = Path("bench"),
    page: CountedPageOption = None,
) -> None:
    """Count the bytes that arrive on a rank in a step of K-FAC on a 784-M-M-10 MLP, beside data-parallel SGD.

    Processes talk over gloo on the CPU; bytes are the same on any device.
    """
    with errors():
        check_outputs(folders=(out,))
        from mukron import figures
        from mukron.bench.communication.drawing import draw_communication
        from mukron.bench.communication.page import COMMUNICATION_MARKER, write_communication_page
        from mukron.bench.communication.ranks import CountedSizes, count_in_ranks
        from mukron.bench.communication.result import CommunicationResult
        from mukron.bench.page import around_markers

        sizes = CountedSizes(
            _whole_numbers(widths, "--widths"),
            _whole_numbers(batches, "--batches"),
            _whole_numbers(ranks, "--ranks"),
            bandwidth,
        )
        if page is not None:
            around_markers(page, COMMUNICATION_MARKER)  # an error now, not after minutes
        steps = []
        for count in sizes.ranks:
            say(f"{count} ranks")
            steps += count_in_ranks(sizes, count)
        result = CommunicationResult.new(bench_command(context), steps)
        written = [result.save(out)]
        for table in result.tables():
            show(table)
        if page is not None:
            written.append(write_communication_page(written[0], page))
        elif figures.available():
            written += draw_communication(result, written[0])
        print(f"wrote {', '.join(map(str, written))}")


def _whole_numbers(text: str, option: str) -> tuple[int, ...]:
    numbers = read_numbers(text, option)
    if any(number != int(number) for number in numbers):
        raise ValueError(f"{option} {text!r}: expected whole numbers, as in 256,1024")
    return tuple(sorted({int(number) for number in numbers}))
