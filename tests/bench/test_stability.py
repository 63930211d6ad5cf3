"""The stability matrix: its rule, its learning rates, what is stored, continued, drawn and written into the docs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from math import inf, nan
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mukron.bench.stability import matrix
from mukron.bench.stability.drawing import draw_stability
from mukron.bench.stability.fitted import FittedRun, train_fitted
from mukron.bench.stability.matrix import FittedOptions, StabilityMatrix, StabilityOptions, run_fitted, stored_result
from mukron.bench.stability.page import STABILITY_MARKER, stability_section, write_stability_page
from mukron.bench.stability.problems import STABILITY_PROBLEMS, batches
from mukron.bench.stability.result import StabilityFinding, StabilityResult, StabilityRow, new_stability_result
from mukron.bench.stability.rule import RULE
from mukron.bench.stability.runs import StabilityOutcome, StabilityRun, method_defaults, train_run
from mukron.bench.stability.search import HIGHEST_POWER, best_power, lowest_power, next_power
from mukron.cli import app
from mukron.data import Split
from mukron.optim import Spectral
from mukron.optim.spec import spec_of

ROOT = Path(__file__).parent.parent.parent
RUN = StabilityRun("digits", "kfac", "defaults", "ema:0.95", 0.9, every=1, power=-7, seed=0, steps=200)
FRESH = StabilityOutcome(2.0, 2.1, 0.2)


def silent(line):
    pass


def options(**changes) -> StabilityOptions:
    smoke = StabilityOptions(("digits",), ("foof",), ("plain",)).for_smoke()
    return replace(smoke, memories=("batch", "ema:0.95"), **changes)


def run_matrix(chosen: StabilityOptions, folder: Path, say=silent) -> StabilityResult:
    result = stored_result(folder, "mukron bench stability --smoke", "cpu", smoke=True)
    StabilityMatrix(chosen, result, folder, say).run()
    return result


@pytest.fixture
def counted(monkeypatch):
    """Runs that were really trained; after ``limit`` of them the user presses Ctrl-C."""
    trained: list[StabilityRun] = []

    def train(run, problem, data, device):
        if len(trained) == counted_limit["limit"]:
            raise KeyboardInterrupt
        trained.append(run)
        return train_run(run, problem, data, device)

    counted_limit = {"limit": -1}
    monkeypatch.setattr(matrix, "train_run", train)
    return trained, counted_limit


# The rule.


@pytest.mark.parametrize(
    ("every", "outcome", "violations"),
    [
        (10, StabilityOutcome(2.0, 4.0, 0.3), []),
        (10, StabilityOutcome(2.0, 4.1, 0.2), ["largest loss 2.05x"]),
        (10, StabilityOutcome(2.0, 2.0, 0.31), ["final loss 1.55x"]),
        (50, StabilityOutcome(2.0, 2.0, 0.39), []),
        (50, StabilityOutcome(2.0, 2.0, 0.41), ["final loss 2.05x"]),
        (5, StabilityOutcome(2.0, inf, inf), ["largest loss infx", "final loss infx"]),
        (5, StabilityOutcome(inf, inf, inf), ["largest loss infx", "final loss infx"]),
        (5, StabilityOutcome(2.0, inf, inf, "no root"), ["error: no root"]),
    ],
)
def test_the_rule(every, outcome, violations):
    assert RULE.violations(every, outcome, FRESH) == violations


def test_tiny_final_losses_are_not_compared_by_their_ratio():
    tiny = StabilityOutcome(2.0, 2.0, 0.001)
    assert RULE.violations(10, replace(tiny, final=0.07), tiny) == []
    assert RULE.violations(10, replace(tiny, final=0.08), tiny) == ["final loss 1.60x"]


def test_refreshing_at_every_step_may_blow_up_too():
    assert RULE.violations(1, replace(FRESH, largest=9.0), replace(FRESH, largest=9.0)) == ["largest loss 4.50x"]
    diverged = StabilityOutcome(2.0, inf, inf)
    assert RULE.violations(1, diverged, diverged) == ["largest loss infx"]
    assert RULE.violations(5, replace(diverged, largest=2.0), diverged) == ["final loss nanx"]


def test_a_row_names_the_intervals_at_which_it_is_unstable():
    outcomes = {1: FRESH, 5: FRESH, 10: replace(FRESH, largest=5.0), 50: replace(FRESH, final=0.5)}
    finding = StabilityFinding(StabilityRow.of(RUN), -7, outcomes)
    assert finding.verdict == "unstable at 10, 50"
    assert replace(finding, outcomes={1: FRESH, 5: FRESH}).verdict == "stable"
    assert replace(finding, outcomes={1: FRESH, 5: FRESH}, missing=(10,)).verdict == "incomplete"
    assert replace(finding, missing=(100,)).verdict == "unstable at 10, 50"


# What is measured.


def test_losses_are_summarized():
    losses = [2.0, 7.0, *[0.1] * 16, 0.3, 0.5]
    assert StabilityOutcome.of(losses, 20) == StabilityOutcome(2.0, 7.0, pytest.approx(0.4))
    assert StabilityOutcome.of([2.0, nan], 2) == StabilityOutcome(2.0, inf, inf)
    assert StabilityOutcome.of(losses[:10], 20).final == inf  # stopped early
    assert StabilityOutcome.of(losses, 20, "no root").growth == inf
    assert StabilityOutcome.from_dict(StabilityOutcome.of([2.0, nan], 2).to_dict()).final == inf


def test_a_hopeless_run_is_stopped():
    problem = STABILITY_PROBLEMS["digits"].for_smoke()
    run = replace(RUN, method="shampoo", settings="plain", power=16, steps=100)
    outcome = train_run(run, problem, problem.load(None, "cpu", samples=64), "cpu")
    assert outcome.growth > 1e6
    assert outcome.final == inf


def test_only_what_a_row_says_is_passed():
    expected = {"lr", "memory", "momentum", "inverse_every", "factor_every"}
    assert set(RUN.arguments()) == expected
    assert set(replace(RUN, settings="plain").arguments()) == {*expected, "trust"}
    assert replace(RUN, settings="plain").arguments()["trust"] is None
    assert replace(RUN, settings="spectral:0.5").arguments()["trust"] == Spectral(0.5)


@pytest.mark.parametrize(("memory", "factor_every"), [("batch", 10), ("ema:0.95", 1), ("sum", 1)])
def test_factors_are_measured_at_every_step_where_batches_are_mixed(memory, factor_every):
    arguments = replace(RUN, memory=memory, every=10).arguments()
    assert (arguments["inverse_every"], arguments["factor_every"]) == (10, factor_every)


def test_a_run_is_the_same_when_it_is_repeated():
    problem = STABILITY_PROBLEMS["gpt"].for_smoke()
    run = replace(RUN, problem="gpt", steps=4)
    data = problem.load(None, "cpu", samples=64)
    first = train_run(run, problem, data, "cpu")
    assert train_run(run, problem, data, "cpu") == first
    assert train_run(replace(run, seed=1), problem, data, "cpu") != first


def test_an_epoch_has_every_sample_once():
    data = Split(torch.arange(7), torch.arange(7))
    first, second, third, fourth = (x.tolist() for x, _ in islice(batches(data, 3, seed=0), 4))
    assert len({*first, *second}) == len({*third, *fourth}) == 6
    assert (first, second) != (third, fourth)


# The learning rate.


def with_final(final: float, largest: float = 2.0) -> StabilityOutcome:
    return StabilityOutcome(2.0, largest, final)


def test_the_grid_grows_until_the_best_rate_lies_inside():
    def search(loss) -> int:
        fresh = {power: with_final(loss(power)) for power in (-9, -7, -5)}
        while (power := next_power(fresh)) is not None:
            fresh[power] = with_final(loss(power))
        return best_power(fresh)

    assert search(lambda power: abs(power + 7) + 1) == -7
    assert search(lambda power: abs(power - 1) + 1) == 1
    assert search(lambda power: inf if power > -15 else abs(power + 17) + 1) == -17
    assert search(lambda power: 100 - power) == HIGHEST_POWER
    assert search(lambda power: 0.01 if power > -13 else 1) == -11  # losses below the floor are equal


def test_the_best_rate_is_stable_itself():
    """The first rule took the lowest loss whatever happened on the way; both choices are searched for."""
    fresh = {-5: with_final(0.5), -3: with_final(0.2), -1: with_final(0.1, largest=9.0), 1: with_final(inf, inf)}
    assert (best_power(fresh), lowest_power(fresh)) == (-3, -1)
    assert next_power(fresh) is None
    assert next_power({**fresh, 1: with_final(0.05, largest=99.0)}) == 3
    wild = {power: with_final(1.0 + power, largest=9.0) for power in (1, 3, 5)}
    assert best_power(wild) == 1


def test_both_rules_have_a_verdict():
    result = new_stability_result("", "cpu", smoke=True)
    result.intervals = [1, 10]
    for power, largest, final in ((-7, 2.0, 0.04), (-5, 2.0, 0.01), (-3, 9.0, 0.02)):
        result.runs[replace(RUN, power=power)] = with_final(final, largest)
    (finding,) = result.findings()
    assert (finding.power, finding.first.power) == (-7, -5)
    assert (finding.verdict, finding.first_verdict) == ("incomplete", "incomplete")
    result.runs[replace(RUN, every=10)] = with_final(0.05)
    result.runs[replace(RUN, every=10, power=-5)] = with_final(0.2)
    (finding,) = result.findings()
    assert (finding.verdict, finding.first_verdict) == ("stable", "unstable at 10")
    result.runs[replace(RUN, power=-3)] = with_final(0.001, largest=9.0)
    assert result.findings()[0].first_verdict == "unstable at 1"
    columns, (row,) = result.summary().columns, result.summary().rows
    assert dict(zip(columns, row, strict=True))["defaults"] == "1 of 1"
    assert dict(zip(columns, row, strict=True))["defaults, first rule"] == "0 of 1"


def test_stale_runs_take_the_rate_that_is_best_when_refreshed_at_every_step(tmp_path):
    result = run_matrix(options(), tmp_path)
    for finding in result.findings():
        fresh = {
            run.power: outcome.final
            for run, outcome in result.runs.items()
            if StabilityRow.of(run) == finding.row and run.every == 1
        }
        assert len(fresh) == 3
        assert finding.power == min(fresh, key=fresh.get)
        assert [*finding.outcomes] == [1, 5]


def test_over_seeds_the_worst_growth_and_the_mean_of_final_losses():
    result = new_stability_result("", "cpu", smoke=True)
    for seed, (largest, final) in enumerate([(2.0, 0.1), (5.0, 0.3)]):
        result.runs[replace(RUN, seed=seed)] = StabilityOutcome(2.0, largest, final)
    result.runs[replace(RUN, power=-5)] = StabilityOutcome(2.0, 2.0, 0.01)  # one seed alone
    (finding,) = result.findings()
    assert finding.power == -7
    assert finding.outcomes == {1: StabilityOutcome(2.0, 5.0, pytest.approx(0.2))}


# What is stored.


def test_a_result_is_read_as_it_was_written(tmp_path):
    result = new_stability_result("mukron bench stability", "cpu", smoke=False)
    result.runs = {RUN: FRESH, replace(RUN, every=5): StabilityOutcome(2.0, inf, inf, "no root")}
    path = result.save(tmp_path)
    assert path.name == "stability-cpu.json"
    assert StabilityResult.load(path) == result
    assert "Infinity" not in path.read_text()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="no result of mukron bench stability"):
        StabilityResult.load(tmp_path / "other.json")


@pytest.mark.parametrize("limit", [1, 5])
def test_an_interrupted_matrix_is_continued(tmp_path, counted, limit):
    """Nothing is run twice, and it comes to what an uninterrupted one comes to."""
    trained, counted_limit = counted
    whole = run_matrix(options(), tmp_path / "whole")
    everything = [*trained]
    trained.clear()
    counted_limit["limit"] = limit
    with pytest.raises(KeyboardInterrupt):
        run_matrix(options(), tmp_path / "parts")
    assert len(StabilityResult.load(tmp_path / "parts" / "stability-smoke-cpu.json").runs) == limit
    counted_limit["limit"] = -1
    continued = run_matrix(options(), tmp_path / "parts")
    assert trained == everything
    assert continued.runs == whole.runs
    assert continued.table() == whole.table()


def test_more_problems_and_seeds_are_added_to_what_is_stored(tmp_path, counted):
    trained, _ = counted
    run_matrix(options(), tmp_path)
    before = len(trained)
    result = run_matrix(options(methods=("foof", "kfac")), tmp_path)
    assert {run.method for run in trained[before:]} == {"kfac"}
    before = len(trained)
    run_matrix(options(seeds=2), tmp_path)
    assert 1 in {run.seed for run in trained[before:]}
    assert not set(trained[:before]) & set(trained[before:])  # the mean of two seeds may ask for more learning rates
    assert len(result.findings()) == 4


def test_several_processes_come_to_the_same(tmp_path):
    one = run_matrix(options(), tmp_path / "one")
    two = run_matrix(options(workers=2), tmp_path / "two")
    assert two.runs == one.runs
    assert StabilityResult.load(tmp_path / "two" / "stability-smoke-cpu.json").table() == one.table()


def test_fitted_data_in_several_processes_too(tmp_path):
    outcomes = []
    for workers in (1, 2):
        result, lines = new_stability_result("", "cpu", smoke=True), []
        run_fitted(
            FittedOptions(("toy",), ("foof",), steps=10, seeds=3, workers=workers), result, tmp_path, lines.append
        )
        assert lines == ["toy, FOOF, defaults: 0 of 3 seeds fitted, 0 left the fit"]
        outcomes.append(result.fitted)
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "seed", "steps"), [("kfac", 3, 450), ("kfac", 4, 500), ("shampoo", 20, 900)])
def test_a_fit_of_small_batches_is_kept(method, seed, steps):
    """Runs that left it with drawn targets (at step 359 and 465) or with stale inverses left to themselves (at 860)."""
    outcome = train_fitted(FittedRun("spirals", method, "defaults", seed, steps), "cpu")
    assert outcome.fitted is not None
    assert outcome.left is None
    assert outcome.final < 0.05


def test_what_defaults_stand_for_is_recorded():
    """A default of None is written as None in the signature, whatever it stands for."""
    recorded, plain = (method_defaults(spec_of("kfac"), settings) for settings in ("defaults", "plain"))
    assert "inverse_every=10" in recorded["step"]
    assert "inverse_every=1" in plain["step"]
    assert recorded["group momentum_on"] == "gradient"
    assert recorded["fisher"] == "RandomSigns(draws=1)"
    assert plain["fisher"] == "MonteCarlo(draws=1)"


def test_runs_with_other_defaults_are_repeated(tmp_path, counted):
    """Those alone: the plain step of a method whose usual trust has changed is what it was."""
    trained, _ = counted
    chosen = options(methods=("foof", "kfac"), settings=("defaults", "plain"))
    result = run_matrix(chosen, tmp_path)
    result.defaults["kfac, defaults"]["trust"] = "another one"
    del result.defaults["foof, plain"]  # of a file that does not say what was run
    result.save(tmp_path)
    count, lines = len(trained), []
    run_matrix(chosen, tmp_path, lines.append)
    assert {(run.method, run.settings) for run in trained[count:]} == {("kfac", "defaults"), ("foof", "plain")}
    repeated = sum(run.method == "kfac" for run in trained[count:])
    assert f"K-FAC has other defaults than when it was stored: {repeated} runs are repeated" in lines


def test_the_order_of_rows_is_not_that_of_the_runs():
    result = new_stability_result("", "cpu", smoke=True)
    wanted = [
        RUN,
        replace(RUN, settings="plain"),
        replace(RUN, settings="kl:0.001"),
        replace(RUN, method="shampoo"),
        replace(RUN, problem="gpt"),
    ]
    result.runs = dict.fromkeys(reversed(wanted), FRESH)
    assert [finding.row for finding in result.findings()] == [StabilityRow.of(run) for run in wanted]


def test_problems_without_data_are_skipped(tmp_path):
    lines = []
    result = run_matrix(options(problems=("mnist-64", "digits"), data_folder=tmp_path), tmp_path, lines.append)
    assert lines[0].startswith("mnist-64 is skipped, its data are not here")
    assert {run.problem for run in result.runs} == {"digits"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problems": ("mnist",)}, "--problems 'mnist'; known: digits, mnist-64"),
        ({"methods": ("sgd",)}, "--methods 'sgd'; known: kfac, foof, shampoo"),
        ({"settings": ("fast",)}, "unknown trust 'fast'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        StabilityOptions(**arguments)


# What is made of it.


def made_up() -> StabilityResult:
    result = new_stability_result("mukron bench stability", "cpu", smoke=False)
    for settings, growth in (("defaults", 1.0), ("plain", 1e18)):
        for every in (1, 5, 10, 50):
            stale = StabilityOutcome(2.3, 2.3 * growth, 0.2 if growth == 1 else inf)
            result.runs[replace(RUN, settings=settings, every=every)] = FRESH if every == 1 else stale
    return result


def test_the_table_has_a_verdict_for_every_row():
    defaults, plain = made_up().table().rows
    assert defaults[:8] == ("digits", "K-FAC", "ema:0.95", "0.9", "200", "defaults", "2^-7", "1.05x 0.200")
    assert defaults[8:] == (*["1.00x 0.200"] * 3, "stable")
    assert plain[8:] == (*["1e+18x inf"] * 3, "unstable at 5, 10, 50")
    assert made_up().summary().rows == (("digits", "K-FAC", "1 of 1", "1 of 1", "0 of 1", "0 of 1"),)


def test_the_figure_has_two_panels_for_each_kind_of_settings(tmp_path):
    svg, png = draw_stability(made_up(), tmp_path / "figure")
    text = svg.read_text()
    assert png.exists()
    assert text.count("largest / initial loss") == text.count("final loss / every 1") == 2
    assert "digits, K-FAC, ema:0.95, momentum 0.9" in text
    assert "1e18" in text
    assert draw_stability(new_stability_result("", "cpu", smoke=True), tmp_path / "none") == []


def test_tables_are_written_between_the_markers(tmp_path):
    file = made_up().save(tmp_path / "figures")
    page = tmp_path / "stability.md"
    page.write_text(f"before\n\n{STABILITY_MARKER}\nold\n{STABILITY_MARKER}\n\nafter\n")
    text = write_stability_page(file, page).read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| digits | K-FAC | ema:0.95 | 0.9 | 200 | plain |" in text
    assert "(figures/stability-cpu.svg)" in text
    assert str(tmp_path) not in text
    assert write_stability_page(file, page).read_text() == text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="expected <!-- stability --> twice, found it 0 times"):
        write_stability_page(file, page)


def test_the_docs_show_what_is_stored():
    page = ROOT / "docs" / "stability.md"
    _, shown, _ = page.read_text().split(STABILITY_MARKER)
    (file,) = re.findall(r"Numbers: \[.*?\]\((.*?)\)", shown)
    assert shown.strip() == stability_section(page.parent / file, page.parent)
    assert RULE.text in page.read_text()


@pytest.mark.slow
def test_the_command_runs_all_problems_at_a_tiny_scale(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(STABILITY_MARKER * 2)
    arguments = [
        "bench",
        "stability",
        "--smoke",
        "--out",
        str(tmp_path),
        "--data-dir",
        str(tmp_path),
        "--page",
        str(page),
    ]
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    result = StabilityResult.load(tmp_path / "stability-smoke-cpu.json")
    assert {run.problem for run in result.runs} == {"digits", "cnn", "resnet", "gpt"}
    assert {run.method for run in result.runs} == {"kfac", "foof", "shampoo"}
    assert {run.settings for run in result.runs} == {"defaults", "plain"}
    assert not [finding for finding in result.findings() if finding.missing]
    assert not [outcome.failed for outcome in result.runs.values() if outcome.failed]
    assert result.commands == ["mukron bench stability --smoke"]
    assert stability_section(tmp_path / "stability-smoke-cpu.json", tmp_path) in page.read_text()
    assert (tmp_path / "stability-smoke-cpu.png").exists()


def test_a_page_without_markers_is_refused_before_anything_is_run(tmp_path):
    arguments = ["bench", "stability", "--smoke", "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page.md")]
    missing = CliRunner().invoke(app, arguments)
    assert missing.exit_code == 2
    assert "there is no such page" in missing.output
    (tmp_path / "page.md").write_text("nothing")
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert "expected <!-- stability --> twice, found it 0 times" in outcome.output
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("problem", ["digits", "resnet", "gpt"])
def test_on_a_gpu_a_run_is_that_of_the_cpu(problem):
    small = STABILITY_PROBLEMS[problem].for_smoke()
    run = replace(RUN, problem=problem, method="foof", power=-5, steps=4)  # nothing is drawn in its steps
    outcomes = [train_run(run, small, small.load(None, device, 64), device) for device in ("cpu", "cuda")]
    assert outcomes[0].final == pytest.approx(outcomes[1].final, rel=1e-3)


def test_ctrl_c_shows_what_there_is(tmp_path, counted):
    _, counted_limit = counted
    counted_limit["limit"] = 2
    arguments = ["bench", "stability", "--smoke", "--problems", "digits", "--methods", "foof", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 130, outcome.output
    assert "stability-smoke-cpu.json" in outcome.output
    assert "incomplete" in outcome.output
    assert len(StabilityResult.load(tmp_path / "stability-smoke-cpu.json").runs) == 2


def test_a_title_says_what_is_trained():
    """As far as it has numbers that the problem has, too."""
    for problem in STABILITY_PROBLEMS.values():
        assert re.search(rf"\b{problem.batch}\b", problem.title), problem.title
        assert re.search(rf"\b{problem.width}\b", problem.title), problem.title
    assert spec_of("kfac").title == "K-FAC"
