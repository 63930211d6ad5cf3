"""Results read as curves: seeds in columns, settings in rows, whatever is missing, pruned or diverged."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mukron.study.curves import Measure, read_curves
from mukron.study.errors import StudyError
from mukron.study.points import PRUNED, Point, Result
from mukron.train.records import DIVERGED, FINISHED

LOSS = Measure("test_loss", lowest=True, log=True)


def result(lr, seed=0, loss=1.0, status=FINISHED, damping=1.0, width=64):
    return Result(Point("mup/rescaled:1", width, lr, damping, seed), status, [{"epoch": 1, "test_loss": loss}])


def grid(lrs=(0.1, 0.2, 0.4, 0.8), seeds=3):
    """Losses that are a product of the setting's and the seed's."""
    return [result(lr, seed, (1 + lr) * (2 + seed)) for lr in lrs for seed in range(seeds)]


def read(results, axis="lr", measure=LOSS):
    (curve,) = read_curves(results, axis, measure).values()
    return curve


def test_rows_are_settings_and_columns_are_seeds():
    curve = read(grid()[::-1])
    np.testing.assert_array_equal(curve.settings, [0.1, 0.2, 0.4, 0.8])
    np.testing.assert_allclose(curve.values, np.outer([1.1, 1.2, 1.4, 1.8], [2, 3, 4]))
    assert (curve.best, curve.missing, curve.left_out) == (0, 0, 0)


def test_a_missing_seed_is_filled_in_as_the_others_tell():
    """Plain means would take the setting without its worst seed for the best."""
    results = [each for each in grid() if (each.point.lr, each.point.seed) != (0.2, 2)]
    curve = read(results)
    assert curve.missing == 1
    assert curve.values[1, 2] == pytest.approx(1.2 * 4)
    assert curve.best == 0


def test_a_seed_that_few_settings_have_is_left_out():
    curve = read([*grid(seeds=2), result(0.2, 7, 1e-6)])
    assert (curve.seeds, curve.left_out, curve.best) == (2, 1, 0)


def test_settings_with_seeds_of_their_own_are_one_seed_each():
    curve = read([result(0.1, 5, 2.0), result(0.2, 6, 1.0), result(0.4, 7, 3.0)])
    np.testing.assert_array_equal(curve.values, [[2.0], [1.0], [3.0]])


@pytest.mark.parametrize("how", ["status", "value"])
def test_a_setting_diverged_if_a_seed_did(how):
    lost = result(0.1, 1, None) if how == "value" else result(0.1, 1, 0.5, DIVERGED)
    curve = read([each for each in grid() if each.point != lost.point] + [lost])
    assert curve.diverged.tolist() == [True, False, False, False]
    assert curve.best == 1


def test_what_was_pruned_is_as_if_it_had_not_been_run():
    curve = read([*grid(), result(0.05, 0, 0.1, PRUNED), result(0.05, 1, 0.1)])
    np.testing.assert_array_equal(curve.settings, [0.1, 0.2, 0.4, 0.8])
    assert read_curves([result(0.1, status=PRUNED)], "lr", LOSS) == {}


def both(lr, damping):
    return 1 + (math.log2(lr) + 3) ** 2 + (math.log2(damping) - 1 - math.log2(lr) - 3) ** 2


def test_the_profile_takes_the_best_of_the_other_axis():
    results = [result(2.0**a, 0, both(2.0**a, 2.0**b), damping=2.0**b) for a in range(-6, 0) for b in range(-3, 5)]
    curve = read(results)
    np.testing.assert_allclose(curve.values[:, 0], 1 + (np.arange(-6, 0) + 3.0) ** 2)
    assert [runs[0].point.damping for runs in curve.runs] == [2.0 ** (4 + a) for a in range(-6, 0)]
    assert read(results, "damping").settings[read(results, "damping").best] == 2.0


def test_a_value_of_the_profile_diverged_only_if_all_of_the_other_axis_did():
    results = [result(lr, 0, 1.0, status, damping) for lr, damping, status in (
        (0.1, 1.0, DIVERGED), (0.1, 2.0, FINISHED), (0.2, 1.0, DIVERGED), (0.2, 2.0, DIVERGED),
    )]  # fmt: skip
    assert read(results).diverged.tolist() == [False, True]


def test_a_search_on_both_axes_is_profiled_by_factors_of_two():
    draws = np.random.default_rng(0)
    points = 2 ** draws.uniform([-6, -3], [0, 5], (200, 2))
    results = [result(lr, 0, both(lr, damping), damping=damping) for lr, damping in points]
    curve = read(results)
    assert len(curve.settings) == 7
    assert abs(curve.x[curve.best] + 3) < 0.75
    assert (np.diff(curve.settings) > 0).all()


def test_losses_are_taken_as_they_are_where_one_has_no_logarithm():
    assert Measure.of(grid(), "test_loss").log
    assert not Measure.of([*grid(), result(0.1, 9, 0.0)], "test_loss").log


def test_the_nearest_setting_is_within_half_a_step():
    curve = read(grid())
    assert curve.nearest(0.1) == 0
    assert curve.nearest(0.29) == 2
    assert curve.nearest(0.8 * 1.3) == 3
    assert curve.nearest(0.8 * 1.6) is None


def test_axes_that_are_not_there_are_told():
    with pytest.raises(StudyError, match="over damping: a run has damping None"):
        read([result(0.1, damping=None)], "damping")
    with pytest.raises(StudyError, match=r"metric 'train_loss': no run has it; expected one of test_loss"):
        Measure.of(grid(), "train_loss")
