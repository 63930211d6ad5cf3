"""``mukron check``: tests whether features are learned at every width, and at every depth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mukron.cli.common import BUILT_IN, METHODS_PLACEHOLDER, Command, Group, check_outputs, errors, say, show
from mukron.cli.numbers import RATE, read_numbers
from mukron.cli.progress import BAR, COUNT, SECONDS_BETWEEN_LINES, shown_bar
from mukron.cli.train import declared_roles, run_config_from_options
from mukron.imports import default_width, import_function
from mukron.workers.progress import Throttle

check_app = typer.Typer(cls=Group, invoke_without_command=True)
FACTORY_BASE_WIDTH = 64  # base width of a factory whose width has no default
FIELDS_SET_BY_CHECK = ("width", "seed", "epochs")  # fields of a run that --set may not change
TABLES = {
    "features": "table",
    "damping": "damping_table",
    "spectra": "spectra_table",
    "distance": "distance_table",
}


@check_app.callback()
def check(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help=f"A built-in network: {BUILT_IN}. mlp if not given.")] = None,
    factory: Annotated[
        str | None, typer.Option(help="Your own network: MODULE:FUNCTION, called with its width.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"{METHODS_PLACEHOLDER}.")] = "kfac",
    scheme: Annotated[str, typer.Option(help="mup, sp, ntk or uniform:R.")] = "mup",
    damping: Annotated[str | None, typer.Option(help="A number, or RULE[:NUMBER], as in heuristic:1e-3.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            **RATE, help="Learning rate, as 0.03 or 2^-5 (default: that of the method, lowered until steps are small)."
        ),
    ] = None,
    widths: Annotated[
        str | None, typer.Option(help="Widths, as in 64:1024 (doubling) or 64,256 (default: the network's usual ones).")
    ] = None,
    base_width: Annotated[float | None, typer.Option(help="The width that settings are tuned at.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds at each width (default: as many as the verdict needs, 3 to 8)."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 3,
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set by name, a text file, or your own MODULE:FUNCTION (default: the network's usual data)."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Number of samples, all in one batch.")] = None,
    loss: Annotated[str, typer.Option(help="cross-entropy, mse, or your own MODULE:FUNCTION.")] = "cross-entropy",
    output: Annotated[
        str | None, typer.Option(help="Name of the network's output, if it returns several things.")
    ] = None,
    output_exponent: Annotated[str | None, typer.Option(help='b of the output weights, or "zero".')] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest deviation of an exponent from 0 that passes.")
    ] = 0.25,
    role: Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any other field of a run, FIELD=VALUE.")] = None,
    show_: Annotated[
        str, typer.Option("--show", help="Tables to print: features, damping, spectra, distance, all.")
    ] = "features,damping",
    out: Annotated[Path | None, typer.Option(help="Folder for figures, CSV and JSON.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the verdicts and their numbers to this file.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
) -> None:
    """Train a few steps at several widths and test whether every layer learns at all of them.

    Exit code 0: every layer does; 1: some layer does not; 4: the seeds and widths do not suffice to say.

    The change of every layer's features, and the contribution of every parameter to it, is fitted by a power of the
    width: with an exponent of 0 a layer learns, below 0 its change vanishes, above 0 it explodes. The table also has
    the exponent that theory predicts. Theory is about the plain step, so a check takes that one; --set
    method_options.trust=spectral checks the bounded step that optimizers take by default.
    """
    if context.invoked_subcommand is not None:
        return
    with errors():
        from mukron.diagnose.configured import check_run, usual_rate, with_plain_step
        from mukron.params.storage import write_json
        from mukron.train import RunConfig

        if model is not None and factory is not None:
            raise ValueError("give --model or --factory, not both")
        check_outputs(files=(json_file,), folders=(out,))
        tables = list(TABLES) if show_ == "all" else show_.split(",")
        for name in tables:
            if name not in TABLES:
                raise ValueError(f"--show {show_!r}: known: {', '.join(TABLES)}, all")
        if factory is not None:
            factory_width = default_width(import_function(factory, "--factory")) or FACTORY_BASE_WIDTH
            base_width = factory_width if base_width is None else base_width
        for setting in settings or []:
            if setting.partition("=")[0] in FIELDS_SET_BY_CHECK:
                raise ValueError(f"--set {setting}: a check has its own; say --widths, --seeds, --steps")
        given = {
            **{"model": factory or model or "mlp", "base_width": base_width, "method": method, "scheme": scheme},
            **{"damping": damping, "lr": lr, "data": data, "samples": samples, "loss": loss, "momentum": 0.0},
            **{"output_exponent": output_exponent, "device": device, "output": output, "roles": declared_roles(role)},
        }
        if "momentum" not in RunConfig(method=method).spec.defaults:
            del given["momentum"]  # Adam keeps its beta1
        given["lr"] = usual_rate(method, scheme) if lr is None else lr
        chosen = {name: value for name, value in given.items() if value is not None}
        config = with_plain_step(run_config_from_options(None, chosen, settings or []))
        with check_progress() as progress:
            result = check_run(
                config,
                widths=None if widths is None else read_numbers(widths, "--widths"),
                seeds=seeds,
                steps=steps,
                calibrate=lr is None and not any(setting.startswith("lr=") for setting in settings or []),
                tolerance=tolerance,
                data_dir=data_dir,
                progress=progress,
            )
        for name in tables:
            if result.damping or name not in ("damping", "spectra"):  # absent for first-order methods
                show(getattr(result, TABLES[name])())
        if json_file is not None:
            write_json(json_file, result.of_verdicts().to_dict(), seal=False)
        if out is not None:
            _print_files(result.save(out), out)
    raise typer.Exit(result.exit_code)


@check_app.command(cls=Command)
def depth(
    model: Annotated[str, typer.Option(help="A built-in network with residual blocks: resmlp or gpt.")] = "resmlp",
    factory: Annotated[
        str | None, typer.Option(help="Your own network: MODULE:FUNCTION, called with its width and depth=.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"{METHODS_PLACEHOLDER}.")] = "kfac",
    damping: Annotated[str | None, typer.Option(help="A number, or RULE[:NUMBER], as in rescaled:10.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            **RATE, help="Learning rate, as 0.03 or 2^-5 (default: that of the method, lowered until steps are small)."
        ),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="Depths, as in 2,4,8,16 (default: 1 to 16 times the base depth).")
    ] = None,
    base_depth: Annotated[int, typer.Option(min=1, help="The depth that settings are tuned at.")] = 2,
    base_width: Annotated[float | None, typer.Option(help="The width of all networks.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds at each depth.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 1,
    data: Annotated[str | None, typer.Option(help="A data set by name, or your own MODULE:FUNCTION.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Number of samples, all in one batch.")] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest deviation of an exponent that passes.")] = 0.25,
    role: Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Any other field of a run, FIELD=VALUE.")] = None,
) -> None:
    """Train a step at several depths and test whether features inside of residual blocks change alike at all of them.

    Exit code 0: branches are multiplied by 1/L, and features change alike; 1: they are not, or do not.
    """
    with errors():
        from mukron.diagnose.configured import check_depths, usual_rate, with_plain_step
        from mukron.train import RunConfig

        given = {
            **{"model": factory or model, "base_width": base_width, "method": method, "damping": damping},
            **{"data": data, "samples": samples, "momentum": 0.0, "roles": declared_roles(role)},
            "lr": usual_rate(method, "mup") if lr is None else lr,
        }
        if factory is not None and base_width is None:
            given["base_width"] = default_width(import_function(factory, "--factory")) or FACTORY_BASE_WIDTH
        if "momentum" not in RunConfig(method=method).spec.defaults:
            del given["momentum"]  # Adam keeps its beta1
        chosen = {name: value for name, value in given.items() if value is not None}
        config = with_plain_step(run_config_from_options(None, chosen, settings or []))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the table says it
            branches, features = check_depths(
                config,
                base_depth=base_depth,
                depths=None if depths is None else _whole_numbers(depths, "--depths"),
                seeds=seeds,
                steps=steps,
                calibrate=lr is None,
                tolerance=tolerance,
            )
        show(branches.table())
        show(features.table())
    raise typer.Exit(0 if branches.ok and features.ok else 1)


@check_app.command()
def nngp(
    width: Annotated[int, typer.Option(min=64, help="Width of the three-layer MLP; its base is 64.")] = 256,
    data: Annotated[str, typer.Option(help="A data set by name, or your own MODULE:FUNCTION.")] = "digits",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples, all in one batch.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 30,
    activation: Annotated[str, typer.Option(help="relu, tanh, gelu, erf or identity.")] = "relu",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the figure, CSV and JSON.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
) -> None:
    """Show that one K-FAC step from a zero output layer reaches kernel regression, and that other methods do not."""
    with errors():
        check_outputs(folders=(out,))
        from mukron.diagnose.landing import landing
        from mukron.train import RunConfig, dataset_of

        dataset = dataset_of(RunConfig(data=data, samples=samples), None, data_dir)
        with check_progress() as progress:
            result = landing(dataset, width=width, steps=steps, seed=seed, activation=activation, progress=progress)
        show(result.table())
        if out is not None:
            _print_files(result.save(out), out)


def _print_files(written: list[Path], folder: Path) -> None:
    from mukron.figures import available

    missing = "" if available() else "; figures need matplotlib"
    Console(stderr=True).print(f"{len(written)} files in {folder}{missing}", highlight=False)


@contextmanager
def check_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields a callback that moves a progress bar on a terminal, and prints lines elsewhere, on stderr."""
    throttle = Throttle(SECONDS_BETWEEN_LINES)
    with shown_bar("{task.description}", BAR, COUNT, description="check") as bar:

        def update(done: int, total: int, what: str) -> None:
            bar.update(done, total, description=what)
            if not bar.live and done < total and throttle.due(now=done == 1):
                say(f"run {done + 1} of {total}: {what}")

        yield update


def _whole_numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected whole numbers, as in 2,4,8,16") from None
