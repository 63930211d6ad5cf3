"""``mukron bench``: time and memory of a step; ``stability``, ``gpt`` and ``communication`` have their own files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console

from mukron.cli.common import bench_command, check_outputs, errors, show
from mukron.cli.communication import communication
from mukron.cli.gpt import gpt
from mukron.cli.numbers import read_numbers
from mukron.cli.stability import stability

if TYPE_CHECKING:
    from mukron.bench.result import BenchResult, MethodResult

    class BenchRun(Protocol):
        """A run of a benchmark."""

        result: BenchResult

        def rows(self, track: Any, rounds: Any) -> Iterator[list[MethodResult]]: ...


T = TypeVar("T")

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure steps of this library beside torch's own and other libraries'."
)

BenchWidthsOption = Annotated[str, typer.Option(help="Hidden widths, as in 256,1024 or 256:4096.")]
BenchBatchOption = Annotated[int, typer.Option(min=2, help="Batch size.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds: how often every method is measured.")]
BenchDeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
PrecisionOption = Annotated[str, typer.Option(help="Precision of float32 products on a GPU: float32 or tf32.")]
AgainstOption = Annotated[
    str, typer.Option(help="Other libraries to compare with: all (that are installed), none, or their names on PyPI.")
]
PatienceOption = Annotated[
    float, typer.Option(min=0, help="Seconds per round; slower methods are measured in 3 rounds only.")
]
MemoryOption = Annotated[bool, typer.Option(help="Also measure peak memory.")]
ProfileOption = Annotated[bool, typer.Option(help="Profile the steps of this library by phase.")]
BenchOutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder for the numbers and the figure.")]
ClassesOption = Annotated[int, typer.Option(help="Number of classes: 10 or 100.")]
BENCH_FOLDER = Path("bench")

bench_app.command("stability")(stability)
bench_app.command("gpt")(gpt)
bench_app.command("communication")(communication)


@bench_app.command("kfac-step")
def kfac_step(
    context: typer.Context,
    widths: BenchWidthsOption = "1024",
    batch: BenchBatchOption = 256,
    rounds: RoundsOption = 20,
    device: BenchDeviceOption = "cpu",
    precision: PrecisionOption = "float32",
    against: AgainstOption = "all",
    patience: PatienceOption = 20.0,
    memory: MemoryOption = True,
    profile: ProfileOption = False,
    out: BenchOutOption = BENCH_FOLDER,
) -> None:
    """Compare K-FAC and FOOF on a 784-M-M-10 MLP with SGD and AdamW: plain steps, and K-FAC as it is by default."""
    with errors():
        from mukron.bench.kfac_step import KFAC_STEP
        from mukron.bench.measure import Options
        from mukron.bench.steps import StepsRun

        options = Options(_whole_numbers(widths), batch, rounds, device, precision, against, patience, memory, profile)
        _run(StepsRun(KFAC_STEP, options, bench_command(context)), out)


@bench_app.command("shampoo-step")
def shampoo_step(
    context: typer.Context,
    widths: BenchWidthsOption = "256",
    batch: BenchBatchOption = 256,
    rounds: RoundsOption = 10,
    device: BenchDeviceOption = "cpu",
    precision: PrecisionOption = "float32",
    against: AgainstOption = "all",
    patience: PatienceOption = 20.0,
    memory: MemoryOption = True,
    profile: ProfileOption = False,
    out: BenchOutOption = BENCH_FOLDER,
) -> None:
    """Compare Shampoo's solvers on a 784-M-M-10 MLP with SGD and AdamW; roots are updated every 1 or 10 steps."""
    with errors():
        from mukron.bench.measure import Options
        from mukron.bench.shampoo_step import SHAMPOO_STEP
        from mukron.bench.steps import StepsRun

        options = Options(_whole_numbers(widths), batch, rounds, device, precision, against, patience, memory, profile)
        _run(StepsRun(SHAMPOO_STEP, options, bench_command(context)), out)


@bench_app.command("conv")
def conv(
    context: typer.Context,
    widths: Annotated[
        str,
        typer.Option(
            "--widths", "--width", help="Width; 1 has 16 channels in the first layer, 4 is the usual ResNet-18."
        ),
    ] = "4",
    batch: BenchBatchOption = 128,
    classes: ClassesOption = 10,
    rounds: RoundsOption = 3,
    device: BenchDeviceOption = "cpu",
    precision: PrecisionOption = "float32",
    patience: PatienceOption = 20.0,
    memory: MemoryOption = True,
    profile: ProfileOption = False,
    out: BenchOutOption = BENCH_FOLDER,
) -> None:
    """Compare K-FAC on ResNet-18 and 32 x 32 images with SGD; inverses are updated every 10 steps."""
    with errors():
        from mukron.bench.conv import conv_bench
        from mukron.bench.measure import Options
        from mukron.bench.steps import StepsRun

        if classes not in (10, 100):
            raise ValueError(f"--classes {classes}: choose 10 or 100")
        options = Options(_whole_numbers(widths), batch, rounds, device, precision, "none", patience, memory, profile)
        _run(StepsRun(conv_bench(classes), options, bench_command(context)), out)


@bench_app.command("roots")
def roots_command(
    context: typer.Context,
    widths: Annotated[str, typer.Option(help="Sizes of the matrices, as in 256,1024 or 256:4096.")] = "256,512",
    rounds: RoundsOption = 10,
    device: BenchDeviceOption = "cpu",
    precision: PrecisionOption = "float32",
    patience: PatienceOption = 20.0,
    out: BenchOutOption = BENCH_FOLDER,
) -> None:
    """Measure damped inverse roots of covariance matrices by every solver: time, and error in float32."""
    with errors():
        from mukron.bench.measure import Options
        from mukron.bench.roots import RootsRun

        options = Options(
            _whole_numbers(widths),
            rounds=rounds,
            device=device,
            precision=precision,
            against="none",
            patience=patience,
            memory=False,
        )
        _run(RootsRun(options, bench_command(context)), out)


@bench_app.command("sweep")
def sweep(
    context: typer.Context,
    widths: BenchWidthsOption = "128",
    batch: BenchBatchOption = 64,
    rounds: RoundsOption = 3,
    device: BenchDeviceOption = "cpu",
    precision: PrecisionOption = "float32",
    out: BenchOutOption = BENCH_FOLDER,
) -> None:
    """Time 64 short K-FAC runs of an MLP that differ in learning rate and seed, one by one and as stacks."""
    with errors():
        from mukron.bench.measure import Options
        from mukron.bench.sweep import SweepRun

        options = Options(_whole_numbers(widths), batch, rounds, device, precision, "none", memory=False)
        _run(SweepRun(options, bench_command(context)), out)


@bench_app.command("page")
def page(
    files: Annotated[list[Path], typer.Argument(help="Results of benchmarks, .json.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/performance.md"),
) -> None:
    """Write a page with a section for every result: table, figure, and the command that runs it again."""
    with errors():
        from mukron.bench.page import write_performance_page

        print(f"wrote {write_performance_page(files, out)}")


def _run(run: BenchRun, out: Path) -> None:
    """Runs a benchmark, stores the result after every width, and shows it, also after Ctrl-C."""
    from mukron import figures
    from mukron.bench.drawing import draw_result

    check_outputs(folders=(out,))
    result, written = run.result, list[Path]()
    try:
        for rows in run.rows(_track, _track):
            result = result.with_rows(rows)
            written = [result.save(out)]
    finally:
        if written:
            show(result.table())
            parts = result.parts_table()
            if parts is not None:
                show(parts)
            if figures.available():
                written += draw_result(result, written[0])
            print(f"wrote {', '.join(map(str, written))}")


def _track(work: Sequence[T], description: str) -> Iterable[T]:
    from rich.progress import track

    return track(work, description=description, console=Console(stderr=True))


def _whole_numbers(text: str) -> tuple[int, ...]:
    numbers = read_numbers(text, "--widths")
    if any(number != int(number) for number in numbers):
        raise ValueError(f"--widths {text!r}: expected whole numbers, as in 256,1024")
    return tuple(sorted({int(number) for number in numbers}))
