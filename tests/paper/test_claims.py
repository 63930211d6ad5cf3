"""Every check of a claim says where it holds, where it does not, and where there is too little to tell."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mukron.diagnose import Check, Measurement, Record
from mukron.paper import damped, nngp, tables, wide
from mukron.paper.claims import (
    BestOf,
    alike,
    all_of,
    beats,
    beats_everywhere,
    gap_grows,
    lower_rate,
    noise_of,
    revised,
)
from mukron.paper.errors import ReproductionError
from mukron.paper.features import (
    column_exponent,
    damping_exponents,
    damping_valid,
    damping_valid_inside_only,
    decays,
    depends_on_width,
    learns,
)
from mukron.paper.optima import edge_rises, moves, outperforms, stays
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Evidence, Finding, verdict_of
from mukron.paper.widths import (
    wider_is_better,
    wider_is_better_there,
    wider_is_worse,
    wider_is_worse_there,
    wider_throughout,
)
from mukron.study.certificate import Interval, certify
from mukron.study.points import Point, Result
from mukron.study.record import StudyRecord
from mukron.theory import NTK, get_scheme
from mukron.train import RunConfig
from mukron.train.records import DIVERGED, FINISHED

MUP, SP = "mup/rescaled:1,0", "sp/heuristic:0.001"
WIDTHS = (64, 128, 256)
RATES = tuple(2.0**z for z in range(-6, 0))
NOISE = (-0.002, 0.0, 0.002)  # of three seeds


def study(values, *, scheme=MUP, axis="lr", metric="test_accuracy", noise=NOISE, rows=None):
    """From (width, setting) to the metric's mean over seeds (None: it diverged) and, if given, rows of the run."""
    results = []
    for (width, setting), value in values.items():
        for seed, off in enumerate(noise):
            point = Point(scheme, width, *((setting, 1.0) if axis == "lr" else (0.01, setting)), seed)
            if value is None:
                results.append(Result(point, DIVERGED, (), "loss is not finite"))
                continue
            own = [{"epoch": 1, metric: value + off}] if rows is None else rows(width, value + off)
            results.append(Result(point, FINISHED, own))
    several = len({result.point.width for result in results}) > 1
    certificate = certify(results, (axis,), metric) if several else None
    return StudyRecord("made", RunConfig(epochs=1), (axis,), metric, tuple(results), certificate)


def valley(shift=0.0, widths=WIDTHS, top=0.9, gain=0.01, **options):
    """Accuracies whose best setting, 2^-3 at the narrowest, goes by ``shift`` in log2 per doubling of the width."""
    values = {}
    for width in widths:
        doublings = math.log2(width / widths[0])
        for rate in RATES:
            off = math.log2(rate) + 3 - shift * doublings
            values[width, rate] = top + gain * doublings - 0.03 * off**2
    return study(values, **options)


def at(*means, widths=WIDTHS, **options):
    """One setting, a mean a width."""
    return study({(width, 0.125): mean for width, mean in zip(widths, means, strict=True)}, **options)


def found(check, **parts) -> Finding:
    return check(Evidence(parts))


def verdict(check, **parts) -> str:
    return found(check, **parts).verdict


LOST = at(None, None, None)

# What is compared with what.


def test_beats_is_decided_by_the_noise_of_the_seeds():
    check = beats(BestOf("a"), BestOf("b"))
    better, worse = at(0.8, 0.8, 0.9), at(0.9, 0.9, 0.8)
    assert verdict(check, a=better, b=worse) == HOLDS  # at the widest
    assert verdict(check, a=worse, b=better) == FAILS
    assert verdict(check, a=better, b=at(0.8, 0.8, 0.899)) == UNTOLD
    assert verdict(beats(BestOf("a"), BestOf("b"), or_equals=True), a=better, b=at(0.8, 0.8, 0.899)) == HOLDS
    assert verdict(beats(BestOf("a", 64), BestOf("b", 64)), a=better, b=worse) == FAILS
    one = found(check, a=at(0.8, 0.8, 0.9, noise=(0.0,)), b=at(0.8, 0.8, 0.88, noise=(0.0,)))
    assert one.verdict == HOLDS
    assert one.measured == "a 90.00% against b 88.00% (one seed)"


def test_beats_takes_a_low_loss_for_the_better_one():
    low, high = at(2.0, 1.5, 1.0, metric="train_loss"), at(2.0, 1.5, 1.2, metric="train_loss")
    assert verdict(beats(BestOf("a"), BestOf("b")), a=low, b=high) == HOLDS
    assert verdict(beats(BestOf("a"), BestOf("b")), a=high, b=low) == FAILS


def test_beats_by_another_column_of_the_best_runs():
    def rows(loss):
        return lambda width, value: [{"epoch": 1, "test_accuracy": value, "test_loss": loss}]

    low, high = at(0.9, widths=(64,), rows=rows(0.5)), at(0.9, widths=(64,), rows=rows(0.7))
    by_loss = beats(BestOf("a", metric="test_loss"), BestOf("b", metric="test_loss"))
    assert verdict(by_loss, a=low, b=high) == HOLDS
    assert verdict(by_loss, a=high, b=low) == FAILS
    assert verdict(by_loss, a=at(0.9, widths=(64,)), b=at(0.9, widths=(64,))) == UNTOLD  # none has it


@pytest.mark.parametrize("or_equals", [False, True])
@pytest.mark.parametrize("metric", ["test_accuracy", "train_loss"])
def test_beats_where_runs_diverged(metric, or_equals):
    check = beats(BestOf("a"), BestOf("b"), or_equals)
    fine, lost = at(0.5, 0.5, 0.5, metric=metric), at(0.5, 0.5, None, metric=metric)
    assert verdict(check, a=fine, b=lost) == HOLDS
    assert verdict(check, a=lost, b=fine) == FAILS
    assert verdict(check, a=lost, b=lost) == UNTOLD


def test_alike_is_beyond_doubt():
    """The noise of a mean is about 0.001, so that two differ by more than 0.03 only if they do by more than 0.034."""
    check = alike(BestOf("a"), [BestOf("b"), BestOf("c")], 0.03)
    one, near, far = at(0.1, 0.1, 0.90), at(0.1, 0.1, 0.88), at(0.1, 0.1, 0.85)
    assert verdict(check, a=one, b=near, c=near) == HOLDS
    assert verdict(check, a=one, b=near, c=far) == FAILS
    assert verdict(check, a=one, b=near, c=at(0.1, 0.1, 0.869)) == UNTOLD  # 0.031
    assert verdict(check, a=one, b=near, c=at(0.1, 0.1, 0.871)) == UNTOLD  # 0.029
    assert verdict(check, a=one, b=near, c=LOST) == FAILS
    assert verdict(check, a=LOST, b=near, c=near) == UNTOLD
    assert verdict(alike(BestOf("a"), [], 0.03), a=one) == UNTOLD


def test_the_best_of_several_studies():
    low, high = at(0.5, widths=(64,)), at(0.7, widths=(64,))
    chosen = BestOf("low", name="b_L = 1:", among=("high",))
    assert chosen.describe(Evidence(low=low, high=high)) == "b_L = 1: 70.00%"
    assert verdict(beats(chosen, BestOf("other")), low=low, high=high, other=at(0.6, widths=(64,))) == HOLDS
    assert verdict(beats(chosen, BestOf("other")), low=low, high=LOST, other=at(0.6, widths=(64,))) == FAILS
    losses = {"low": at(0.5, widths=(64,), metric="train_loss"), "high": at(0.7, widths=(64,), metric="train_loss")}
    assert chosen.value(Evidence(losses)).mean == pytest.approx(0.5)


def test_a_rule_that_was_replaced_is_named_where_it_gave_something_else():
    holds, fails = (lambda evidence, each=each: Finding(each, "x") for each in (HOLDS, FAILS))
    assert revised(fails, holds, "Why.")(Evidence()) == Finding(FAILS, "x", HOLDS, "Why.")
    assert revised(holds, holds, "Why.")(Evidence()) == Finding(HOLDS, "x")


def test_the_earlier_verdict_on_several_findings():
    """An earlier verdict of one of them is one of all."""
    changed = revised(lambda evidence: Finding(UNTOLD, "x"), lambda evidence: Finding(HOLDS, "x"), "Why.")
    same = lambda evidence: Finding(HOLDS, "y")  # noqa: E731
    assert all_of(changed, same)(Evidence()) == Finding(IN_PART, "x; y", HOLDS, "Why.")
    assert all_of(same, same)(Evidence()) == Finding(HOLDS, "y; y")


def test_outperforms_asks_for_grids_that_hold_the_best():
    check = outperforms("a", "b")
    better, worse = valley(top=0.9), valley(top=0.8)
    won = found(check, a=better, b=worse)
    assert (won.verdict, won.measured[:14]) == (HOLDS, "+10.00 points:")
    assert verdict(check, a=worse, b=better) == FAILS
    assert verdict(check, a=better, b=better) == UNTOLD
    edge = study({(width, rate): 0.3 + rate for width in WIDTHS for rate in RATES})  # 0.8, and rising
    beyond = found(check, a=better, b=edge)
    assert beyond.verdict == UNTOLD
    assert beyond.measured.endswith("the best of b may lie beyond its grid")
    assert verdict(check, a=edge, b=better) == UNTOLD
    assert verdict(check, a=study({(width, rate): 0.9 + rate for width in WIDTHS for rate in RATES}), b=worse) == HOLDS
    one_rate = at(0.5, 0.5, 0.5)  # a single setting has no edge: it was given
    assert verdict(check, a=better, b=one_rate) == HOLDS
    narrow_edge = study({(64, rate): 0.3 + rate for rate in RATES})  # one width: no certificate
    assert verdict(check, a=valley(top=0.99, widths=(64,)), b=narrow_edge) == UNTOLD


@pytest.mark.parametrize(
    ("verdicts", "together"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([FAILS, FAILS], FAILS),
        ([UNTOLD, UNTOLD], UNTOLD),
        ([HOLDS, FAILS], IN_PART),
        ([HOLDS, UNTOLD], IN_PART),
        ([IN_PART, FAILS], IN_PART),
        ([UNTOLD, FAILS], FAILS),
    ],
)
def test_several_findings_make_one(verdicts, together):
    findings = [Finding(each, f"{number}") for number, each in enumerate(verdicts)]
    both = all_of(*(lambda evidence, each=each: each for each in findings))(Evidence())
    assert both == Finding(together, "0; 1")
    assert verdict_of(findings) == together


# Where the best setting lies.


@pytest.mark.parametrize("axis", ["lr", "damping"])
def test_stays(axis):
    check = stays("a", axis=axis)
    same = found(check, a=valley(axis=axis))
    assert same.verdict == HOLDS
    assert "best at 2^-3 at every width from 64 to 256" in same.measured
    moved = found(check, a=valley(-1.0, axis=axis))
    assert moved.verdict == FAILS
    assert "best at 2^-3 (width 64), 2^-4 (width 128), 2^-5 (width 256)" in moved.measured
    assert verdict(check, a=valley(widths=(64,), axis=axis)) == UNTOLD
    assert verdict(check, a=LOST) == UNTOLD


def judged(record, drift=(0.0, -0.4, 0.4), verdict="cannot tell"):
    """The same study with another judgement of its certificate."""
    (own,) = record.certificate.judgements
    changed = dataclasses.replace(own, drift=Interval(*drift), verdict=verdict)
    return dataclasses.replace(record, certificate=dataclasses.replace(record.certificate, judgements=(changed,)))


def test_that_nobody_could_tell_is_not_that_it_stays():
    """Best at 2^-3 and at 2^-4, but nobody could tell which."""
    values = {(64, 0.0625): 0.9, (64, 0.125): 0.901, (256, 0.0625): 0.921, (256, 0.125): 0.92}
    values |= {(width, rate): 0.5 for width in (64, 256) for rate in (0.015625, 0.03125, 0.25, 0.5)}
    assert verdict(stays("a"), a=study(values)) == HOLDS  # certified
    finding = found(stays("a"), a=judged(study(values)))
    assert (finding.verdict, finding.earlier) == (UNTOLD, HOLDS)
    assert "is as good at every width" in finding.measured
    assert finding.rule.startswith("Earlier, ")
    one = study(values, noise=(0.0,))
    assert verdict(stays("a"), a=one) == UNTOLD  # with one seed there is no noise to go by
    assert verdict(stays("a"), a=judged(study(values), verdict="does not transfer")) == IN_PART


def test_it_stays_on_a_grid_that_would_show_a_drift():
    """The same step of the grid at every width: a drift of less than one step over all doublings."""
    many, few = (64, 128, 256, 512, 1024), (64, 128, 256)
    coarse = study({(width, rate): 0.8 - abs(math.log2(rate) + 3) / 9 for width in many for rate in RATES[1::2]})
    for record, expected, resolution in (
        (valley(widths=many), HOLDS, "0.25"),
        (valley(widths=few), UNTOLD, "0.5"),
        (coarse, UNTOLD, "0.5"),
    ):
        finding = found(stays("a"), a=judged(record))
        assert finding.measured.endswith(
            f"certificate: cannot tell; the grid resolves {resolution} per doubling (needed: 0.25)"
        )
        assert (finding.verdict, finding.earlier) == (expected, "" if expected == HOLDS else HOLDS)
        moved = found(moves("a"), a=judged(record))
        assert (moved.verdict, moved.earlier) == ((FAILS, "") if expected == HOLDS else (UNTOLD, FAILS))
    unbounded = judged(valley(widths=many), drift=(0.0, -math.inf, math.inf))
    assert verdict(stays("a"), a=unbounded) == UNTOLD
    contradicted = judged(valley(widths=many), verdict="does not transfer")
    assert verdict(stays("a"), a=contradicted) == UNTOLD


def test_moves():
    down = valley(-1.0)
    assert verdict(moves("a"), a=down) == HOLDS
    assert verdict(moves("a", direction=-1), a=down) == HOLDS
    assert verdict(moves("a", direction=1), a=down) == FAILS
    assert verdict(moves("a"), a=valley()) == FAILS
    assert verdict(moves("a"), a=valley(widths=(64,))) == UNTOLD
    within = valley(0.2)  # by less than a step of the grid: the certificate sees it, no setting that was tried does
    assert "best at 2^-3 at every width" in found(moves("a"), a=within).measured
    assert verdict(moves("a"), a=within) == UNTOLD
    coarse = valley(-1.0, widths=(64, 128), noise=(0.0,))  # one step of the grid, two widths, one seed
    assert verdict(moves("a"), a=coarse) == UNTOLD
    assert verdict(moves("a", direction=-1), a=coarse) == UNTOLD


def test_at_the_edge_of_the_grid_nothing_is_told():
    """The best is the highest rate that was tried, at every width."""
    edge = study({(width, rate): 0.5 + rate for width in WIDTHS for rate in RATES})
    for check in (stays("a"), moves("a")):
        assert verdict(check, a=edge) == UNTOLD
    assert "at 64, 128, 256 the best may lie beyond the grid" in found(stays("a"), a=edge).measured


def test_a_seed_that_collapsed_hides_no_difference():
    """Near the edge of stability two seeds differ by much; that is not the noise by which means are compared."""
    falling = valley(-1.0, noise=(-0.002, 0.002))
    results = [
        dataclasses.replace(each, rows=[{"epoch": 1, "test_accuracy": 0.3}])
        if (each.point.width, each.point.lr, each.point.seed) == (256, 0.125, 0)
        else each
        for each in falling.results
    ]
    collapsed = dataclasses.replace(falling, results=tuple(results))
    assert noise_of(collapsed, "test_accuracy") == pytest.approx(0.004 / math.sqrt(2) / 0.686, rel=0.01)
    assert verdict(moves("a"), a=collapsed) == HOLDS
    assert verdict(stays("a"), a=collapsed) == FAILS


def test_where_schemes_are_tuned_the_noise_is_that_of_the_best_of_all():
    good = study({(64, 0.125): 0.9}, scheme="mup/fixed:1,1")
    results = [
        dataclasses.replace(
            each,
            point=dataclasses.replace(each.point, scheme=f"mup/fixed:{number},1"),
            rows=[{"epoch": 1, "test_accuracy": 0.9 - 0.01 * number + 0.002 * number**2 * (each.point.seed - 1)}],
        )
        for number in range(1, 10)
        for each in good.results
    ]
    record = dataclasses.replace(good, results=tuple(results))
    assert noise_of(record, "test_accuracy", tuned_schemes=True) < 0.2 * noise_of(record, "test_accuracy")


def test_untrained_settings_are_not_the_noise():
    """Where nothing is learned seeds differ by chance: a grid that goes far down hides no difference."""
    values = {(64, 2.0**-z): 0.9 - 0.001 * abs(z - 3) for z in range(1, 6)}
    far = {(64, 2.0**-z): 0.1 for z in range(10, 20)}
    wide = study({**values, **far})
    results = [
        dataclasses.replace(each, rows=[{"epoch": 1, "test_accuracy": 0.1 + 0.04 * (each.point.seed - 1)}])
        if each.point.lr < 2.0**-9
        else each
        for each in wide.results
    ]
    spread = dataclasses.replace(wide, results=tuple(results))
    assert noise_of(spread, "test_accuracy") == pytest.approx(noise_of(study(values), "test_accuracy"))


def test_a_width_at_which_all_diverges_is_said():
    values = {(width, rate): 0.9 - rate for width in (64, 128) for rate in RATES}
    finding = found(stays("a"), a=study({**values, **{(256, rate): None for rate in RATES}}))
    assert finding.verdict == FAILS
    assert "at 256 every run diverged" in finding.measured


# Wider.


def test_wider_is_better():
    check = wider_is_better("a")
    assert verdict(check, a=at(0.7, 0.8, 0.9)) == HOLDS
    assert verdict(check, a=at(0.7, 0.8, 0.8)) == HOLDS  # none is worse, the widest is better
    assert verdict(check, a=at(0.8, 0.7, 0.9)) == IN_PART
    assert verdict(check, a=at(0.7, None, 0.9)) == IN_PART
    assert verdict(check, a=at(0.9, 0.8, 0.7)) == FAILS
    assert verdict(check, a=at(0.9, 0.9, None)) == FAILS
    assert verdict(check, a=at(None, 0.8, 0.9)) == UNTOLD
    level = wider_is_better("a", strictly=False)
    assert verdict(level, a=at(0.9, 0.9, 0.9)) == HOLDS
    assert verdict(level, a=at(0.8, 0.7, 0.9)) == FAILS
    assert verdict(check, a=at(0.9, 0.9, 0.9)) == UNTOLD
    assert verdict(check, a=at(0.9, widths=(64,))) == UNTOLD
    losses = at(3.0, 2.0, 1.0, metric="train_loss")
    assert verdict(check, a=losses) == HOLDS
    assert found(check, a=losses).measured == "a: 3 at 64, 2 at 128, 1 at 256"


def test_wider_is_worse():
    check = wider_is_worse("a")
    assert verdict(check, a=at(0.9, 0.95, 0.8)) == HOLDS
    assert verdict(check, a=at(0.8, 0.7, 0.9)) == FAILS
    assert verdict(check, a=at(0.8, 0.7, 0.8)) == UNTOLD


def test_wider_is_worse_or_better_only_where_the_grid_holds_the_best():
    """The widest is best at the lowest rate that was run, and may be better below it."""
    falling = {(64, rate): 0.9 - 0.03 * abs(math.log2(rate) + 3) for rate in RATES}
    low = study({**falling, **{(256, rate): 0.8 - 0.03 * (math.log2(rate) + 6) for rate in RATES}})
    for check, before in ((wider_is_worse("a"), HOLDS), (wider_is_better("a"), FAILS)):
        finding = found(check, a=low)
        assert (finding.verdict, finding.earlier) == (UNTOLD, before)
        assert finding.measured.endswith("at 256 the best may lie beyond the grid")
    rising = study(
        {(64 * 256 / width, rate): value for (width, rate), value in falling.items()}
        | {(64, rate): 0.8 - 0.03 * (math.log2(rate) + 6) for rate in RATES}
    )
    assert verdict(wider_is_better("a"), a=rising) == UNTOLD  # the narrowest may be better
    assert verdict(wider_is_worse("a"), a=rising) == UNTOLD


def test_wider_is_worse_at_the_narrowest_ones_best():
    check = wider_is_worse_there("a")
    values = {(64, 0.125): 0.8, (64, 0.25): 0.7, (256, 0.25): 0.95}
    there = found(check, a=study({**values, (256, 0.125): 0.6}))
    assert (there.verdict, there.measured) == (HOLDS, "a, learning rate 2^-3: 80.00% at 64, 60.00% at 256")
    assert verdict(check, a=study({**values, (256, 0.125): None})) == HOLDS
    assert verdict(check, a=study({**values, (256, 0.125): 0.9})) == FAILS
    assert verdict(check, a=study({**values, (256, 0.125): 0.8})) == UNTOLD
    assert verdict(check, a=at(0.9, widths=(64,))) == UNTOLD
    assert verdict(check, a=LOST) == UNTOLD


def test_wider_is_better_at_the_narrowest_ones_best():
    check = wider_is_better_there("a")
    values = {(64, 0.125): 0.8, (64, 0.25): 0.7, (128, 0.25): 0.95, (256, 0.25): 0.95}
    there = found(check, a=study({**values, (128, 0.125): 0.85, (256, 0.125): 0.9}))
    assert (there.verdict, there.measured) == (
        HOLDS,
        "a, learning rate 2^-3: 80.00% at 64, 85.00% at 128, 90.00% at 256",
    )
    assert verdict(check, a=study({**values, (128, 0.125): 0.7, (256, 0.125): 0.9})) == IN_PART
    assert verdict(check, a=study({**values, (128, 0.125): 0.8, (256, 0.125): 0.8})) == UNTOLD
    assert verdict(check, a=study({**values, (128, 0.125): 0.8, (256, 0.125): None})) == FAILS
    assert verdict(check, a=at(0.9, widths=(64,))) == UNTOLD
    assert verdict(check, a=LOST) == UNTOLD


def test_the_edge_of_divergence():
    dampings = tuple(2.0**z for z in range(-6, 0))

    def edges(low, high):  # by width, the exponents of the least and the largest damping that finish
        values = {
            (width, rho): 0.5 if a <= math.log2(rho) <= b else None
            for width, a, b in zip(WIDTHS, low, high, strict=True)
            for rho in dampings
        }
        return study(values, axis="damping")

    least, largest = edge_rises("a", "least"), edge_rises("a", "largest")
    grows = edges((-6, -4, -3), (-1, -1, -1))  # the first may lie lower still
    assert verdict(least, a=grows) == HOLDS
    assert "at 64 at the end of the grid" in found(least, a=grows).measured
    assert verdict(largest, a=grows) == UNTOLD  # nothing diverges at the top
    assert verdict(least, a=edges((-3, -4, -5), (-1, -1, -1))) == FAILS
    assert verdict(least, a=edges((-5, -6, -4), (-1, -1, -1))) == IN_PART
    assert verdict(least, a=edges((-4, -3, -4), (-1, -1, -1))) == UNTOLD
    assert verdict(largest, a=edges((-6, -6, -6), (-3, -2, -1))) == HOLDS
    assert verdict(least, a=edges((-6, -5, 0), (-1, -1, -1))) == UNTOLD  # at the widest all diverges


def test_better_at_every_learning_rate():
    check = beats_everywhere("a", "b")
    low = study({(64, 0.125): 0.5, (64, 0.25): 0.6})
    assert verdict(check, a=study({(64, 0.125): 0.7, (64, 0.25): 0.7}), b=low) == HOLDS
    assert verdict(check, a=study({(64, 0.125): 0.7, (64, 0.25): 0.5}), b=low) == IN_PART
    assert verdict(check, a=study({(64, 0.125): 0.4, (64, 0.25): 0.5}), b=low) == FAILS
    assert verdict(check, a=low, b=low) == UNTOLD
    assert verdict(check, a=study({(64, 0.5): 0.7}), b=low) == UNTOLD


def test_the_lower_of_two_best_rates():
    low, high = study({(64, 0.125): 0.9, (64, 0.25): 0.8}), study({(64, 0.125): 0.8, (64, 0.25): 0.9})
    check = lower_rate(BestOf("a"), BestOf("b"))
    assert (verdict(check, a=low, b=high), verdict(check, a=high, b=low)) == (HOLDS, FAILS)
    assert verdict(check, a=low, b=low) == FAILS
    assert verdict(check, a=low, b=LOST) == UNTOLD
    assert found(check, a=low, b=high).measured == "a best at 2^-3, b at 2^-2"


def test_a_gap_that_grows():
    def gaps(*values):
        parts = {f"top{n}": at(0.5 + value, widths=(64,)) for n, value in enumerate(values)}
        parts |= {f"low{n}": at(0.5, widths=(64,)) for n in range(len(values))}
        pairs = [(f"batch {n}", BestOf(f"top{n}"), BestOf(f"low{n}")) for n in range(len(values))]
        return verdict(gap_grows(pairs), **parts)

    assert gaps(0.0, 0.1, 0.2) == HOLDS
    assert gaps(0.1, 0.0, 0.2) == IN_PART
    assert gaps(0.2, 0.1, 0.0) == FAILS
    assert gaps(0.1, 0.1) == UNTOLD
    assert gaps(0.1) == UNTOLD


def test_wider_is_better_throughout_training():
    def curves(*finals, start=3.0):
        def rows(width, value):
            final = dict(zip(WIDTHS, finals, strict=True))[width]
            return [
                {"epoch": 1, "train_loss": start + 0.01 * width * (final > 1), "x": value},
                {"epoch": 2, "train_loss": final, "x": value},
            ]

        return at(*(0.5 for _ in finals), metric="x", rows=rows)

    check = wider_throughout("a", "train_loss")
    assert verdict(check, a=curves(0.9, 0.8, 0.7)) == HOLDS
    assert verdict(check, a=curves(0.7, 0.8, 0.9)) == IN_PART  # worse at the second epoch alone
    assert verdict(check, a=curves(2.0, 2.5, 3.0)) == FAILS
    assert verdict(wider_throughout("a", "none"), a=curves(0.9, 0.8, 0.7)) == UNTOLD
    assert verdict(check, a=at(0.9, widths=(64,))) == UNTOLD


def test_with_one_seed_a_point_counts():
    one = {"noise": (0.0,), "widths": (64,)}
    for gain, expected in ((0.02, HOLDS), (0.005, UNTOLD), (-0.02, FAILS)):
        assert verdict(beats(BestOf("a"), BestOf("b")), a=at(0.8 + gain, **one), b=at(0.8, **one)) == expected


# Features.


def coordinate(slopes, widths=(64, 128, 256, 512), broken=None, quantity="features", noise=0.01, **about):
    """Features of each layer, or another quantity, go with this power of the width."""
    rows = [
        Measurement(width, seed, 2, quantity, layer, width**slope * (1 + noise * (seed - 0.5) * (-1) ** number))
        for number, width in enumerate(widths)
        for seed in range(2)
        for layer, slope in slopes.items()
    ]
    about = {"method": "kfac", "scheme": "mup", "damping": "", "roles": {}, "predicted": {}, **about}
    about["broken"] = broken or {}
    return Check(Record(tuple(rows), tuple(widths), 2, **about))


NONE, ONE_WIDTH = coordinate({}), coordinate({"fc1": 0.0}, widths=(64,))


def test_learns():
    check = learns("a")
    assert verdict(check, a=coordinate({"fc1": 0.05, "fc2": -0.05})) == HOLDS
    assert verdict(check, a=coordinate({"fc1": 0.0, "fc2": -0.5})) == IN_PART
    assert verdict(check, a=coordinate({"fc1": 0.5, "fc2": -0.5})) == FAILS
    assert verdict(check, a=coordinate({"fc1": 0.0}, broken={"width 64, seed 0": "overflow"})) == IN_PART
    assert verdict(check, a=NONE) == UNTOLD
    assert verdict(check, a=ONE_WIDTH) == UNTOLD
    assert "fc2 -0.50" in found(check, a=coordinate({"fc1": 0.0, "fc2": -0.5})).measured


def test_fades():
    check = decays("a")
    assert verdict(check, a=coordinate({"fc1": 0.0, "fc2": -0.5})) == HOLDS
    assert verdict(check, a=coordinate({"fc1": 0.0, "fc2": 0.5})) == FAILS
    assert verdict(check, a=NONE) == UNTOLD
    assert verdict(check, a=ONE_WIDTH) == UNTOLD
    both = decays("a", "fc1", "fc2")
    assert verdict(both, a=coordinate({"fc1": -0.5, "fc2": -0.5})) == HOLDS
    assert verdict(both, a=coordinate({"fc1": -0.5, "fc2": 0.0})) == IN_PART
    assert verdict(decays("a", "fc1"), a=coordinate({"fc1": 0.0, "fc2": -0.5})) == FAILS


def test_a_layer_decays_if_its_whole_interval_does():
    noisy = coordinate({"fc1": -0.3}, noise=1.5)
    assert (verdict(decays("a"), a=noisy), found(decays("a"), a=noisy).earlier) == (UNTOLD, HOLDS)
    both = decays("a", "fc1", "fc2")
    assert verdict(both, a=coordinate({"fc1": 0.0, "fc2": 0.0})) == FAILS


def test_departs():
    check = depends_on_width("a")
    assert verdict(check, a=coordinate({"fc1": 0.5, "fc2": -0.5})) == HOLDS
    some = found(check, a=coordinate({"fc1": 0.0, "fc2": -0.5}))
    assert (some.verdict, some.earlier) == (IN_PART, HOLDS)
    assert "fc2 -0.50 [" in some.measured
    assert some.measured.endswith("of 2 layers 1 depend on it and 1 do not")
    assert verdict(check, a=coordinate({"fc1": 0.0}, broken={"width 64, seed 0": "overflow"})) == IN_PART
    assert verdict(check, a=coordinate({"fc1": 0.1, "fc2": -0.1})) == FAILS
    unsure = found(check, a=coordinate({"fc1": 0.3}, noise=1.5))  # an interval that has the tolerance in it
    assert (unsure.verdict, unsure.earlier) == (UNTOLD, HOLDS)
    assert verdict(check, a=NONE) == UNTOLD
    assert verdict(check, a=ONE_WIDTH) == UNTOLD


LAYERS = {"fc1.A": 0.0, "fc1.B": -1.0, "fc2.A": 1.0, "fc2.B": -1.0, "fc3.A": 1.0, "fc3.B": 0.0}
ROLES = {"fc1": "input", "fc2": "hidden", "fc3": "output"}


def test_the_exponents_of_damping():
    check = damping_exponents("a")
    predicted = {f"largest/{factor}": exponent for factor, exponent in LAYERS.items()}

    def damping(**changes):
        return coordinate({**LAYERS, **changes}, quantity="damping", predicted=predicted)

    held = found(check, a=damping())
    assert held.verdict == HOLDS
    assert "fc2.B -1.00 [" in held.measured
    assert verdict(check, a=damping(**{"fc2.B": 0.0})) == IN_PART
    assert verdict(check, a=coordinate({"fc2.B": 0.0}, quantity="damping", predicted=predicted)) == FAILS
    assert verdict(check, a=coordinate(LAYERS, quantity="damping", predicted=predicted, noise=1.9)) == UNTOLD
    assert verdict(check, a=coordinate(LAYERS, quantity="damping")) == UNTOLD  # no theory
    assert verdict(check, a=NONE) == UNTOLD


def test_where_damping_is_valid():
    def ratios(**exponents):
        return coordinate({**dict.fromkeys(LAYERS, 0.0), **exponents}, quantity="ratio", roles=ROLES)

    assert verdict(damping_valid("a"), a=ratios()) == HOLDS
    assert verdict(damping_valid("a"), a=ratios(**{"fc1.B": 1.0})) == IN_PART
    assert verdict(damping_valid("a"), a=coordinate({"fc1.B": 1.0}, quantity="ratio")) == FAILS
    assert verdict(damping_valid("a"), a=NONE) == UNTOLD
    inside = damping_valid_inside_only("a")
    assert verdict(inside, a=ratios(**{"fc1.B": 1.0, "fc3.A": -1.0})) == HOLDS
    assert verdict(inside, a=ratios(**{"fc1.B": 1.0})) == IN_PART  # the output layer's is valid too
    assert verdict(inside, a=ratios(**{"fc2.B": 1.0})) == FAILS
    assert verdict(inside, a=NONE) == UNTOLD


def test_the_exponent_of_a_column_at_the_first_and_the_last_epoch():
    def rates(first, last, widths=WIDTHS):
        def rows(width, value):
            return [{"epoch": 1, "rate": width**first, "x": value}, {"epoch": 9, "rate": width**last, "x": value}]

        return at(*(0.5 for _ in widths), widths=widths, metric="x", rows=rows)

    check = column_exponent("a", "rate", 1.0)
    assert verdict(check, a=rates(1.0, 0.9)) == HOLDS
    assert verdict(check, a=rates(1.0, 0.5)) == IN_PART
    assert verdict(check, a=rates(0.0, 0.5)) == FAILS
    assert verdict(check, a=rates(1.0, 1.0, widths=(64,))) == UNTOLD
    assert verdict(column_exponent("a", "other", 1.0), a=rates(1.0, 1.0)) == UNTOLD


# Of one recipe alone.


RULE = "max-eigenvalue:0.001"


def arm(*means, scheme="mup", rule=RULE, epochs=300, rows=None):
    record = at(*means, scheme=f"{scheme}/{rule}", rows=rows)
    return dataclasses.replace(record, config=record.config.replace(epochs=epochs))


def test_mup_wins_at_the_widest():
    check = wide.mup_wins("sp", "mup", 300)
    sp = arm(0.8, 0.8, 0.8, scheme="sp")
    won = found(check, sp=sp, mup=arm(0.7, 0.9, 0.9))
    assert won.verdict == HOLDS
    assert "-10.00 at 64, +10.00 at 128, +10.00 at 256; better at 2 of 3 widths" in won.measured
    assert verdict(check, sp=sp, mup=arm(0.9, 0.9, 0.7)) == FAILS
    assert verdict(check, sp=sp, mup=arm(0.9, 0.9, 0.8)) == UNTOLD
    assert verdict(check, sp=LOST, mup=LOST) == UNTOLD


def test_what_was_not_run_as_the_paper_did_decides_nothing():
    check = wide.mup_wins("sp", "mup", 300)
    mup = arm(0.9, 0.9, 0.9)
    other = found(check, sp=arm(0.8, 0.8, 0.8, scheme="sp", rule="heuristic:10"), mup=mup)
    assert (other.verdict, other.earlier) == (UNTOLD, HOLDS)
    assert other.measured.startswith("two rules of damping were run, ")
    short = found(check, sp=arm(0.8, 0.8, 0.8, scheme="sp", epochs=99), mup=arm(0.9, 0.9, 0.9, epochs=99))
    assert (short.verdict, short.earlier) == (UNTOLD, HOLDS)
    assert "99 of the paper's 300 epochs were run" in short.measured
    enough = {"sp": arm(0.8, 0.8, 0.8, scheme="sp", epochs=100), "mup": arm(0.9, 0.9, 0.9, epochs=100)}
    assert verdict(check, **enough) == HOLDS


def test_mup_wins_early():
    def early(value):
        def rows(width, final):
            epochs = {3: value, 100: value, 101: final, 300: final}
            return [{"epoch": epoch, "test_accuracy": each} for epoch, each in epochs.items()]

        return rows

    check = wide.mup_wins_early("sp", "mup", 300)
    sp = arm(0.9, 0.9, 0.9, scheme="sp", rows=early(0.5))
    won = found(check, sp=sp, mup=arm(0.9, 0.9, 0.9, rows=early(0.6)))
    assert (won.verdict, won.measured[:34]) == (HOLDS, "after 100 epochs, muP against SP, ")
    assert verdict(check, sp=sp, mup=arm(0.9, 0.9, 0.9, rows=early(0.4))) == FAILS
    assert verdict(check, sp=sp, mup=sp) == UNTOLD
    heuristic = arm(0.9, 0.9, 0.9, scheme="sp", rule="heuristic:10", rows=early(0.5))
    assert verdict(check, sp=heuristic, mup=arm(0.9, 0.9, 0.9, rows=early(0.6))) == UNTOLD
    assert verdict(check, sp=LOST, mup=LOST) == UNTOLD


def test_the_distance_after_the_first_epoch():
    def distances(power, widths=(1, 2, 4)):
        def rows(width, value):
            early = {"epoch": 1, "distance/a": width**power, "distance/b": 3 * width**power}
            return [{**early, "x": value}, {"epoch": 2, "distance/a": 1.0, "distance/b": 1.0, "x": value}]

        return at(*(0.5 for _ in widths), widths=widths, metric="x", rows=rows)

    def evidence(sp, mup):
        return Evidence({"VGG, SP": sp, "VGG, muP": mup})

    check = wide.early_distance("VGG")
    held = check(evidence(distances(-0.5), distances(0.0)))
    assert (held.verdict, "SP 0.50, muP 1.00" in held.measured) == (HOLDS, True)
    assert check(evidence(distances(-0.1), distances(0.0))).verdict == IN_PART  # SP hardly falls
    assert check(evidence(distances(0.1), distances(-0.5))).verdict == FAILS
    assert check(evidence(distances(-0.5, widths=(1,)), distances(0.0, widths=(1,)))).verdict == UNTOLD
    assert check(evidence(at(0.5, 0.5, 0.5), at(0.5, 0.5, 0.5))).verdict == UNTOLD  # nothing was recorded
    assert check(evidence(LOST, LOST)).verdict == UNTOLD


CHOSEN = (0.0, 1.0, 2.0)


def scaled(cells, narrow="4,0.25", numbers=("1,1", "4,0.25", "16,0.0625")):
    """A narrow study that is best at these numbers, and a wide one a cell: its values by numbers, or one value."""

    def part(values, x, y, width):
        results = []
        for number, value in values.items():
            scheme = f"mup/fixed:{number},1,{x:g},{y:g}"
            results += study({(width, 0.125): value}, scheme=scheme).results
        return StudyRecord("made", RunConfig(epochs=1), ("lr",), "test_accuracy", tuple(results), None)

    def values(cell):
        return cell if isinstance(cell, dict) else {**dict.fromkeys(numbers, 0.3), narrow: cell}

    parts = {"narrow": part(dict.fromkeys(numbers, None) | {narrow: 0.9}, 1, 1, 64)}
    for x in CHOSEN:
        for y in CHOSEN:
            parts[damped.part_name(x, y)] = part(values(cells.get((x, y), 0.5)), x, y, 256)
    return Evidence(parts)


def test_damping_is_best_where_it_is_scaled_by_minus_one_and_one():
    check = damped.highest_at_one(CHOSEN, damped.carried)
    held = check(scaled({(1, 1): 0.9, (2, 2): None}))
    assert held.verdict == HOLDS
    assert held.measured == (
        "90.00% at (-1, 1) with rho_A' = 4, rho_B' = 0.25; highest of the others 50.00% at (0, 0) with rho_A' = 4, "
        "rho_B' = 0.25; 0 above it beyond noise, 0 equal within noise; 1 of 9 diverge"
    )
    assert check(scaled({(1, 1): 0.9, (2, 1): 0.95})).verdict == FAILS
    assert check(scaled({(1, 1): 0.9, (2, 1): 0.901})).verdict == UNTOLD  # within noise
    assert check(scaled({(1, 1): 0.6, (0, 0): 0.9, (2, 1): 0.9, (2, 2): 0.9})).verdict == FAILS
    assert check(scaled({(1, 1): None})).verdict == FAILS
    edge = check(scaled({(1, 1): 0.9}, narrow="16,0.0625"))
    assert edge.verdict == UNTOLD
    assert "(at an edge of the grid)" in edge.measured


def test_damping_that_is_tuned_for_every_scaling():
    check = damped.highest_at_one(CHOSEN, damped.tuned_in_place)
    inside, other = {"4,0.25": 0.9, "1,1": 0.5, "16,0.0625": 0.5}, {"4,0.25": 0.5, "1,1": 0.4, "16,0.0625": 0.3}
    rest = {(x, y): other for x in CHOSEN for y in CHOSEN}
    assert check(scaled({**rest, (1, 1): inside})).verdict == HOLDS
    better = {"4,0.25": 0.95, "1,1": 0.4, "16,0.0625": 0.3}
    assert check(scaled({**rest, (1, 1): inside, (2, 1): better})).verdict == FAILS
    behind_at_edge = {"4,0.25": 0.5, "1,1": 0.6, "16,0.0625": 0.3}  # it may be better still beyond
    assert check(scaled({**rest, (1, 1): inside, (2, 1): behind_at_edge})).verdict == UNTOLD
    itself_at_edge = {"4,0.25": 0.5, "1,1": 0.9, "16,0.0625": 0.3}
    assert check(scaled({**rest, (1, 1): itself_at_edge})).verdict == HOLDS
    assert check(scaled({**rest, (1, 1): itself_at_edge, (2, 1): better})).verdict == UNTOLD
    lost = dict.fromkeys(other)
    assert check(scaled({(x, y): lost for x in CHOSEN for y in CHOSEN})).verdict == UNTOLD


def test_eigenvalues_and_damping_vary_over_the_epochs():
    def spectra(mean, damping, epochs=3):
        def rows(width, value):
            return [
                {"epoch": n, "x": value, "mean/fc.A": mean**n, "mean/fc.B": 1.0 / mean**n, "damping/fc.A": damping**n}
                for n in range(1, epochs + 1)
            ]

        return at(0.5, widths=(1,), metric="x", rows=rows)

    check = damped.changes_over_epochs("a")
    assert verdict(check, a=spectra(2.0, 2.0)) == HOLDS
    assert verdict(check, a=spectra(2.0, 1.1)) == IN_PART
    assert verdict(check, a=spectra(1.1, 1.1)) == FAILS
    assert verdict(check, a=spectra(2.0, 2.0, epochs=1)) == UNTOLD
    assert verdict(check, a=at(None, widths=(1,))) == UNTOLD
    follows = damped.damping_follows("a")
    assert verdict(follows, a=spectra(2.0, 2.0)) == HOLDS
    assert verdict(follows, a=spectra(2.0, 0.5)) == FAILS
    assert verdict(follows, a=spectra(2.0, 2.0, epochs=2)) == UNTOLD
    assert verdict(follows, a=at(None, widths=(1,))) == UNTOLD


def test_early_compares_the_first_evaluation():
    def curve(first, last):
        return at(
            0.5,
            widths=(8,),
            noise=(0.0,),
            rows=lambda width, value: [{"epoch": 5, "test_accuracy": first}, {"epoch": 10, "test_accuracy": last}],
        )

    check = nngp.higher_at_first("a", "b")
    assert verdict(check, a=curve(0.7, 0.7), b=curve(0.5, 0.9)) == HOLDS
    assert verdict(check, a=curve(0.5, 0.9), b=curve(0.7, 0.7)) == FAILS
    assert verdict(check, a=at(0.5, widths=(8,)), b=curve(0.7, 0.7)) == UNTOLD  # one evaluation is no curve


def test_the_tables_are_compared_cell_by_cell():
    mup = get_scheme("mup")
    assert tables.matches_printed(mup, tables.PRINTED_MUP)(Evidence()).verdict == HOLDS
    wrong = {**tables.PRINTED_MUP, "shampoo": ("0, -1/2", "1, 1/2", "1/2, 1/2")}
    assert tables.matches_printed(mup, wrong)(Evidence()) == Finding(
        FAILS, "2 of 3 methods as printed; others: shampoo"
    )
    assert tables.matches_printed(NTK, tables.PRINTED_MUP)(Evidence()).verdict == FAILS


def test_evidence_of_another_kind_is_refused():
    with pytest.raises(ReproductionError, match="evidence 'a': expected a Check, found StudyRecord"):
        found(learns("a"), a=LOST)
    with pytest.raises(ReproductionError, match="evidence 'a': expected a StudyRecord, found NoneType"):
        found(stays("a"))


def test_it_stays_at_the_kernel_if_every_first_step_is_there():
    def at(*accuracies):
        rows = [{"epoch": epoch, "test_accuracy": value} for epoch, value in enumerate(accuracies, 1)]
        points = [Point(MUP, 8.0, 0.1, 1.0, seed) for seed in range(2)]
        results = tuple(
            Result(point, FINISHED, [{**row, "test_accuracy": row["test_accuracy"] + off} for row in rows])
            for point, off in zip(points, (-0.001, 0.001), strict=True)
        )
        return StudyRecord("made", RunConfig(epochs=len(rows)), ("lr",), "test_accuracy", results, None)

    check, kernel = nngp.stays_at_the_kernel("K-FAC"), at(0.77)
    held = check(Evidence({nngp.KERNEL: kernel, "K-FAC": at(0.77, 0.78, 0.77, 0.76, 0.77, 0.2)}))
    assert (held.verdict, str(held.effect).split()[0]) == (HOLDS, "+1.00")
    left = check(Evidence({nngp.KERNEL: kernel, "K-FAC": at(0.77, 0.45, 0.46, 0.5, 0.6)}))
    assert (left.verdict, left.effect.value) == (FAILS, -32.0)
    assert check(Evidence({nngp.KERNEL: kernel, "K-FAC": at(0.77, 0.77)})).verdict == UNTOLD
    near = check(Evidence({nngp.KERNEL: kernel, "K-FAC": at(0.77, 0.7995, 0.77, 0.77, 0.77)}))
    assert near.verdict == UNTOLD
