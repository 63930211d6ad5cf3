"""Fitted exponents: right on a power law, with an interval that holds the truth as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from mukron.exponents import fit_exponent, student_quantile

WIDTHS = [64, 128, 256, 512] * 3


@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.5])
def test_a_power_law_is_recovered_exactly(slope):
    found = fit_exponent(WIDTHS, [3 * width**slope for width in WIDTHS])
    assert found.slope == pytest.approx(slope, abs=1e-12)
    assert found.high - found.low < 1e-10


def test_the_interval_is_that_of_linear_regression():
    values = np.exp(np.random.RandomState(0).randn(len(WIDTHS)))
    found = fit_exponent(WIDTHS, values)
    truth = stats.linregress(np.log(WIDTHS), np.log(values))
    reach = truth.stderr * stats.t.ppf(0.975, len(WIDTHS) - 2)
    assert found.slope == pytest.approx(truth.slope, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((truth.slope - reach, truth.slope + reach), rel=1e-9)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    draws = np.random.RandomState(1)
    held = 0
    for _ in range(1000):
        values = [width**-0.5 * math.exp(0.3 * draws.randn()) for width in WIDTHS]
        found = fit_exponent(WIDTHS, values)
        held += found.low <= -0.5 <= found.high
    assert 930 <= held <= 970


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 31])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.9995])
def test_student_quantiles(freedom, probability):
    assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)


def test_two_points_tell_a_slope_but_no_interval():
    found = fit_exponent([64, 128], [1.0, 2.0])
    assert found.slope == pytest.approx(1.0)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match=r"at least two widths, got \[64\]"):
        fit_exponent([64, 64], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive, finite"):
        fit_exponent([64, 128], [1.0, 0.0])
