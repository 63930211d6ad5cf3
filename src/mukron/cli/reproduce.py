"""``mukron reproduce``: runs the recipes of the paper's figures and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mukron.cli.common import check_outputs, errors, show
from mukron.cli.numbers import read_numbers
from mukron.cli.progress import BAR, COUNT, TIME_LEFT, shown_bar
from mukron.table import Table
from mukron.workers.progress import Throttle

if TYPE_CHECKING:
    from mukron.paper import Outcome, ReproductionProgress

MINUTE = 60.0


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Names of figures or tables; see --list.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all recipes and their stored results.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Run every recipe.")] = False,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds, digits), small (minutes, two cores) or paper (one GPU).")
    ] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    epochs: Annotated[int | None, typer.Option(min=1, help="Maximum number of epochs; noted in the result.")] = None,
    widths: Annotated[str | None, typer.Option(help="Run only these of the recipe's widths, as in 1,2,4,8.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Maximum number of seeds.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: reproduction/SCALE).")] = None,
    page: Annotated[
        bool,
        typer.Option("--page", help="Run nothing: judge and draw the results in --out again, and write their page."),
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
) -> None:
    """Run figures and tables of the paper, and check its claims about them.

    Results are written to a folder with the recipe's name: figure.svg, numbers.csv, evidence.json, and result.json with
    the verdict on every claim. The same command continues after it was stopped. Exit code 0: all claims hold, 1: one
    does not, 4: one cannot be determined; smoke runs, which are too small for verdicts, end with 0.
    """
    with errors():
        from mukron.paper import RECIPES, Less, Request, Scale, judge_again, outcomes, write_page
        from mukron.paper import reproduce as run
        from mukron.paper.recipe import FAILS, IN_PART, UNTOLD

        folder = out if out is not None else Path("reproduction") / scale
        if scale not in {known_scale.value for known_scale in Scale}:
            raise ValueError(f"--scale {scale!r}: known: {', '.join(known_scale.value for known_scale in Scale)}")
        if list_:
            show(_recipe_table(folder))
            return
        if page:
            if names or all_:
                raise ValueError("--page is of all that --out holds; leave the names out")
            if not folder.is_dir():
                raise ValueError(f"--page: there is no folder {folder}; say where results are kept (--out)")
            for name in outcomes(folder):
                judge_again(folder / name, None if data_dir is None else str(data_dir))
            print(write_page(folder))
            return
        if all_ == bool(names):
            raise ValueError("name recipes, or say --all; mukron reproduce --list names them")
        chosen = tuple(RECIPES) if all_ else tuple(dict.fromkeys(names or ()))
        less = Less(epochs, None if widths is None else tuple(read_numbers(widths, "--widths")), seeds)
        request = Request(chosen, Scale(scale), str(folder), less, device, None if data_dir is None else str(data_dir))
        request.experiments()  # which refuses what cannot be
        check_outputs(folders=(folder,))
        with _progress_and_outcomes() as (progress, concluded):
            results = run(request, workers=workers, progress=progress, concluded=concluded)
        print(write_page(folder))
    verdicts = {judged.verdict for outcome in results.values() for judged in outcome.claims}
    code = 1 if verdicts & {FAILS, IN_PART} else 4 if UNTOLD in verdicts else 0
    raise typer.Exit(0 if scale == "smoke" else code)


def _recipe_table(folder: Path) -> Table:
    from mukron.paper import RECIPES, outcomes

    stored = outcomes(folder) if folder.exists() else {}
    rows = [
        (name, recipe.where, recipe.title, f"{stored[name].verdict} ({stored[name].scale})" if name in stored else "-")
        for name, recipe in RECIPES.items()
    ]
    return Table("The paper, figure by figure", ("name", "where", "what", f"in {folder}"), tuple(rows))


@contextmanager
def _progress_and_outcomes() -> Iterator[
    tuple[Callable[[ReproductionProgress], None], Callable[[Outcome, list[Path]], None]]
]:
    """Yields two callbacks: one moves a progress bar on a terminal, the other prints each outcome."""
    with shown_bar("{task.description}", BAR, COUNT, TIME_LEFT, description="reproduce") as bar:
        lines = Throttle(MINUTE, at_once=False)

        def progress(at: ReproductionProgress) -> None:
            text = f"part {min(at.parts + 1, at.of_parts)} of {at.of_parts}: {at.now or 'all run'}"
            bar.update(at.runs, at.of_runs, description=text)
            if not bar.live and lines.due():  # for a log file
                print(f"{at.runs} of {at.of_runs} runs; {text}", file=sys.stderr, flush=True)

        def concluded(outcome: Outcome, written: list[Path]) -> None:
            bar.console.print(f"[bold]{outcome.name}[/]: {outcome.verdict}", highlight=False)
            for judged in outcome.claims:
                text = f"  {judged.verdict}: {judged.claim} {judged.measured}"
                bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

        yield progress, concluded
