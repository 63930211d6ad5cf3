"""``mukron transfer`` and ``mukron tune``: test whether the best settings transfer, and search them at one width."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mukron.cli.common import BUILT_IN, METHODS_PLACEHOLDER, check_outputs, errors, show
from mukron.cli.numbers import read_numbers
from mukron.cli.progress import BAR, COUNT, SECONDS_BETWEEN_LINES, clock, shown_bar
from mukron.cli.train import TrackerOption, TrustOption, declared_roles, run_config_from_options
from mukron.imports import NAMED_BY
from mukron.workers.exits import STOPPED
from mukron.workers.progress import Throttle

if TYPE_CHECKING:
    from mukron.study import StudyProgress, StudyRecord, TransferStudy
    from mukron.train import RunConfig

EDGE = 0.05  # share of a logarithmic range next to its ends; an optimum there may lie beyond
FEW_STEPS = 50  # of a run, below which a note says so

ModelOption = Annotated[str | None, typer.Option(help=f"A built-in network: {BUILT_IN} (default: mlp).")]
FactoryOption = Annotated[str | None, typer.Option(help="Your own network: MODULE:FUNCTION, called with its width.")]
DataOption = Annotated[
    str | None,
    typer.Option(help="A data set by name, a text file, or your own MODULE:FUNCTION (default: the network's usual)."),
]
SamplesOption = Annotated[int | None, typer.Option(min=1, help="Number of training samples (default: all).")]
LossOption = Annotated[
    str | None, typer.Option(help="cross-entropy, mse, or your own MODULE:FUNCTION (default: cross-entropy).")
]
OutputOption = Annotated[str | None, typer.Option(help="Name of the network's output, if it returns several things.")]
RoleOption = Annotated[list[str] | None, typer.Option(help="A parameter's role, NAME=ROLE; may be repeated.")]
MethodOption = Annotated[str | None, typer.Option(help=f"{METHODS_PLACEHOLDER} (default: kfac).")]
EpochsOption = Annotated[int | None, typer.Option(min=1, help="Number of epochs (default: 5).")]
BatchOption = Annotated[int | None, typer.Option(min=1, help="Batch size (default: 128; 32 for gpt).")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda (default: cpu).")]
BaseWidthOption = Annotated[
    float | None, typer.Option(help="The width at which all schemes are the same (default: the network's usual one).")
]
LrOption = Annotated[
    str | None, typer.Option(help="Learning rates, as in 2^-9:2^-2 (doubling), 2^-8:1:4 (times 4) or 0.01,0.03.")
]
DampingOption = Annotated[
    str | None, typer.Option(help="Dampings, as multiples of the scheme's own number, written like --lr.")
]
SettingsOption = Annotated[list[str] | None, typer.Option("--set", help="Any other field of a run, FIELD=VALUE.")]
ConfigOption = Annotated[
    Path | None, typer.Option(help="A run's JSON file, in place of the defaults; options override it.")
]
MetricOption = Annotated[
    str, typer.Option(help="Metric that decides which setting is best: train_loss, test_loss, test_accuracy, ...")
]
StorageOption = Annotated[
    str | None, typer.Option(help="postgresql://USER@HOST/DATABASE, to share with other machines; password: ~/.pgpass.")
]
NameOption = Annotated[
    str | None, typer.Option(help="The study's name in --storage (default: derived from its folder).")
]
WorkersOption = Annotated[str, typer.Option(help="Number of processes on this machine; auto: one on each GPU, or one.")]
KeepRunsOption = Annotated[bool, typer.Option("--keep-runs", help="Also keep every run's records and checkpoints.")]
OneByOneOption = Annotated[bool, typer.Option("--one-by-one", help="Do not train many narrow networks at once.")]
DataDirOption = Annotated[Path | None, typer.Option(help="Where data sets are kept.")]
ReportOption = Annotated[
    bool, typer.Option("--report/--no-report", help="Write figures and report.html to the folder.")
]


def transfer(
    model: ModelOption = None,
    factory: FactoryOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    loss: LossOption = None,
    output: OutputOption = None,
    role: RoleOption = None,
    method: MethodOption = None,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    device: DeviceOption = None,
    base_width: BaseWidthOption = None,
    widths: Annotated[
        str | None,
        typer.Option(help="Widths, as in 64:1024 (doubling) or 64,256 (default: 1, 2, 4, 8 times the base)."),
    ] = None,
    lr: LrOption = None,
    damping: DampingOption = None,
    over: Annotated[str, typer.Option(help="What is tuned: lr, damping or lr,damping.")] = "lr",
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="SCHEME or SCHEME/DAMPING, as in sp/heuristic:1e-3; may be repeated (default: usual practice, mup)."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    search: Annotated[
        int | None, typer.Option(min=1, help="Number of settings per width, proposed by a sampler instead of a grid.")
    ] = None,
    sampler: Annotated[str, typer.Option(help="Sampler of --search: tpe or random.")] = "tpe",
    metric: MetricOption = "train_loss",
    settings: SettingsOption = None,
    config: ConfigOption = None,
    out: Annotated[Path | None, typer.Option(help="The study's folder (default: studies/...).")] = None,
    storage: StorageOption = None,
    name: NameOption = None,
    workers: WorkersOption = "auto",
    keep_runs: KeepRunsOption = False,
    tracker: TrackerOption = None,
    one_by_one: OneByOneOption = False,
    report: ReportOption = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the certificate to this file.")] = None,
    data_dir: DataDirOption = None,
    trust: TrustOption = False,
) -> None:
    """Train at several widths and test whether the best learning rate (or damping) stays the same.

    The same command again continues a study that was stopped or joins one that is running; with more widths, learning
    rates or seeds it extends the study. Exit code 0: it transfers; 1: it does not; 4: it cannot be determined.
    """
    with errors():
        from mukron.params.storage import write_json
        from mukron.study import Search
        from mukron.study.functions import scheme_of, transfer_study

        check_outputs(files=(json_file,))
        given: dict[str, Any] = {"data": data, "samples": samples, "loss": loss, "method": method, "epochs": epochs}
        given |= {"batch": batch, "device": device, "output": output, "roles": declared_roles(role)}
        chosen_widths = None if widths is None else read_numbers(widths, "--widths")
        described = _describe_study(config, model, factory, given, settings or [], trust, base_width, chosen_widths)
        study = transfer_study(
            described,
            chosen_widths,
            over,
            scheme or (None if config is None else scheme_of(described)),
            None if lr is None else read_numbers(lr, "--lr", ends=search is not None),
            None if damping is None else read_numbers(damping, "--damping", ends=search is not None),
            seeds,
            None if search is None else Search(search, sampler),
            metric,
            out,
            storage=storage,
            name=name,
            keep_runs=keep_runs,
            tracker=tracker or (),
            one_by_one=one_by_one,
            data_dir=data_dir,
        )
        record = _run(study, workers)
        certificate = record.certificate
        if certificate is None:
            raise ValueError("only runs of one width have ended, so there is nothing to compare")
        show(certificate.table())
        if json_file is not None:
            write_json(json_file, certificate.to_dict(), seal=False)
        _finish(record, study.folder, report)
    raise typer.Exit(certificate.exit_code)


def tune(
    width: Annotated[float, typer.Option(help="The narrow width to tune at.")],
    trials: Annotated[int, typer.Option(min=1, help="Number of settings to try.")] = 50,
    model: ModelOption = None,
    factory: FactoryOption = None,
    data: DataOption = None,
    samples: SamplesOption = None,
    loss: LossOption = None,
    output: OutputOption = None,
    role: RoleOption = None,
    method: MethodOption = None,
    scheme: Annotated[str | None, typer.Option(help="SCHEME or SCHEME/DAMPING to tune in (default: mup).")] = None,
    epochs: EpochsOption = None,
    batch: BatchOption = None,
    device: DeviceOption = None,
    lr: Annotated[str | None, typer.Option(help="Range of learning rates to search, as in 2^-10:1.")] = None,
    damping: Annotated[
        str | None,
        typer.Option(help="Range of dampings, as multiples of the scheme's own number; a single number is not tuned."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 1,
    sampler: Annotated[str, typer.Option(help="Sampler: tpe or random.")] = "tpe",
    pruner: Annotated[str, typer.Option(help="Pruner of runs that fall behind: median, halving or none.")] = "median",
    metric: MetricOption = "train_loss",
    settings: SettingsOption = None,
    config: ConfigOption = None,
    out: Annotated[Path, typer.Option(help="The folder that 'mukron plan' reads.")] = Path("tuned"),
    storage: StorageOption = None,
    name: NameOption = None,
    workers: WorkersOption = "auto",
    keep_runs: KeepRunsOption = False,
    tracker: TrackerOption = None,
    report: ReportOption = True,
    data_dir: DataDirOption = None,
    trust: TrustOption = False,
) -> None:
    """Search for the best learning rate and damping at a narrow width; 'mukron plan' then transfers them to a wide one.

    The same command again continues the search; more --trials extend it.
    """
    with errors():
        from mukron.study.functions import scheme_of, tuning_study

        given: dict[str, Any] = {"data": data, "samples": samples, "loss": loss, "method": method, "epochs": epochs}
        given |= {"batch": batch, "device": device, "output": output, "roles": declared_roles(role)}
        described = _describe_study(config, model, factory, given, settings or [], trust, width)
        study = tuning_study(
            described,
            width,
            trials,
            scheme or scheme_of(described),
            None if lr is None else read_numbers(lr, "--lr", ends=True),
            None if damping is None else read_numbers(damping, "--damping", ends=True),
            seeds,
            sampler,
            pruner,
            metric,
            out,
            storage=storage,
            name=name,
            keep_runs=keep_runs,
            tracker=tracker or (),
            data_dir=data_dir,
        )
        record = _run(study, workers)
        show(record.ranking())
        _warn_of_edges(study, record)
        _finish(record, study.folder, report)
        where = "" if out == Path("tuned") else f" --from {out}"
        own = "".join(f" {flag} {path}" for name, flag in NAMED_BY.items() if ":" in (path := getattr(described, name)))
        _print_note(f"next: mukron plan{where} --width {64 * width:g}{own}")


def _describe_study(
    config: Path | None,
    model: str | None,
    factory: str | None,
    given: dict[str, Any],
    settings: list[str],
    trust: bool,
    base_width: float | None,
    widths: list[float] | None = None,
) -> RunConfig:
    """Returns the run that a study varies."""
    from mukron.study.functions import FIELDS_SET_BY_STUDY, study_fields
    from mukron.train import RunConfig

    if factory is not None and model is not None:
        raise ValueError("give --model or --factory, not both")
    for setting in settings:
        if setting.partition("=")[0] in FIELDS_SET_BY_STUDY:
            raise ValueError(f"--set {setting}: a study has its own; say --widths, --seeds, --lr, --scheme, --damping")
    chosen = {name: value for name, value in given.items() if value is not None}
    if factory is not None or model is not None:
        chosen["model"] = factory or model
    start = None if config is None else RunConfig.load(config)
    return run_config_from_options(config, study_fields(chosen, start, base_width, widths), settings, trust)


def _run(study: TransferStudy, workers: str) -> StudyRecord:
    from mukron.study.database import without_password

    command = shlex.join(["mukron", *map(without_password, sys.argv[1:])])  # files with it may be shared
    try:
        with study_progress() as progress:
            record = study.run(workers, progress, command)
        _tell_steps(record)
        return record
    except KeyboardInterrupt:
        _print_note(f"stopped; what was done is kept in {study.folder}, and the same command goes on")
        raise typer.Exit(STOPPED) from None


def _tell_steps(record: StudyRecord) -> None:
    """Says how long runs were; a few steps tell little about a learning rate."""
    steps = max((int(row.get("step") or 0) for result in record.results for row in result.rows), default=0)
    if steps > 0:
        few = ", which is few: give more --epochs or --samples, or a smaller --batch" if steps < FEW_STEPS else ""
        config = record.config
        batch = "" if config.batch is None else f" of {min(config.batch, config.samples or config.batch)} samples"
        _print_note(f"a run took {steps} steps{batch}{few}")


def _warn_of_edges(study: TransferStudy, record: StudyRecord) -> None:
    """Warns if the best setting lies at an end of the range that was searched."""
    from math import log2

    for axis, (low, high) in study.design.ranges(record.schemes[0]).items():
        best = record.best()
        value = best.lr if axis == "lr" else best.damping.rho if best.damping is not None else low
        place = log2(value / low) / log2(high / low) if high > low else 0.5
        if not EDGE <= place <= 1 - EDGE:
            _print_note(
                f"the best {axis} is at the {'low' if place < EDGE else 'high'} end of its range: give a wider --{axis}"
            )


def _finish(record: StudyRecord, folder: Path, report: bool) -> None:
    if report:
        from mukron.figures import available
        from mukron.report import write_report

        if available():
            write_report(record, folder)
            _print_note(f"page: {folder / 'report.html'}")
        else:
            _print_note("no figures and no page: they need matplotlib (pip install 'mukron[studies]')")
    _print_note(f"study: {folder}")


@contextmanager
def study_progress() -> Iterator[Callable[[StudyProgress], None]]:
    """Yields a callback that moves a progress bar on a terminal, and prints lines at intervals elsewhere, on stderr."""
    with shown_bar(BAR, COUNT, "runs  {task.fields[more]}", more="") as bar:
        lines, printed = Throttle(SECONDS_BETWEEN_LINES), -1

        def update(at: StudyProgress) -> None:
            nonlocal printed
            bar.update(at.done, at.total, more=_counts(at))
            if not bar.live and at.done != printed and lines.due(at.done == at.total):
                printed = at.done
                bar.console.print(f"{at.done}/{at.total} runs  {_counts(at)}", highlight=False, soft_wrap=True)

        yield update


def _counts(at: StudyProgress) -> str:
    left = "" if at.seconds_left is None else f", about {clock(at.seconds_left)} left"
    return f"{at.running} running, {at.diverged} diverged{left}"


def _print_note(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
