"""``mukron bench gpt``: what methods reach on a small GPT, and whether learning rates transfer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mukron.cli.common import bench_command, check_outputs, errors, names_in, say, show
from mukron.cli.numbers import read_numbers

if TYPE_CHECKING:
    from mukron.bench.gpt.result import GPTResult

GPTTextOption = Annotated[
    Path | None, typer.Option(help="A text file; its bytes are the tokens. Default: a synthetic text.")
]
GPTMethodsOption = Annotated[
    str,
    typer.Option(
        help="Methods: adamw, kfac, foof, shampoo, soap, muon; and without muP torch-muon, pytorch-optimizer-soap and "
        "distributed-shampoo (if they are installed), shampoo-as-distributed (ours, with its settings); "
        "torch-muon-groups and pytorch-optimizer-soap-groups take our groups."
    ),
]
GPTWidthsOption = Annotated[
    str, typer.Option(help="Widths, as in 128,256 or 128:1024. The narrowest is the base of the parametrization.")
]
GPTDepthsOption = Annotated[
    str, typer.Option(help="Numbers of blocks, as in 2,4,8. The smallest is the base of the parametrization.")
]
GPTSchemesOption = Annotated[str, typer.Option(help="mup, sp, or both: mup,sp.")]
GPTDecayOption = Annotated[float, typer.Option(help="Weight decay of this library's methods, decoupled.")]
GPTDampingsOption = Annotated[
    str | None,
    typer.Option(help="Damping rules, as in rescaled:0.25,rescaled:1,mean-eigenvalue:1. Default: each method's own."),
]
GPTRatesOption = Annotated[
    str | None,
    typer.Option(help="Learning rates, as in 0.05,0.1,0.2. Default: 0.1; with --seconds: those that are stored."),
]
GPTStepsOption = Annotated[int, typer.Option(min=1, help="Steps of a run.")]
GPTSeedsOption = Annotated[int, typer.Option(min=1, help="Seeds of every run.")]
GPTDeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
GPTPrecisionOption = Annotated[str, typer.Option(help="Precision of float32 products on a GPU: float32 or tf32.")]
GPTWorkersOption = Annotated[int, typer.Option(min=1, help="Number of processes; each trains one run at a time.")]
GPTSecondsOption = Annotated[
    float | None,
    typer.Option(
        help="Also measure what a step costs, and train each method for so many seconds at the best learning rate of "
        "the stored runs: which optimizer is best after equal time? With one width.",
    ),
]
GPTOutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder for the numbers and the figure.")]
GPTPageOption = Annotated[
    Path | None, typer.Option(help="A page to write the tables into, between its two markers <!-- gpt -->.")
]


def gpt(
    context: typer.Context,
    text: GPTTextOption = None,
    methods: GPTMethodsOption = "kfac,shampoo",
    widths: GPTWidthsOption = "256",
    depths: GPTDepthsOption = "4",
    schemes: GPTSchemesOption = "mup",
    weight_decay: GPTDecayOption = 0.0,
    dampings: GPTDampingsOption = None,
    rates: GPTRatesOption = None,
    steps: GPTStepsOption = 500,
    seeds: GPTSeedsOption = 1,
    device: GPTDeviceOption = "cpu",
    precision: GPTPrecisionOption = "float32",
    workers: GPTWorkersOption = 1,
    seconds: GPTSecondsOption = None,
    out: GPTOutOption = Path("bench"),
    page: GPTPageOption = None,
) -> None:
    """Train a GPT on the bytes of a text: optimizers with all their defaults and one learning rate.

    With several widths or depths and at least three learning rates it says whether the best one transfers. Every run
    is stored at once. The same command continues where it was interrupted.
    """
    with errors(continues=True):
        from mukron.bench.gpt.choice import check_equal_time, run_equal_time
        from mukron.bench.gpt.options import GPTOptions
        from mukron.bench.gpt.page import GPT_MARKER
        from mukron.bench.gpt.result import GPTResult, run_gpt
        from mukron.bench.page import around_markers

        sizes = {"--widths": widths, "--depths": depths}
        numbers = {name: read_numbers(text_of, name) for name, text_of in sizes.items()}
        for name, of in numbers.items():
            if any(number != int(number) for number in of):
                raise ValueError(f"{name} {sizes[name]!r}: expected whole numbers, as in 128,256")
        given: dict[str, Any] = {"steps": steps, "seeds": seeds, "file": text, "device": device}
        tried = () if rates is None and seconds is not None else tuple(read_numbers(rates or "0.1", "--rates"))
        given |= {"precision": precision, "workers": workers, "rates": tried}
        given |= {"depths": tuple(map(int, numbers["--depths"])), "schemes": names_in(schemes)}
        given |= {"weight_decay": weight_decay, "dampings": names_in(dampings) or ("",)}
        options = GPTOptions(names_in(methods), tuple(map(int, numbers["--widths"])), **given)
        if seconds is not None:
            check_equal_time(options, seconds)
        if page is not None:
            around_markers(page, GPT_MARKER)  # an error now, not after hours
        check_outputs(folders=(out,))
        result = GPTResult.stored(out, bench_command(context), options)
        try:
            run_gpt(options, result, out, say)
            if seconds is not None:
                run_equal_time(options, seconds, result, out, say)
        finally:
            _show(result, out, page)


def _show(result: GPTResult, out: Path, page: Path | None) -> None:
    """Prints the tables, and writes the figure and the page. Nothing of it if there are no runs yet."""
    from mukron import figures
    from mukron.bench.gpt.choice import choice_tables
    from mukron.bench.gpt.drawing import draw_gpt
    from mukron.bench.gpt.page import write_gpt_page

    if not result.runs:
        return
    written = [result.save(out)]
    show(result.table())
    for choice in choice_tables(result):
        show(choice)
    if not result.transfers() and len({(run.width, run.depth) for run in result.runs}) > 1:
        print("no verdict on transfer: that needs at least three learning rates at every size")
    if result.transfers():
        show(result.transfer_table())
        if figures.available():
            written += draw_gpt(result, written[0])
    if page is not None:
        written.append(write_gpt_page(written[0], page))
    print(f"wrote {', '.join(map(str, written))}")
