"""``mukron train``: trains one run and records it in a folder."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mukron.cli.common import BUILT_IN, METHODS_PLACEHOLDER, errors, print_text, say, show, split, value_of
from mukron.cli.numbers import RATE
from mukron.cli.progress import BAR, TIME_LEFT, clock, shown_bar
from mukron.imports import default_width, import_function
from mukron.table import Table
from mukron.workers.exits import STOPPED
from mukron.workers.launch import launched, launched_rank, local_rank, restarted

if TYPE_CHECKING:
    from mukron.train import Progress, Run, RunConfig

EXIT_CODES = {"finished": 0, "diverged": 1, "interrupted": STOPPED}
LIST_FIELDS = ("augment", "record", "method_options.exclude")  # lists of names, separated by commas in --set
SHOWN = (  # numbers of an epoch, where it has them
    *("train_loss", "train_accuracy", "test_loss", "test_accuracy", "train_bits_per_byte", "test_bits_per_byte"),
)
DEFAULTS: dict[str, Any] = {  # of RunConfig, for help texts, without loading torch
    **{
        "model": "mlp",
        "width": 256,
        "data": "digits",
        "loss": "cross-entropy",
        "method": "kfac",
        "scheme": "mup",
    },
    **{"schedule": "constant", "momentum": 0.9, "weight_decay": 0.0, "epochs": 20, "seed": 0},
    **{"dtype": "float32", "device": "cpu", "sharding": "ddp"},
}

TrackerOption = Annotated[
    list[str] | None,
    typer.Option(help="wandb, mlflow, tensorboard, or your own MODULE:CLASS, which get the numbers; may be repeated."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Import the functions, MODULE:FUNCTION, that the file names; it may come from anybody."
    ),
]


def _field(name: str, text: str) -> Any:
    """Returns the option of a configuration's field."""
    return typer.Option(help=text, show_default=str(DEFAULTS[name]))


def train(
    model: Annotated[str | None, _field("model", f"A built-in network: {BUILT_IN}.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            help="Your own network: MODULE:FUNCTION, called with its width. Needs --base-width, unless the function's "
            "width has a default, which is then the base width."
        ),
    ] = None,
    width: Annotated[float | None, _field("width", "The network's width.")] = None,
    base_width: Annotated[
        float | None,
        typer.Option(help="The width that settings are tuned at (default: the network's usual one)."),
    ] = None,
    data: Annotated[
        str | None,
        _field(
            "data",
            "A data set by name ('mukron data list'), a text file, or your own MODULE:FUNCTION; a gpt's is coriolanus.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Number of training samples (default: all).")] = None,
    loss: Annotated[str | None, _field("loss", "cross-entropy, mse, or your own MODULE:FUNCTION.")] = None,
    output: Annotated[
        str | None, typer.Option(help="Name of the network's output, if it returns several things.")
    ] = None,
    role: Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")] = None,
    method: Annotated[str | None, _field("method", f"{METHODS_PLACEHOLDER}.")] = None,
    scheme: Annotated[str | None, _field("scheme", "mup, sp, ntk or uniform:R.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            **RATE,
            help="Learning rate, as tuned at the base width: 0.03 or 2^-5 (default: that of the method, 0.1 for kfac).",
        ),
    ] = None,
    damping: Annotated[
        str | None,
        typer.Option(help="A number, or RULE[:NUMBER], as in heuristic:1e-3 (default: that of the method)."),
    ] = None,
    schedule: Annotated[str | None, _field("schedule", "constant, cosine, linear, step:60,120.")] = None,
    momentum: Annotated[float | None, _field("momentum", "Momentum, at least 0 and below 1.")] = None,
    weight_decay: Annotated[
        float | None, _field("weight_decay", "Weight decay; how it follows the width is --set decay=LAW.")
    ] = None,
    epochs: Annotated[int | None, _field("epochs", "Number of epochs.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size (default: all samples).")] = None,
    seed: Annotated[int | None, _field("seed", "Seed of all random numbers.")] = None,
    dtype: Annotated[str | None, _field("dtype", "float32, float64, tf32 (on a GPU), or bfloat16 (autocast).")] = None,
    device: Annotated[str | None, _field("device", "cpu, cuda, cuda:1, ...")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Run the network through torch.compile.")] = False,
    sharding: Annotated[
        str | None, _field("sharding", "What each process of torchrun holds: ddp, all; fsdp, a part of each weight.")
    ] = None,
    record: Annotated[
        list[str] | None,
        typer.Option(help="What to record: features, distance, spectra, rates, words; may be repeated."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field, FIELD=VALUE; METHOD_OPTIONS.NAME=VALUE too.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A run's JSON file, in place of the defaults; options override it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/...).")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    tracker: TrackerOption = None,
    restart: Annotated[bool, typer.Option("--restart", help="Delete the run in the folder and start again.")] = False,
    trust: TrustOption = False,
) -> None:
    """Train one network and record it. The same command again continues a run that was stopped or killed."""
    given = {
        **{"model": model, "width": width, "base_width": base_width, "data": data, "samples": samples, "loss": loss},
        **{
            "output": output,
            "method": method,
            "scheme": scheme,
            "lr": lr,
            "damping": damping,
            "schedule": schedule,
        },
        **{"momentum": momentum, "weight_decay": weight_decay, "epochs": epochs, "batch": batch, "seed": seed},
        **{"dtype": dtype, "device": device, "compile": compiled or None, "record": record, "sharding": sharding},
    }
    first = launched_rank() == 0  # of the processes of torchrun: it alone prints
    with errors(shown=local_rank() == 0):
        from mukron.train.processes import leave_processes

        if factory is not None and model is not None:
            raise ValueError("give --model or --factory, not both")
        given["model"] = factory or model
        if factory is not None and base_width is None and config is None:
            given["base_width"] = default_width(import_function(factory, "--factory"))
        chosen = {name: value for name, value in {**given, "roles": declared_roles(role)}.items() if value is not None}
        described = run_config_from_options(config, chosen, settings or [], trust)
        if config is None and lr is None and not any(setting.startswith("lr=") for setting in settings or []):
            described = described.replace(lr=described.spec.usual_lr(described.method_options))
        folder = out if out is not None else Path("runs") / run_name(described)
        try:
            run = _run(described, folder, data_dir, tracker or [], restart)
        except KeyboardInterrupt:
            if first:
                _print_note("stopped at once; the same command continues from the last checkpoint")
            raise typer.Exit(STOPPED) from None
    if first:
        show(summary(run, folder))
        if run.sample:
            print_text(f"What it writes after the first window of the test text:\n\n{run.sample}\n")
        if run.status == "interrupted":
            _print_note(f"{run.reason}; the same command continues it")
    if launched() > 1:
        leave_processes(EXIT_CODES[run.status])
    raise typer.Exit(EXIT_CODES[run.status])


def _run(config: RunConfig, folder: Path, data_dir: Path | None, tracker: list[str], restart: bool) -> Run:
    from mukron.train import train as train_

    options: dict[str, Any] = {"data_dir": data_dir, "tracker": tracker}
    options["resume"] = not restart or restarted()  # what torchrun starts again goes on
    with ExitStack() as stack:
        if launched_rank() == 0:
            options["progress"] = stack.enter_context(run_progress())
            stack.enter_context(warnings.catch_warnings())
            warnings.showwarning = _tell_warning
        else:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        return train_(config, folder, **options)


def _tell_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning on one line, without the line of code that it comes from."""
    say(f"warning: {' '.join(str(message).split())}")


def run_config_from_options(
    file: Path | None, given: Mapping[str, Any], settings: list[str], trust: bool = False
) -> RunConfig:
    """Builds the configuration of a run; options have priority over the file, and --set over both.

    Args:
        file: A run's JSON file to start from; None for the defaults.
        given: Fields from options.
        settings: The values of --set, FIELD=VALUE.
        trust: Whether to import functions that the file names and no option does.

    Returns:
        The configuration.

    Raises:
        UntrustedError: If the file names functions and ``trust`` is False.
        ValueError: If a field is unknown or its value invalid.

    Example:
        >>> run_config_from_options(None, {"lr": 0.1}, ["clip_norm=1"]).clip_norm
        1.0
    """
    from mukron.train import RunConfig

    start = RunConfig() if file is None else RunConfig.load(file)
    fields = {**start.to_dict(), **({"data": ""} if file is None else {}), **given}
    for setting in settings:
        name, text = split(setting, "=", "--set", "FIELD=VALUE, as in clip_norm=1 or method_options.memory=ema:0.95")
        value = value_of(text)
        if name in LIST_FIELDS and isinstance(value, str):
            value = re.split(r",(?![^{]*\})", value)  # not those in the braces of a pattern
        field, dot, option = name.partition(".")
        if dot and field in fields:
            if not isinstance(fields[field], Mapping):
                raise ValueError(f"--set {setting}: {field!r} holds no options by name")
            value = {**fields[field], option: value}
        fields[field] = value
    return RunConfig.from_dict(fields, "command line", trust=True).trusted(trust)


def declared_roles(given: list[str] | None) -> dict[str, str] | None:
    """Read the values of --role, NAME=ROLE; None if there are none.

    Args:
        given: The values.

    Returns:
        Roles by parameter.

    Example:
        >>> declared_roles(["position=input"])
        {'position': 'input'}
    """
    return dict(split(text, "=", "--role", "NAME=ROLE, as in position=input") for text in given or []) or None


def run_name(config: RunConfig) -> str:
    """Returns the name of a run's folder; more epochs keep it if the schedule allows the run to be continued.

    Args:
        config: The run.

    Returns:
        The name.

    Example:
        >>> from mukron.train import RunConfig
        >>> run_name(RunConfig(width=64)).startswith("mlp-w64-kfac-mup-")
        True
    """
    from mukron.train.schedules import Schedule

    without = [] if Schedule.parse(config.schedule).knows_its_end else ["epochs"]
    key = config.key(without=[*without, "sharding"])  # a run goes on with another sharding too
    parts = (config.model, f"w{config.width:g}", config.method, config.scheme, key)
    return "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)


@contextmanager
def run_progress() -> Iterator[Callable[[Progress], None]]:
    """Yields a callback that moves a progress bar on a terminal, and prints a line per epoch elsewhere, on stderr."""
    text = "epoch {task.fields[epoch]}  loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"
    with shown_bar(text, BAR, TIME_LEFT, epoch="-", loss="-", accuracy="-") as bar:

        def update(at: Progress) -> None:
            epoch, loss, accuracy = f"{at.epoch}/{at.epochs}", f"{at.loss:.4g}", f"{at.accuracy:.4f}"
            bar.update(at.step, at.steps, epoch=epoch, loss=loss, accuracy=accuracy)
            if not bar.live and at.row is not None:
                bar.console.print(epoch_line(at), highlight=False, soft_wrap=True)

        yield update


def epoch_line(at: Progress) -> str:
    """Returns a line with the metrics of an epoch that has ended.

    Args:
        at: The progress at the end of an epoch.

    Returns:
        The line.
    """
    assert at.row is not None
    numbers = {name: at.row.get(name) for name in SHOWN}
    shown = "  ".join(f"{name} {_formatted(value)}" for name, value in numbers.items() if name in at.row)
    return f"epoch {at.epoch}/{at.epochs}  {shown}  {clock(at.seconds_left)} left"


def summary(run: Run, folder: Path) -> Table:
    """Returns a table of how a run ended.

    Args:
        run: The run.
        folder: Its folder.

    Returns:
        The table.

    Example:
        >>> from mukron.train import Run, RunConfig
        >>> run = Run(RunConfig(), "finished", [{"epoch": 1, "test_loss": 0.5}])
        >>> summary(run, Path("runs")).rows
        (('test_loss', '0.5', '0.5', '1'),)
    """
    final = run.final
    rows = []
    for name in SHOWN:
        if name in final:
            has_best = any(row.get(name) is not None for row in run.epochs)
            best = run.best(name, lowest=not name.endswith("accuracy")) if has_best else {}
            rows.append((name, _formatted(final[name]), _formatted(best.get(name)), str(best.get("epoch", "-"))))
    config = run.config
    title = (
        f"{config.model} of width {config.width:g} on {config.data}, {config.method}, {config.scheme}: {run.status} "
        f"after {final.get('epoch', 0)} of {config.epochs} epochs, {clock(run.seconds)}"
    )
    notes = [run.reason] if run.status == "diverged" else []
    if final.get("tokens") and run.seconds:
        notes.append(f"{final['tokens']:,} tokens, {final['tokens'] / run.seconds:,.0f} a second.")
    if run.stored:
        notes.append("This run had ended before; these are its stored numbers. --restart runs it again.")
    return Table(
        title,
        ("", "last", "best", "epoch"),
        tuple(rows) or (("no epoch", "-", "-", "-"),),
        (*notes, f"Files: {folder}"),
    )


def _print_note(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False)


def _formatted(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
