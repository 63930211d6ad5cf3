"""Every check of a claim says where it holds, where it does not, and where there is too little to tell."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mukron.diagnose import Check, Measurement, Record
from mukron.paper import damped, nngp, tables, wide
from mukron.paper.claims import (
    BestOf,
    all_of,
    beats,
    beats_everywhere,
    close,
    column_exponent,
    decays,
    depends_on_width,
    gap_grows,
    learns,
    lower_rate,
    moves,
    noise_of,
    stays,
    wider_is_better,
    wider_is_worse,
    wider_is_worse_there,
    wider_throughout,
)
from mukron.paper.errors import ReproductionError
from mukron.paper.recipe import FAILS, HOLDS, IN_PART, UNTOLD, Evidence, Finding, verdict_of
from mukron.study.certificate import certify
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


def test_near_counts_the_distance_alone():
    check = close(BestOf("a"), BestOf("b"), 0.03)
    assert verdict(check, a=at(0.1, 0.1, 0.90), b=at(0.1, 0.1, 0.88)) == HOLDS
    assert verdict(check, a=at(0.1, 0.1, 0.88), b=at(0.1, 0.1, 0.92)) == FAILS
    assert verdict(check, a=at(0.9, 0.9, 0.9), b=LOST) == FAILS
    assert verdict(check, a=LOST, b=LOST) == UNTOLD


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


def test_it_stays_where_one_setting_serves_all_within_the_noise():
    """Best at 2^-3 and at 2^-4, but nobody could tell which."""
    values = {(64, 0.0625): 0.9, (64, 0.125): 0.901, (256, 0.0625): 0.921, (256, 0.125): 0.92}
    values |= {(width, rate): 0.5 for width in (64, 256) for rate in (0.015625, 0.03125, 0.25, 0.5)}
    finding = found(stays("a"), a=study(values))
    assert finding.verdict == HOLDS
    assert "is as good at every width" in finding.measured
    one = study(values, noise=(0.0,))
    assert verdict(stays("a"), a=one) == UNTOLD  # with one seed there is no noise to go by


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


def coordinate(slopes, widths=(64, 128, 256, 512), broken=None):
    """Features of each layer go with this power of the width."""
    rows = [
        Measurement(width, seed, 2, "features", layer, width**slope * (1 + 0.01 * seed))
        for width in widths
        for seed in range(2)
        for layer, slope in slopes.items()
    ]
    about = {"method": "kfac", "scheme": "mup", "damping": "", "roles": {}, "predicted": {}, "broken": broken or {}}
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


def test_departs():
    check = depends_on_width("a")
    assert verdict(check, a=coordinate({"fc1": 0.0, "fc2": 0.5})) == HOLDS
    assert verdict(check, a=coordinate({"fc1": 0.0, "fc2": -0.5})) == HOLDS
    assert verdict(check, a=coordinate({"fc1": 0.0}, broken={"width 64, seed 0": "overflow"})) == HOLDS
    assert verdict(check, a=coordinate({"fc1": 0.1, "fc2": -0.1})) == FAILS
    assert verdict(check, a=NONE) == UNTOLD
    assert verdict(check, a=ONE_WIDTH) == UNTOLD


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


def test_mup_wins_at_the_widest():
    check = wide.mup_wins("sp", "mup")
    sp = at(0.8, 0.8, 0.8, scheme=SP)
    won = found(check, sp=sp, mup=at(0.7, 0.9, 0.9))
    assert won.verdict == HOLDS
    assert "-10.00 at 64, +10.00 at 128, +10.00 at 256; better at 2 of 3 widths" in won.measured
    assert verdict(check, sp=sp, mup=at(0.9, 0.9, 0.7)) == FAILS
    assert verdict(check, sp=sp, mup=at(0.9, 0.9, 0.8)) == UNTOLD
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


def test_damping_is_best_where_it_is_scaled_by_minus_one_and_one():
    chosen = (0.0, 1.0, 2.0)

    def evidence(cells, narrow=0.9):
        parts = {"narrow": at(narrow, widths=(64,), scheme="mup/fixed:1,0.25")}
        for x in chosen:
            for y in chosen:
                value = cells.get((x, y), 0.5)
                parts[damped.part_name(x, y)] = at(value, widths=(256,), scheme=f"mup/fixed:1,0.25,1,{x:g},{y:g}")
        return Evidence(parts)

    check = damped.highest_at_one(chosen)
    held = check(evidence({(1, 1): 0.9, (2, 2): None}))
    assert held.verdict == HOLDS
    assert held.measured == "90.00% at (-1, 1); highest 90.00% at (-1, 1); 1 of 9 diverge"
    assert check(evidence({(1, 1): 0.9, (2, 1): 0.95})).verdict == FAILS
    assert check(evidence({(1, 1): 0.9, (2, 1): 0.901})).verdict == HOLDS  # within noise
    assert check(evidence({(1, 1): 0.6, (0, 0): 0.9, (2, 1): 0.9, (2, 2): 0.9})).verdict == FAILS
    assert check(evidence({(1, 1): None})).verdict == FAILS
    assert check(evidence({(1, 1): 0.9}, narrow=None)).verdict == UNTOLD


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
