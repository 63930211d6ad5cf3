"""The GPT benchmark: what is trained, stored and continued, and the verdict on transfer."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log2

import pytest
import torch
from typer.testing import CliRunner

from mukron.bench.gpt import result as gpt_result
from mukron.bench.gpt.choice import choice_tables
from mukron.bench.gpt.drawing import draw_gpt
from mukron.bench.gpt.options import GPTOptions
from mukron.bench.gpt.page import GPT_MARKER, gpt_section, write_gpt_page
from mukron.bench.gpt.references import REFERENCE_METHODS
from mukron.bench.gpt.result import GPTResult, run_gpt
from mukron.bench.gpt.task import (
    OUR_METHODS,
    GPTOutcome,
    GPTRun,
    _optimizers,
    load_text,
    network,
    train_gpt,
    validation_loss,
)
from mukron.bench.gpt.transfer import GPTTransfer, lowest_of_parabola
from mukron.cli import app
from mukron.linalg import FactorizationError

RUN = GPTRun("foof", 64, 64, lr=0.1, seed=0, steps=3)


def silent(line):
    pass


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("to be, or not to be, that is the question. " * 80)
    return file


def parabola(shift: float, best: float = 0.1) -> dict[float, float]:
    """Losses at five learning rates; the lowest is 1.5 + shift."""
    return {lr: 1.5 + shift + log2(lr / best) ** 2 / 10 for lr in (0.05, 0.07, 0.1, 0.14, 0.2)}


# A run.


def test_a_run_is_the_same_when_it_is_repeated(text):
    first = train_gpt(RUN, text, "cpu", "float32")
    again = train_gpt(RUN, text, "cpu", "float32")
    assert replace(again, seconds=first.seconds) == first
    assert train_gpt(replace(RUN, seed=1), text, "cpu", "float32").validation != first.validation


def test_a_run_learns(text):
    short, long = (train_gpt(replace(RUN, method="kfac", steps=n), text, "cpu", "float32") for n in (1, 25))
    assert short.validation > 5
    assert long.validation < 3.2
    assert long.largest < 6


def test_the_validation_loss_is_that_of_the_whole_text():
    class Bigram(torch.nn.Module):
        def forward(self, tokens):
            return torch.nn.functional.one_hot((tokens + 1) % 256, 256).float()

    counting = torch.arange(700) % 256
    right = float(torch.logsumexp(torch.eye(256)[0], 0)) - 1
    assert validation_loss(Bigram(), counting) == pytest.approx(right, rel=1e-5)
    assert validation_loss(Bigram(), counting * 0) == pytest.approx(right + 1, rel=1e-5)


def test_all_options_but_the_rate_are_defaults():
    (optimizer,) = _optimizers(replace(RUN, method="kfac", lr=0.07), network(64))
    usual = type(optimizer)(network(64), class_dim=-1)
    assert optimizer.options == usual.options
    assert optimizer.param_groups[0]["lr"] == 0.07
    assert optimizer.param_groups[0]["damping_rule"] == usual.param_groups[0]["damping_rule"]


@pytest.mark.parametrize("method", [*OUR_METHODS, *REFERENCE_METHODS])
def test_every_method_on_offer_trains(method, text, tmp_path):
    options = (
        GPTOptions((method,), (64,), (0.01,), steps=2, file=text)
        if not missing(method)
        else pytest.skip(missing(method))
    )
    result = GPTResult.stored(tmp_path, "mukron bench gpt", options)
    run_gpt(options, result, tmp_path, silent)
    (outcome,) = result.runs.values()
    assert 4 < outcome.validation < 6


def test_a_reference_is_trained_at_any_single_depth(text, tmp_path):
    arguments = ["--depths", "2", "--methods", "shampoo-as-distributed", "--rates", "0.01", "--widths", "64"]
    arguments += ["--steps", "2", "--text", str(text), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "gpt", *arguments])
    assert result.exit_code == 0, result.output
    (run,) = GPTResult.load(next(tmp_path.glob("*.json"))).runs
    assert (run.depth, run.base_depth) == (2, 2)
    assert len(network(run.width, run.depth).branches) == 4


def missing(method: str) -> str:
    return REFERENCE_METHODS[method].missing() if method in REFERENCE_METHODS else ""


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_muon_has_the_hidden_matrices():
    model = network(64)
    muon, adam = _optimizers(replace(RUN, method="torch-muon"), model)
    sizes = [sum(p.numel() for group in optimizer.param_groups for p in group["params"]) for optimizer in (muon, adam)]
    assert sizes[0] == 4 * (4 + 8) * 64**2
    assert sum(sizes) == sum(p.numel() for p in model.parameters())


def test_shampoo_with_the_settings_of_distributed_shampoo_takes_its_steps(text):
    """Here in float32, to within what rounding makes of it in 25 steps; tests/optim does it in float64."""
    pytest.importorskip("distributed_shampoo", reason="get it from github.com/facebookresearch/optimizers")
    names = ("shampoo-as-distributed", "distributed-shampoo")
    ours, theirs = (train_gpt(replace(RUN, method=name, lr=2**-8, steps=25), text, "cpu", "float32") for name in names)
    assert ours.validation == pytest.approx(theirs.validation, abs=0.02)
    assert ours.validation < 3.5


# What is stored.


def test_runs_are_stored_and_not_repeated(text, tmp_path, monkeypatch):
    trained, limit = [], [2]

    def train(run, *arguments):
        if len(trained) == limit[0]:
            raise KeyboardInterrupt
        trained.append(run)
        return GPTOutcome(1.5, inf, 5.5, 1.0)

    monkeypatch.setattr(gpt_result, "train_gpt", train)
    options = GPTOptions(("foof",), (64, 128), (0.1, 0.2), steps=3, file=text)
    result = GPTResult.stored(tmp_path, "mukron bench gpt", options)
    with pytest.raises(KeyboardInterrupt):
        run_gpt(options, result, tmp_path, silent)
    again = GPTResult.stored(tmp_path, "mukron bench gpt --again", options)
    assert again.commands == ["mukron bench gpt", "mukron bench gpt --again"]
    assert [*again.runs] == trained
    assert again.runs == result.runs
    limit[0] = -1
    run_gpt(options, again, tmp_path, silent)
    assert trained == [*options.runs()]  # none twice
    with pytest.raises(ValueError, match="choose another --out"):
        GPTResult.stored(tmp_path, "", replace(options, file=None))


def test_runs_with_other_defaults_are_repeated(text, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_result, "train_gpt", lambda *_: GPTOutcome(1.5, 1.4, 5.5, 1.0))
    options, lines = GPTOptions(("foof", "kfac"), (64,), steps=3, file=text), []
    result = GPTResult.stored(tmp_path, "", options)
    run_gpt(options, result, tmp_path, silent)
    result.defaults["kfac"]["fisher"] = "another one"
    result.save(tmp_path)
    run_gpt(options, GPTResult.stored(tmp_path, "", options), tmp_path, lines.append)
    assert lines[0] == "K-FAC has other defaults than when it was stored: 1 runs are repeated"
    assert len(lines) == 2


# The verdict.


def test_the_lowest_point_of_a_parabola():
    exact = {2.0**k: (k - 0.3) ** 2 for k in (-1.0, 0.0, 0.5, 2.0)}
    assert lowest_of_parabola(exact) == pytest.approx(2**0.3)
    assert lowest_of_parabola({0.1: 1.0, 0.2: 2.0, 0.4: 3.0}) == 0.1
    assert lowest_of_parabola({0.1: 2.0, 0.2: 1.0, 0.4: inf}) == 0.2


@pytest.mark.parametrize(
    ("wide", "verdict"),
    [
        (parabola(-0.1), "transfers, factor 1.00"),
        (parabola(-0.1, 0.14), "transfers, factor 1.40"),
        (parabola(-0.1, 0.16), "does not transfer, factor 1.60"),
        (parabola(+0.001), "does not transfer: worse at width 256"),
        ({0.05: 1.4, 0.1: 1.3, 0.2: 1.2}, "open: best at the edge of the grid at width 256"),
    ],
)
def test_the_verdict(wide, verdict):
    assert GPTTransfer("K-FAC", {128: parabola(0.0), 256: wide}).verdict == verdict


def made_up() -> GPTResult:
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    for width in (128, 256):
        for lr, loss in parabola(-width / 1000).items():
            for seed in (0, 1):
                run = GPTRun("kfac", width, 128, lr, seed, 500)
                result.runs[run] = GPTOutcome(loss + seed / 100, loss, 5.5, 30.0)
    return result


def test_tables_and_figure(tmp_path):
    result = made_up()
    assert result.table().rows[0] == ("K-FAC", "128", "128", "500", "0.05", "2", "1.477", "1.472 - 1.482", "5.50", "30")
    assert [row[-1] for row in result.transfer_table().rows] == ["", "transfers, factor 1.00"]
    svg, _ = draw_gpt(result, tmp_path / "gpt")
    assert "K-FAC" in svg.read_text()
    assert draw_gpt(GPTResult.new("", GPTOptions()), tmp_path / "none") == []


def test_the_page_has_what_is_stored(tmp_path):
    file = made_up().save(tmp_path)
    page = tmp_path / "gpt.md"
    page.write_text(f"before\n{GPT_MARKER}\nold\n{GPT_MARKER}\nafter\n")
    text = write_gpt_page(file, page).read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert gpt_section(file, tmp_path) in text
    assert "| transfers, factor 1.00 |" in text


def test_the_command(text, tmp_path):
    arguments = ["bench", "gpt", "--text", str(text), "--methods", "foof", "--widths", "64", "--steps", "2"]
    out = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert out.exit_code == 0
    assert "FOOF    64" in out.output
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert again.exit_code == 0
    assert "1 of" not in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "the text nowhere.txt cannot be read: No such file"),
        (["--methods", "adam"], "--methods 'adam'; known: adamw, kfac"),
        (["--methods", ","], "--methods: name at least one"),
        (["--widths", "100"], "beyond 64 expected multiples of 64"),
        (["--widths", "64.5"], "expected whole numbers"),
        (["--rates", "0"], "--rates: expected positive numbers"),
        (["--precision", "tf32"], "precision 'tf32' is of GPUs"),
        (["--page", "nowhere.md"], "there is no such page; it must exist, and have <!-- gpt --> twice"),
    ],
)
def test_bad_requests_end_in_one_line(arguments, message, tmp_path):
    out = CliRunner().invoke(app, ["bench", "gpt", *arguments, "--out", str(tmp_path)])
    assert out.exit_code == 2
    assert message in " ".join(out.output.split())


def test_a_text_that_is_too_short(tmp_path):
    (tmp_path / "short.txt").write_text("to be")
    with pytest.raises(ValueError, match="has 5 bytes; at least"):
        load_text(tmp_path / "short.txt", "cpu")


@pytest.mark.parametrize("command", [["gpt", "--widths", "64"], ["stability", "--smoke"], ["kfac-step"]])
def test_a_file_in_place_of_the_folder_is_refused_before_anything_is_run(command, tmp_path):
    (tmp_path / "file").write_text("")
    out = CliRunner().invoke(app, ["bench", *command, "--out", str(tmp_path / "file")])
    assert out.exit_code == 2
    assert "is a file" in " ".join(out.output.replace("│", " ").split())


# Depth, SP and weight decay.


def test_deep_runs_have_multipliers_and_the_law_of_depth(text):
    run = replace(RUN, method="kfac", depth=8, base_depth=2)
    (deep,) = _optimizers(run, network(64, 8, 0.25))
    (plain,) = _optimizers(replace(run, base_depth=8), network(64, 8))
    name = "branches.15.1.0.weight"
    assert deep.rate(name) / plain.rate(name) == pytest.approx(0.25)
    assert deep.rate("head.weight") == plain.rate("head.weight")
    (sp,) = _optimizers(replace(run, scheme="sp"), network(64, 8))
    assert sp.rate(name) == plain.rate(name)
    outcome = train_gpt(replace(run, steps=1), text, "cpu", "float32")
    assert 5 < outcome.training < 6


def test_sizes_are_compared_along_both_axes(tmp_path):
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    options = GPTOptions(("kfac",), (128, 256), tuple(parabola(0.0)), depths=(2, 4), schemes=("mup", "sp"))
    for run in options.runs():
        shift = -run.width / 1000 - run.depth / 100
        result.runs[run] = GPTOutcome(parabola(shift)[run.lr], 1.5, 5.5, 30.0)
    found = {(transfer.method, transfer.axis): transfer for transfer in result.transfers()}
    assert set(found) == {(name, axis) for name in ("K-FAC", "K-FAC, SP") for axis in ("width", "depth")}
    assert [*found["K-FAC", "depth"].curves] == [2, 4]
    assert found["K-FAC", "depth"].verdict == "transfers, factor 1.00"
    assert GPTTransfer("K-FAC", {2: parabola(0.0), 8: parabola(0.1)}, "depth").verdict.endswith("worse at depth 8")
    rows = result.transfer_table().rows
    assert ("K-FAC", "depth 4") in {row[:2] for row in rows}
    table = result.table()
    assert table.columns[:5] == ("method", "width", "base", "depth", "steps")
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert draw_gpt(result, tmp_path / "both")
    assert GPTResult.load(result.save(tmp_path)).runs == result.runs


def test_weight_decay_has_a_column(text):
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    for run in GPTOptions(("soap",), (64,), (0.1,), weight_decay=0.1, file=text).runs():
        result.runs[run] = GPTOutcome(1.5, 1.5, 5.5, 30.0)
        (optimizer,) = _optimizers(run, network(64))
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    (row,) = result.table().rows
    assert dict(zip(result.table().columns, row, strict=True))["decay"] == "0.1"
    assert row[0] == "SOAP, decay 0.1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("shampoo-as-distributed",), "depths": (2, 4)}, "no laws of depth"),
        ({"depths": (0,)}, "--depths"),
        ({"schemes": ("ntk",)}, "--schemes 'ntk'"),
        ({"weight_decay": -1.0}, "--weight-decay"),
    ],
)
def test_sizes_and_schemes_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        GPTOptions(**options)


# Dampings.


def damped(curves):
    """A result with the losses of dampings by kind of rule and width."""
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    for kind, widths in curves.items():
        for width, losses in widths.items():
            for rho, loss in losses.items():
                run = GPTRun("kfac", width, 64, 0.07, 0, 300, damping=f"{kind}:{rho:g}")
                result.runs[run] = GPTOutcome(loss, loss, 6.0, 1.0)
    return result


def test_dampings_have_a_verdict_of_their_own():
    here = {0.25: 2.0, 1.0: 1.8, 4.0: 2.0}
    wide = {rho: loss - 0.1 for rho, loss in here.items()}
    moved = {1.0: 1.9, 4.0: 1.75, 16.0: 1.6, 64.0: 1.9}
    result = damped({"rescaled": {64: here, 128: wide}, "mean-eigenvalue": {64: here, 128: moved}})
    verdicts = {found.method: found.verdict for found in result.transfers()}
    assert verdicts["K-FAC, damping rescaled, lr 0.07"] == "transfers, factor 1.00"
    assert verdicts["K-FAC, damping mean-eigenvalue, lr 0.07"].startswith("does not transfer, factor 1")
    assert {found.setting for found in result.transfers()} == {"damping"}


def test_dampings_are_passed_to_the_optimizer(text):
    model = network(32)
    (optimizer,) = _optimizers(replace(RUN, width=32, base=32, damping="mean-eigenvalue:0.5"), model)
    assert optimizer.param_groups[0]["damping_rule"]["rule"] == "MeanEigenvalue"
    assert optimizer.param_groups[0]["damping"] == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ("muon",), "dampings": ("rescaled:1",)}, "Muon has no damping"),
        ({"methods": ("torch-muon",), "dampings": ("rescaled:1",)}, "has no damping|no Muon"),
        ({"methods": ("kfac",), "dampings": ("resacled:1",)}, "unknown damping rule"),
    ],
)
def test_dampings_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        GPTOptions(**given)


# Other people's optimizers with our groups.


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_torchs_muon_takes_our_groups_under_both_schemes(text):
    options = GPTOptions(methods=("torch-muon-groups",), widths=(32, 64), rates=(0.02,), schemes=("mup", "sp"))
    runs = list(options.runs())
    assert {run.scheme for run in runs} == {"mup", "sp"}
    rates = {}
    for run in runs:
        muon, adam = _optimizers(run, network(run.width))
        assert isinstance(muon, torch.optim.Muon)
        rates[run.width, run.scheme] = {group["role"]: group["lr"] for group in adam.param_groups}
    assert rates[64, "sp"] == rates[32, "sp"]
    assert rates[64, "mup"]["output"] == pytest.approx(rates[32, "mup"]["output"] / 2)


# Equal time.


def bench_gpt(text, folder, *arguments):
    given = ["bench", "gpt", "--text", str(text), "--methods", "foof,adamw", "--widths", "32", "--steps", "2"]
    return CliRunner().invoke(app, [*given, *arguments, "--out", str(folder)])


def test_equal_time(text, tmp_path):
    first = bench_gpt(text, tmp_path, "--rates", "0.01,0.1")
    assert first.exit_code == 0, first.output
    assert "ms per step" not in first.output
    timed = bench_gpt(text, tmp_path, "--seconds", "0.5")
    assert timed.exit_code == 0, timed.output
    result = GPTResult.load(tmp_path / "gpt-cpu.json")
    assert set(result.costs) == {"foof 32 4", "adamw 32 4"}
    extra = [run for run in result.runs if run.seconds]
    assert {run.method for run in extra} == {"foof", "adamw"}
    for run in extra:
        assert run.steps == max(1, round(500 / result.costs[f"{run.method} 32 4"]))
        plain = {
            other.lr: outcome
            for other, outcome in result.runs.items()
            if not other.seconds and other.method == run.method
        }
        assert run.lr == min(plain, key=lambda lr: plain[lr].validation)
    assert "loss after 0.5 s" in timed.output
    assert len(result.table().rows) == 4  # runs of equal time have tables of their own
    again = bench_gpt(text, tmp_path, "--seconds", "0.5")
    assert " of " not in again.output.split("A GPT of bytes")[0]  # nothing was run


def test_tables_of_equal_time_do_not_mix_times_depths_and_rates():
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    plain = GPTRun("foof", 32, 32, 0.1, 0, 500)
    result.runs = {plain: GPTOutcome(2.0, 2.0, 6.0, 1.0), replace(plain, lr=0.2): GPTOutcome(2.1, 2.1, 6.0, 1.0)}
    for seconds, loss in ((1.0, 1.9), (3.0, 1.5)):
        result.runs[replace(plain, steps=int(100 * seconds), seconds=seconds)] = GPTOutcome(loss, loss, 6.0, 1.0)
    stale = replace(plain, lr=0.2, steps=100, seconds=1.0)  # of a rate that was the best one then
    deep = replace(plain, depth=8, base_depth=8, steps=50, seconds=1.0)
    result.runs |= {stale: GPTOutcome(9.0, 9.0, 9.0, 1.0), deep: GPTOutcome(8.0, 8.0, 9.0, 1.0)}
    result.costs = {"foof 32 4": 10.0, "foof 32 8": 20.0}
    tables = {table.title: [] for table in choice_tables(result)}
    for table in choice_tables(result):
        tables[table.title].append((table.columns[6], table.rows))
    row = ("FOOF", "0.1 (edge)", "2.000", "1", "10.0", "1.0")
    assert tables["Which optimizer? Width 32, 4 blocks"] == [
        ("loss after 1 s", ((*row, "1.900", "100", "1"),)),
        ("loss after 3 s", ((*row, "1.500", "300", "1"),)),
    ]
    assert tables["Which optimizer? Width 32, 8 blocks"] == [("loss after 1 s", ())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "expected a positive number"),
        (["--seconds", "inf"], "expected a positive number"),
        (["--seconds", "5", "--widths", "32,64"], "at one size"),
        (["--seconds", "5", "--schemes", "mup,sp"], "by their defaults"),
        (["--seconds", "5", "--weight-decay", "0.1"], "by their defaults"),
        (["--seconds", "5"], "no learning rate of foof, adamw is stored for width 32, 4 blocks and 2 steps"),
    ],
)
def test_times_that_are_refused(text, tmp_path, arguments, message):
    result = bench_gpt(text, tmp_path, *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_rule_without_a_number_has_its_usual_one(text, tmp_path):
    given = ["--methods", "foof", "--rates", "0.1", "--dampings", "rescaled,rescaled:4,rescaled:0.25"]
    result = bench_gpt(text, tmp_path, *given, "--widths", "16,32")
    assert result.exit_code == 0, result.output
    assert {run.damping for run in GPTResult.load(tmp_path / "gpt-cpu.json").runs} == {
        "rescaled:1", "rescaled:4", "rescaled:0.25"
    }  # fmt: skip
    assert "FOOF, damping rescaled, lr 0.1" in result.output


def test_a_damping_that_leaves_no_inverse_does_not_end_the_benchmark(text, monkeypatch):
    def fails(*_):
        raise RuntimeError("raise the damping") from FactorizationError("no inverse")
        yield

    monkeypatch.setattr("mukron.bench.gpt.task._losses", fails)
    assert train_gpt(RUN, text, "cpu", "float32").validation == inf


def test_losses_that_were_not_kept_have_no_verdict():
    result = GPTResult.new("mukron bench gpt", GPTOptions())
    for width in (64, 128):
        for lr, loss in parabola(-width / 1000).items():
            result.runs[GPTRun("kfac", width, 64, lr, 0, 500)] = GPTOutcome(loss, inf, inf, 1.0)
    rows = result.transfer_table().rows
    assert rows[-1][6] == "transfers, factor 1.00"
    assert rows[-1][-1] == "not kept"
    assert {row[-2] for row in result.table().rows} == {""}


def test_another_text_of_the_same_name_is_refused(text, tmp_path):
    assert bench_gpt(text, tmp_path, "--methods", "foof").exit_code == 0
    text.write_text("whether tis nobler in the mind to suffer. " * 80)
    refused = bench_gpt(text, tmp_path, "--methods", "foof", "--rates", "0.2")
    assert refused.exit_code != 0
    assert "has runs of another text named text.txt; choose another --out" in " ".join(refused.output.split())


def test_a_rate_that_is_given_twice_is_run_once():
    assert len([*GPTOptions(methods=("kfac",), rates=(0.1, 0.1, 0.2)).runs()]) == 2
