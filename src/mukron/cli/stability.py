"""``mukron bench stability``: does training stay stable with stale inverses, averaged factors and fitted data?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mukron.cli.common import bench_command, check_outputs, errors, names_in, say, show

if TYPE_CHECKING:
    from mukron.bench.stability.result import StabilityResult

    Work = Callable[[StabilityResult, Path], None]  # adds runs to a result and saves it in a folder


ProblemsOption = Annotated[
    str | None,
    typer.Option(help="Problems, as in digits,gpt: digits, mnist-64, mnist-256, cnn, resnet, gpt. Default: all."),
]
StabilityMethodsOption = Annotated[
    str, typer.Option(help="Methods: kfac, foof, shampoo; with --fitted also gauss-newton.")
]
StabilitySettingsOption = Annotated[
    str | None,
    typer.Option(
        help="Settings to compare: defaults (the class's own), plain (trust=None), or trusts such as spectral:0.5. "
        "Default: defaults,plain; with --fitted: defaults."
    ),
]
StabilityStepsOption = Annotated[
    int | None, typer.Option(min=1, help="Steps of a run. Default: each problem's own; with --fitted: 2000.")
]
StabilitySeedsOption = Annotated[
    int | None, typer.Option(min=1, help="Seeds of every run. Default: 1; with --fitted: 30.")
]
StabilityDeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
StabilityDataOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Data folder. Problems whose data are not there are skipped.")
]
StabilityWorkersOption = Annotated[int, typer.Option(min=1, help="Number of processes; each trains one run at a time.")]
FittedOption = Annotated[
    bool, typer.Option("--fitted", help="Run the check on fitted data instead: small problems, many seeds.")
]
SmokeOption = Annotated[bool, typer.Option("--smoke", help="A trial of seconds: tiny networks, a few steps.")]
StabilityOutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder for the numbers and the figure.")]
StabilityPageOption = Annotated[
    Path | None, typer.Option(help="A page to write the tables into, between its two markers <!-- stability -->.")
]


def stability(
    context: typer.Context,
    problems: ProblemsOption = None,
    methods: StabilityMethodsOption = "kfac,foof,shampoo",
    settings: StabilitySettingsOption = None,
    steps: StabilityStepsOption = None,
    seeds: StabilitySeedsOption = None,
    device: StabilityDeviceOption = "cpu",
    data_dir: StabilityDataOption = None,
    workers: StabilityWorkersOption = 1,
    fitted: FittedOption = False,
    smoke: SmokeOption = False,
    out: StabilityOutOption = Path("bench"),
    page: StabilityPageOption = None,
) -> None:
    """Train with inverses refreshed every 1, 5, 10 and 50 steps, and say which runs stay stable.

    Every run is stored at once. The same command continues where it was interrupted.
    """
    with errors(continues=True):
        from mukron.bench.page import around_markers
        from mukron.bench.stability.matrix import stored_result
        from mukron.bench.stability.page import STABILITY_MARKER

        choices: dict[str, Any] = {
            "problems": names_in(problems),
            "methods": names_in(methods),
            "settings": names_in(settings),
        }
        choices |= {"steps": steps, "seeds": seeds, "device": device, "workers": workers}
        given = {name: value for name, value in choices.items() if value}
        work = _fitted_work(given, smoke) if fitted else _matrix_work({**given, "data_folder": data_dir}, smoke)
        if page is not None:
            around_markers(page, STABILITY_MARKER)  # an error now, not after hours
        check_outputs(folders=(out,))
        result = stored_result(out, bench_command(context), device, smoke)
        try:
            work(result, out)
        finally:
            _show(result, out, page)


def _matrix_work(given: dict[str, Any], smoke: bool) -> Work:
    from mukron.bench.stability.matrix import StabilityMatrix, StabilityOptions

    options = StabilityOptions(**given).for_smoke() if smoke else StabilityOptions(**given)
    return lambda result, out: StabilityMatrix(options, result, out, say).run()


def _fitted_work(given: dict[str, Any], smoke: bool) -> Work:
    from mukron.bench.stability.matrix import SMOKE_FITTED, FittedOptions, run_fitted

    options = FittedOptions(**{**(SMOKE_FITTED if smoke else {}), **given})
    return lambda result, out: run_fitted(options, result, out, say)


def _show(result: StabilityResult, out: Path, page: Path | None) -> None:
    """Prints the tables, and writes the figure and the page. Nothing of it if there are no runs yet."""
    from mukron import figures
    from mukron.bench.stability.drawing import draw_stability
    from mukron.bench.stability.page import write_stability_page

    if not (result.runs or result.fitted):
        return
    written = [result.save(out)]
    if result.runs:
        show(result.table())
        show(result.summary())
        if figures.available():
            written += draw_stability(result, written[0])
    if result.fitted:
        show(result.fitted_table())
    if page is not None:
        written.append(write_stability_page(written[0], page))
    print(f"wrote {', '.join(map(str, written))}")
