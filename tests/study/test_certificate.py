"""The verdict on made-up studies whose answer is known, and the certificate as table, JSON and exit code."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest

from mukron.study import Certificate, Point, Result, StudyError, certify, judgement
from mukron.study.certificate import CANNOT_TELL, MOVES, TRANSFERS, Interval, Judgement
from mukron.study.judgement import Wider
from mukron.study.points import PRUNED
from mukron.train.records import DIVERGED, FINISHED

SP, MUP = "sp/heuristic:0.001", "mup/rescaled:1"
WIDTHS = (64, 128, 256, 512, 1024)
RATES = tuple(2.0**power for power in range(-10, 1))


def train(point, drift=0.0, best=-4.3, gain=0.1, noise=0.02, breaks=3.0, epochs=8):
    """A loss with its minimum at a learning rate that moves by ``drift``; wider is better by ``gain`` per doubling."""
    wide = math.log2(point.width / 64)
    off = math.log2(point.lr) - best - drift * wide
    if off > breaks:
        return Result(point, DIVERGED, [], "the loss is not finite")
    draws = np.random.default_rng([point.seed, int(point.width), int(1e6 * point.lr)])
    loss = math.exp(0.2 * off**2 - gain * wide + noise * draws.standard_normal())
    rows = [
        {"epoch": epoch, "step": epoch, "test_loss": loss * (1 + 2 / epoch), "test_accuracy": math.exp(-loss / 5)}
        for epoch in range(1, epochs + 1)
    ]
    return Result(point, FINISHED, rows)


def study(scheme=MUP, widths=WIDTHS, rates=RATES, seeds=3, **how):
    points = [Point(scheme, width, lr, 1.0, seed) for width in widths for lr in rates for seed in range(seeds)]
    return [train(point, **how) for point in points]


def judged(results, **how) -> Judgement:
    (judgement,) = certify(results, metric="test_loss", **how).judgements
    return judgement


# Verdicts.


def test_what_stays_transfers():
    found = judged(study())
    assert found.verdict == TRANSFERS
    assert found.drift.low < 0 < found.drift.high
    assert [each.best.value for each in found.optima] == pytest.approx([-4.3] * 5, abs=0.15)
    assert [each.measured for each in found.optima] == [2.0**-4] * 5
    assert re.match(
        r"the best learning rate moves by .0\.\d\d \[-0\.\d\d, \+0\.\d\d\] in log2 per doubling of the width: "
        r"over 64 to 1024 it stays within a factor of 1\.\d$",
        found.reasons[0],
    )
    assert found.reasons[1:] == (
        "at width 1024, width 64's best learning rate 2^-4 is the best too",
        "wider is better early and late",
    )


@pytest.mark.parametrize("metric", ["test_loss", "test_accuracy"])
@pytest.mark.parametrize("drift", [-0.5, 0.3])
def test_what_moves_does_not_transfer(drift, metric):
    (found,) = certify(study(drift=drift), metric=metric).judgements
    assert found.verdict == MOVES
    assert found.drift.low <= drift <= found.drift.high
    assert "up" in found.reasons[0] or "down" in found.reasons[0]


def test_a_large_regret_alone_is_enough():
    """The optimum jumps between the last two widths: no line tells, but the loss does."""
    results = [each for each in study() if each.point.width < 1024] + study(widths=[1024], best=-7.3)
    found = judged(results)
    assert found.regret[-1].large
    assert found.regret[-1].units > 3
    assert found.verdict == MOVES


def test_a_regret_that_nobody_would_mind_is_not_large():
    results = study(noise=1e-6, best=-4.45, widths=[64]) + study(noise=1e-6, best=-4.55, widths=[128, 256, 512, 1024])
    found = judged(results)
    assert found.regret[-1].units > 1000
    assert found.regret[-1].loss / found.optima[-1].value < 0.05
    assert not found.regret[-1].large
    assert found.verdict == TRANSFERS


def test_two_seeds_that_agree_by_chance_are_no_evidence():
    draws = np.random.default_rng(0)

    def noisy(point):
        loss = math.exp(0.05 * (math.log2(point.lr) + 4.5) ** 2 + 0.2 * draws.standard_normal())
        return Result(point, FINISHED, [{"epoch": 1, "test_loss": loss}])

    points = [each.point for each in study(widths=[64, 128], seeds=2)]
    found = [judged(list(map(noisy, points))).regret[0] for _ in range(60)]
    assert sum(each.units > 3 for each in found) > 10
    assert sum(each.large for each in found) <= 3


def test_a_divergence_at_the_narrow_best_does_not_transfer():
    found = judged(study(widths=[64, 128]) + study(widths=[256], best=-4.6, breaks=0.55))
    assert math.isinf(found.regret[-1].loss)
    assert found.verdict == MOVES
    assert "at width 256, width 64's best learning rate 2^-4 diverges" in found.reasons


def test_too_little_is_known_from_a_coarse_grid():
    found = judged(study(rates=RATES[::4], seeds=2, noise=0.3))
    assert found.verdict == CANNOT_TELL
    assert "up to 0.25 would count as staying" in found.reasons[0]


def test_optima_at_the_edge_cannot_be_judged():
    found = judged(study(best=-13.0, breaks=99.0))
    assert found.verdict == CANNOT_TELL
    assert (found.drift.low, found.drift.high) == (-math.inf, math.inf)
    assert found.reasons[-1].startswith("at all widths: at the lowest learning rate that was run")


def test_an_edge_still_shows_a_drift_of_at_least_so_much():
    found = judged(study(best=-5.0, drift=-1.5))
    assert found.drift.low == -math.inf
    assert found.drift.high < -0.5
    assert found.verdict == MOVES
    assert "bound it on one side only" in found.reasons[0]


def test_one_seed_is_judged_by_the_line():
    found = judged(study(seeds=1, noise=0.005))
    assert found.verdict == TRANSFERS
    assert {each.noise for each in found.optima} == {None}
    assert found.regret[-1].units is None
    assert "at all widths: one seed: known to a step of the grid" in found.reasons
    assert judged(study(seeds=1, widths=[64, 128])).verdict == CANNOT_TELL
    assert judged(study(seeds=1, noise=0.005, drift=-0.5)).verdict == MOVES


def test_one_width_cannot_be_judged():
    found = judged(study(widths=[64]))
    assert (found.verdict, found.drift, found.regret, found.wider) == (CANNOT_TELL, None, (), ())
    assert "a drift takes two widths" in found.reasons[0]


def test_a_flat_curve_cannot_be_judged():
    def flat(point):
        draws = np.random.default_rng([point.seed, int(point.width), int(1e6 * point.lr)])
        return Result(point, FINISHED, [{"epoch": 1, "test_loss": math.exp(0.1 * draws.standard_normal())}])

    found = judged([flat(each.point) for each in study()])
    assert found.verdict == CANNOT_TELL
    assert any("flat: no learning rate is worse" in reason for reason in found.reasons)


@pytest.mark.parametrize(("lost", "verdict"), [(1024, MOVES), (64, CANNOT_TELL)])
def test_a_width_whose_every_run_diverged(lost, verdict):
    others = tuple(width for width in WIDTHS if width != lost)
    found = judged(study(widths=others) + study(widths=[lost], breaks=-9.0))
    assert [each.width for each in found.optima] == list(others)
    assert found.verdict == verdict
    assert any(
        re.match(rf"at width {lost} every run diverged.*: add lower learning rates", each) for each in found.reasons
    )


def test_all_runs_diverged():
    certificate = certify(study(breaks=-99.0), metric="test_loss")
    (found,) = certificate.judgements
    assert (found.verdict, found.optima, found.drift) == (CANNOT_TELL, (), None)
    assert certificate.exit_code == 4
    assert "every run diverged" in str(certificate.table())


def test_runs_may_be_missing_pruned_or_scattered():
    results = study()
    del results[5::17]
    found = judged(results)
    assert found.verdict == TRANSFERS
    assert any("missing, filled in from the others" in reason for reason in found.reasons)
    pruned = Result(Point(MUP, 64, 2.0**-9, 1.0, 7), PRUNED, [{"epoch": 1, "test_loss": 1e-9}])
    assert judged([*study(), pruned]) == judged(study())
    draws = np.random.default_rng(0)
    rates = {width: 2 ** draws.uniform(-9, 0, 40) for width in WIDTHS}
    found = judged([each for width in WIDTHS for each in study(widths=[width], rates=rates[width], seeds=1)])
    assert found.drift.low < 0 < found.drift.high
    assert found.regret[-1].used is not None
    assert any("(the nearest that was run is " in reason for reason in found.reasons)


def test_both_axes_are_judged_by_their_profiles():
    draws = np.random.default_rng(0)

    def both(point):
        wide, lr, damping = (math.log2(each) for each in (point.width / 64, point.lr, point.damping))
        cost = 0.2 * (lr + 4.3) ** 2 + 0.2 * (damping + 1.2 - 0.8 * wide) ** 2 + 0.01 * draws.standard_normal()
        return Result(point, FINISHED, [{"epoch": 1, "test_loss": math.exp(cost)}])

    points = [
        Point(MUP, width, 2.0**a, 2.0**b, seed)
        for width in (64, 128, 256, 512)
        for a in range(-7, -1)
        for b in range(-5, 5)
        for seed in range(2)
    ]
    results = list(map(both, points))
    certificate = certify(results, ("lr", "damping"), "test_loss")
    lr, damping = certificate.judgements
    assert (lr.axis, lr.verdict, damping.axis, damping.verdict) == ("lr", TRANSFERS, "damping", MOVES)
    assert damping.drift.low < 0.8 < damping.drift.high
    assert not lr.wider[1].better  # at the damping of the narrowest width
    assert [row[0] for row in certificate.table().rows] == ["muP, rescaled: learning rate", "muP, rescaled: damping"]


# What carrying a setting costs, and whether wider is better.


def test_regret_is_in_units_of_seed_noise():
    found = judged(study(drift=-0.5, breaks=9.0))
    last, own = found.regret[-1], found.optima[-1]
    assert (last.setting, last.own) == (2.0**-4, own.measured)
    values = [
        each.value("test_loss")
        for each in study(drift=-0.5, breaks=9.0)
        if (each.point.width, each.point.lr) == (1024, 2.0**-4)
    ]
    assert last.loss == pytest.approx(np.mean(values) - own.value)
    assert last.units == pytest.approx(last.loss / own.noise)
    assert [each.width for each in found.regret] == [128, 256, 512, 1024]


def test_regret_of_an_accuracy_is_positive_where_it_is_worse():
    (found,) = certify(study(drift=-0.5, breaks=9.0), metric="test_accuracy").judgements
    assert found.regret[-1].loss > 0


def test_wider_is_better_or_not_early_and_late():
    early, late = judged(study()).wider
    assert (early.when, early.epoch, early.better) == ("early", 2, True)
    assert (late.when, late.epoch, late.better) == ("late", 8, True)
    assert [width for width, _, _ in late.values] == list(WIDTHS)
    (found,) = certify(study(gain=-0.1), metric="test_loss").judgements
    assert found.verdict == TRANSFERS
    assert found.wider[1].worse_at == (128, 256, 512, 1024)
    assert found.reasons[-1].startswith("wider is not better early (worse at widths 128")


@pytest.mark.parametrize(
    ("early", "late", "words"),
    [
        ("yes", "yes", "wider is better early and late"),
        ("unclear", "unclear", "no difference beyond noise, early or late"),
        ("unclear", "yes", "wider is better late; early there is no difference beyond noise"),
        ("no", "yes", "wider is not better early (worse at width 128), but late it is"),
        ("no", "unclear", "wider is not better early (worse at width 128); late there is no difference beyond noise"),
        ("no", "no", "wider is not better early (worse at width 128) nor late (worse at width 128)"),
    ],
)
def test_what_is_said_of_wider_networks(early, late, words):
    answers = {"early": early, "late": late}
    wider = [Wider(at, 1, (), said == "yes", (128,) if said == "no" else ()) for at, said in answers.items()]
    assert judgement._wider_in_words(wider) == words


def test_a_width_that_is_worse_by_less_than_noise_is_not_worse():
    results = study(gain=0.0, noise=0.05, seeds=5)
    means = [mean for _, mean, _ in judged(results).wider[1].values]
    assert means != sorted(means, reverse=True)
    late = judged(results).wider[1]
    assert (late.worse_at, late.better, late.answer) == ((), False, "unclear")  # nor is it better
    assert judged(study(gain=0.0, noise=0.05, seeds=1)).wider[1].answer == "no"  # one seed: a plain comparison


def test_a_slow_rise_adds_up():
    """Each width is within noise of the one before, but not of the best before it."""
    late = judged(study(gain=-0.03, noise=0.02, seeds=5)).wider[1]
    assert late.answer == "no"
    assert late.worse_at[-1] == WIDTHS[-1]


def test_a_width_that_diverges_is_worse():
    found = judged(study(widths=[64, 128]) + study(widths=[256], best=-4.6, breaks=0.55))
    assert found.wider[1].values[-1] == (256, math.inf, None)
    assert found.wider[1].worse_at == (256,)


def test_only_epochs_that_all_runs_have_are_compared():
    found = judged(study(widths=[64]) + study(widths=[128], epochs=5))
    assert [each.epoch for each in found.wider] == [2, 5]


# The certificate.


def test_sp_is_there_to_compare_with():
    moves, stays = study(SP, drift=-0.8), study(MUP)
    assert certify([*moves, *stays], metric="test_loss").exit_code == 0
    assert certify(moves, metric="test_loss").exit_code == 1
    assert certify([*study(SP), *study(MUP, drift=-0.8)], metric="test_loss").exit_code == 1
    assert certify([*moves, *study(MUP, best=-13)], metric="test_loss").exit_code == 4


def test_the_table_fits_and_says_why():
    table = certify([*study(SP, drift=-0.8), *study(MUP)], metric="test_loss").table()
    assert table.width <= 120
    assert table.columns[1:3] == ("best at 64", "at 1024")
    (sp, mup) = table.rows
    assert (sp[0], sp[1], sp[-1]) == ("SP, heuristic", "2^-4", MOVES)
    assert (mup[0], mup[1], mup[2], mup[-2], mup[-1]) == ("muP, rescaled", "2^-4", "2^-4", "yes / yes", TRANSFERS)
    assert table.notes[-1].startswith("muP, rescaled: transfers. The best learning rate moves by ")
    edge = certify(study(best=-13), metric="test_loss").table()
    assert edge.rows[0][1] == "<= 2^-10"


def test_schemes_with_one_label_are_told_apart():
    table = certify([*study("mup/rescaled:1"), *study("mup/rescaled:2")], metric="test_loss").table()
    assert [row[0] for row in table.rows] == ["mup/rescaled:1", "mup/rescaled:2"]
    assert certify(study(rates=[0.3, 0.6, 1.2]), metric="test_loss").table().rows[0][1] == "<= 0.3"


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(study(), id="transfers"),
        pytest.param(study(best=-13.0), id="open"),
        pytest.param(study(widths=[64, 128]) + study(widths=[256], best=-4.6, breaks=0.55), id="diverges"),
        pytest.param(study(seeds=1, widths=[64]), id="one seed"),
    ],
)
def test_json_and_back(results):
    certificate = certify(results, metric="test_loss")
    text = json.dumps(certificate.to_dict(), allow_nan=False)
    assert Certificate.from_dict(json.loads(text)) == certificate


def test_the_same_results_give_the_same_certificate():
    results = study(noise=0.1)
    assert certify(results, metric="test_loss") == certify(results[::-1], metric="test_loss")


def test_intervals_read_well():
    assert str(Interval(-0.021, -math.inf, 0.05)) == "-0.02 [-inf, +0.05]"


def test_what_cannot_be_certified_is_told():
    with pytest.raises(StudyError, match="'train_loss': no run has it; expected one of test_accuracy, test_loss"):
        certify(study())
    with pytest.raises(StudyError, match="over=width: expected lr, damping or both"):
        certify(study(), ("width",), "test_loss")
    with pytest.raises(StudyError, match="no run has ended"):
        certify([], metric="test_loss")
