"""Every loader of a file on changed files: it reads them or says what is wrong, and what it has read can be used.

Wrong is any exception but ValueError (of which mukron's errors are) and OSError, any change that takes long, and damage
that is read as something else. ``soak`` says how many are tried.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import soak
import torch
from mutations import changed_bytes, changes

import mukron
from mukron.bench.communication.result import CommunicationResult
from mukron.bench.gpt.result import GPTResult
from mukron.bench.result import BenchResult
from mukron.bench.stability.result import StabilityResult
from mukron.diagnose import Check
from mukron.diagnose.landing import Landing
from mukron.models import MLP
from mukron.paper.outcome import Outcome, csv_rows, load_evidence
from mukron.params import BaseShapes, Parametrization
from mukron.params.mup_file import read_base_sizes
from mukron.params.storage import read_json, unsealed, write_json
from mukron.report import tables
from mukron.study import Design, StudyRecord, TransferStudy
from mukron.study.functions import best_run
from mukron.train import Run, RunConfig, train
from mukron.train.records import RunFolder

DOCS = Path(__file__).parents[2] / "docs"
CHANGES = 25  # of a kind; in CI

CONFIG = RunConfig(
    **{"method": "shampoo:1/4", "width": 16, "base_width": 8, "epochs": 2, "samples": 32, "scheme": "uniform:1/4"},
    **{"output_exponent": "1/2", "decay": "1/width", "embedding_lr": "1/2", "schedule": "step:1", "record": ("rates",)},
    **{"damping": "rescaled:0.5", "method_options": {"memory": "ema:0.9"}, "model_options": {"depth": 2}},
)


def use_config(path: Path) -> None:
    config = RunConfig.load(path)
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.spec.keywords(config) is not None
    hash(config)


def use_run(folder: Path) -> None:
    run = Run.load(folder)
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    show(run)
    assert run.result()
    RunFolder(folder).ended(CONFIG)


def use_checkpoint(path: Path) -> None:
    RunFolder(path.parent).saved()


def use_study(path: Path) -> None:
    record = StudyRecord.load(path)
    assert StudyRecord.from_dict(json.loads(json.dumps(record.to_dict()))).to_dict() == record.to_dict()
    show(record)
    if record.certificate is not None:
        show(record.certificate)
        assert record.certificate.exit_code in (0, 1, 4)
    for axis in record.over:
        assert tables.config_table(record, False) is not None, axis
    best_run(record, None, None)


def use_shapes(path: Path) -> None:
    shapes = BaseShapes.load(path)
    assert BaseShapes.from_dict(json.loads(json.dumps(shapes.to_dict()))) == shapes
    mukron.parametrize(MLP(24), shapes)


def use_plan(path: Path) -> None:
    plan = Parametrization.load(path)
    assert Parametrization.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    for method in ("kfac", "adamw", "shampoo", "muon"):
        plan.scales(method)
        str(plan.explain(method))
    model = MLP(16)
    bound = plan.bind(model)
    bound.param_groups("adamw", 0.1)


def use_check(path: Path) -> None:
    show(Check.load(path))


def use_evidence(path: Path) -> None:
    csv_rows(load_evidence(path.parent))


def use_bench(path: Path) -> None:
    result = BenchResult.load(path)
    str(result.table())
    str(result.parts_table())
    str(result.name)


def use_stability(path: Path) -> None:
    result = StabilityResult.load(path)
    str(result.table())
    str(result.name)


def use_gpt(path: Path) -> None:
    result = GPTResult.load(path)
    str(result.table())


def use_counts(path: Path) -> None:
    [str(table) for table in CommunicationResult.load(path).tables()]


def show(result: object) -> None:
    str(result)
    result._repr_html_()  # type: ignore[attr-defined]


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {  # the file, and what reads it
    "a run's config": ("run/config.json", use_config),
    "a run's result": ("run/result.json", lambda path: use_run(path.parent)),
    "a run's metrics": ("run/metrics.jsonl", lambda path: use_run(path.parent)),
    "a checkpoint": ("run/checkpoint.pt", use_checkpoint),
    "a study": ("study/study.json", use_study),
    "base shapes": ("shapes.json", use_shapes),
    "a plan of parameters": ("plan.json", use_plan),
    "base shapes of mup": ("sizes.bsh", lambda path: read_base_sizes(path) and None),
    "a check": ("check/check.json", use_check),
    "a check of the kernel": ("nngp/nngp.json", lambda path: show(Landing.load(path))),
    "a reproduction's outcome": ("recipe/result.json", lambda path: str(Outcome.load(path.parent).to_dict()) and None),
    "a reproduction's evidence": ("recipe/evidence.json", use_evidence),
    "times": ("times.json", use_bench),
    "stability": ("stability.json", use_stability),
    "runs of a GPT": ("gpt.json", use_gpt),
    "counted bytes": ("counts.json", use_counts),
}
STORED = {  # in docs
    "check/check.json": "figures/check-kfac/check.json",
    "nngp/nngp.json": "figures/check-nngp/nngp.json",
    "recipe/result.json": "reproduction/zero-transfer/result.json",
    "recipe/evidence.json": "reproduction/zero-transfer/evidence.json",
    "times.json": "figures/bench/kfac-step-cpu.json",
    "stability.json": "figures/stability/stability-cpu.json",
    "gpt.json": "figures/gpt-damping/gpt-cuda.json",
    "counts.json": "figures/communication/communication.json",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a whole file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    train(CONFIG, folder / "run", progress=False)
    (folder / "run" / "checkpoint.before.pt").unlink()  # what serves if the last one is damaged
    design = Design(
        RunConfig(method="sgd", base_width=8, epochs=1, samples=32),
        widths=(8, 16),
        lr=(0.1, 0.2),
        seeds=2,
        schemes="mup",
    )
    TransferStudy(design, folder=folder / "study").run(progress=False)
    shapes = mukron.base_shapes(MLP, width=8)
    shapes.save(folder / "shapes.json")
    mukron.parametrize(MLP(16), shapes).save(folder / "plan.json")
    (folder / "sizes.bsh").write_text("fc1.weight:\n- null\n- 784\nfc1.bias: [null]\n")
    for name, stored in STORED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_json(folder / name, read_json(DOCS / stored))
    return folder


def unsealed_text(path: Path) -> bytes:
    """The file without its digests, as if somebody had made it."""
    if path.suffix == ".json":
        return json.dumps(read_json(path)).encode()
    if path.suffix == ".jsonl":
        rows = [unsealed(json.loads(line), "line") for line in path.read_text().splitlines()]
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    return path.read_bytes()


def content(path: Path) -> object:
    """What a file says."""
    if path.suffix == ".jsonl":
        return Run.load(path.parent).epochs
    return flat(RunFolder(path.parent).saved()) if path.suffix == ".pt" else read_json(path)


def same(found: object, truth: object) -> bool:
    """Whether all of the truth was found; a field more is what damage has made of the seal's name."""
    if isinstance(found, dict) and isinstance(truth, dict):
        return {name: found.get(name) for name in truth} == truth
    return found == truth


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return [(name, flat(item)) for name, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_file_is_read_or_refused(kind, files):
    """Files that somebody made: their digests are right, or left out."""
    name, use = KINDS[kind]
    path = files / name
    whole, plain = path.read_bytes(), unsealed_text(path)

    def try_one(seed: int) -> tuple[str, str]:
        seed = 3 * seed if path.suffix in (".pt", ".bsh") else seed  # bytes alone
        path.write_bytes(changes(plain, seed))
        return soak.outcome(lambda: use(path) or True)

    try:
        path.write_bytes(plain)
        assert soak.outcome(lambda: use(path) or True) == (soak.SAME, "")
        soak.check(f"{kind}, edited", soak.number(CHANGES), try_one)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("kind", [kind for kind, (name, _) in KINDS.items() if not name.endswith(".bsh")])
def test_a_damaged_file_says_what_it_said_or_is_refused(kind, files):
    path = files / KINDS[kind][0]
    whole, truth = path.read_bytes(), content(path)

    def try_one(seed: int) -> tuple[str, str]:
        damaged = changed_bytes(whole, random.Random(seed))
        path.write_bytes(damaged)
        # A line that was cut off was being written when its process was killed.
        shorter = path.suffix == ".jsonl" and whole.startswith(damaged)
        return soak.outcome(lambda: shorter or same(content(path), truth))

    try:
        soak.check(f"{kind}, damaged", soak.number(CHANGES), try_one)
    finally:
        path.write_bytes(whole)


def test_loading_changes_no_random_numbers(files):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    use_study(files / "study" / "study.json")
    assert torch.equal(before, torch.get_rng_state())
