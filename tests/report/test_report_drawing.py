"""The figures of a study show its numbers: inspected as matplotlib has them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mukron.figures import shade
from mukron.report import draw_curves, draw_drift, draw_search, draw_transfer
from mukron.study.certificate import Certificate
from mukron.study.errors import StudyError
from mukron.study.numbers import profile, scheme_labels, settings
from mukron.study.points import Point, Result
from mukron.study.record import StudyRecord
from mukron.train import RunConfig
from mukron.train.records import DIVERGED

SP, MUP = "sp/heuristic:0.001", "mup/rescaled:1"


def lines(panel, marker="o"):
    return [each for each in panel.get_lines() if each.get_marker() == marker]


def of_scheme(record, *schemes):
    results = [each for each in record.results if each.point.scheme in schemes]
    judged = tuple(each for each in record.certificate.judgements if each.scheme in schemes)
    return dataclasses.replace(record, results=results, certificate=Certificate(record.metric, judged))


def made(results, metric="test_loss", over=("lr",)):
    return StudyRecord("made", RunConfig(epochs=1), over, metric, results)


def run(scheme="mup", width=64, lr=0.1, damping=None, seed=0, value=1.0, status="finished"):
    rows = [] if value is None else [{"epoch": 1, "test_loss": value, "test_accuracy": value}]
    return Result(Point(scheme, width, lr, damping, seed), status, rows)


# Against the setting.


def test_a_panel_a_scheme_and_a_line_a_width(study):
    left, right = draw_transfer(study).axes
    assert [left.get_title("left"), right.get_title("left")] == ["SP, heuristic", "muP, rescaled"]
    assert left.get_ylim() == right.get_ylim()
    for panel, scheme in ((left, SP), (right, MUP)):
        drawn = lines(panel)
        assert [each.get_color() for each in drawn] == [shade(number, 5) for number in range(5)]
        for each, width in zip(drawn, study.widths, strict=True):
            expected = profile(study, "lr", scheme, width)
            assert list(each.get_xdata()) == [setting.lr for setting in expected]
            for value, setting in zip(each.get_ydata(), expected, strict=True):
                assert value == setting.mean or (math.isnan(value) and setting.diverged)
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


def test_the_band_reaches_from_the_lowest_to_the_highest_seed(study):
    panel = draw_transfer(study).axes[1]
    band = panel.collections[0].get_paths()[0].vertices
    values = [value for setting in profile(study, "lr", MUP, 64) for value in setting.values]
    assert (band[:, 1].min(), band[:, 1].max()) == (min(values), max(values))


def test_a_star_at_each_parabolas_optimum_hollow_where_it_is_open(study):
    for panel, judged in zip(draw_transfer(study).axes, study.certificate.judgements, strict=True):
        stars = lines(panel, "*")
        assert [star.get_xdata()[0] for star in stars] == [2**each.best.value for each in judged.optima]
        assert [star.get_ydata()[0] for star in stars] == [each.value for each in judged.optima]
        hollow = [star.get_color() == "white" for star in stars]
        assert hollow == [math.isinf(each.best.low) for each in judged.optima]


def test_what_diverged_is_a_cross_at_the_edge_and_a_gap_in_the_line(study):
    left, right = draw_transfer(study).axes
    crosses = {(each.get_color(), each.get_xdata()[0]) for each in lines(left, "x")}
    lost = {(each.width, each.lr) for each in settings(study, SP) if each.diverged}
    assert crosses == {(shade(study.widths.index(width), 5), lr) for width, lr in lost}
    assert len(lost) > 5
    assert all(0.75 < each.get_ydata()[0] < 1 for each in lines(left, "x"))  # of the axis
    assert not lines(right, "x")
    top = max(each.mean for each in settings(study) if each.whole)
    in_axes = left.transAxes.inverted().transform(left.transData.transform((1.0, top)))[1]
    assert in_axes < min(each.get_ydata()[0] for each in lines(left, "x"))  # no line crosses the crosses


def test_the_legend_covers_no_data(study):
    figure = draw_transfer(study)
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *(f"width {width}" for width in (64, 128, 256, 512, 1024)),
        *("best", "diverged"),
    ]
    assert not any(legend.overlaps(panel.get_window_extent()) for panel in figure.axes)


def test_accuracies_are_linear_and_diverged_runs_at_the_bottom():
    results = [run(lr=lr, value=value) for lr, value in ((0.1, 0.8), (0.2, 0.9))]
    results += [run(lr=0.4, value=None, status=DIVERGED)]
    panel = draw_transfer(made(results, "test_accuracy")).axes[0]
    assert panel.get_yscale() == "linear"
    assert lines(panel, "*")[0].get_xdata()[0] == 0.2
    assert lines(panel, "x")[0].get_ydata()[0] < 0.2


def test_a_seed_that_diverged_takes_its_setting_out(study):
    results = [run(lr=0.1, value=1.0), run(lr=0.2, value=0.1), run(lr=0.2, seed=1, value=None, status=DIVERGED)]
    panel = draw_transfer(made(results)).axes[0]
    assert lines(panel, "*")[0].get_xdata()[0] == 0.1
    assert lines(panel, "x")[0].get_xdata()[0] == 0.2


def test_where_both_are_tuned_a_line_is_the_best_over_the_other():
    losses = {(0.1, 1.0): 3.0, (0.1, 2.0): 2.0, (0.2, 1.0): 1.0, (0.2, 2.0): 4.0}
    results = [run("mup/rescaled:1", 64, *setting, value=value) for setting, value in losses.items()]
    record = made(results, over=("lr", "damping"))
    assert list(lines(draw_transfer(record, "lr").axes[0])[0].get_ydata()) == [2.0, 1.0]
    assert list(lines(draw_transfer(record, "damping").axes[0])[0].get_ydata()) == [1.0, 2.0]
    assert draw_transfer(record, "damping").axes[0].get_xlabel() == "damping"


def test_a_run_that_all_but_diverged_does_not_flatten_the_others():
    results = [run(lr=2.0**power, value=1.0 + power / 100) for power in range(8)] + [run(lr=512.0, value=1e9)]
    assert draw_transfer(made(results)).axes[0].get_ylim()[1] < 100


def test_four_schemes_are_four_panels_told_apart():
    schemes = ("sp/heuristic:0.001", "mup/rescaled:1", "mup/rescaled:0.1", "ntk/rescaled:1")
    record = made([run(scheme, width, damping=1.0) for scheme in schemes for width in (64, 128)])
    titles = [panel.get_title("left") for panel in draw_transfer(record).axes if panel.get_visible()]
    assert titles == ["SP, heuristic", "mup/rescaled:1", "mup/rescaled:0.1", "NTK, rescaled"]
    assert list(scheme_labels(record).values()) == titles


def test_nothing_finished_and_nothing_at_all():
    record = made([run(value=None, status=DIVERGED)])
    assert lines(draw_transfer(record).axes[0], "x")
    assert draw_curves(record).axes[0].get_title("left") == "muP: nothing finished"
    for draw in (draw_transfer, draw_curves, draw_search):
        with pytest.raises(StudyError, match="no run has ended"):
            draw(made([]))
    with pytest.raises(StudyError, match="no damping"):
        draw_transfer(record, "damping")


def test_a_study_that_is_not_done_yet(study):
    """Stopped on its way: widths without runs, settings without all seeds, a scheme without its narrowest width."""
    some = [each for each in study.results if each.point.width < 256 or (each.point.scheme, each.point.lr) == (SP, 0.5)]
    some = [each for each in some if (each.point.scheme, each.point.width) != (MUP, 64)]
    record = dataclasses.replace(study, results=some[:-2])
    assert [len(lines(panel, "*")) for panel in draw_transfer(record).axes] == [2, 1]
    assert draw_curves(record).axes[1].get_title("left") == "muP, rescaled: nothing finished"


# Against the width.


def test_drift_says_its_slope_and_draws_it(study):
    panel = draw_drift(study).axes[0]
    texts = [text.get_text() for text in panel.get_legend().get_texts()]
    assert texts == [
        "SP, heuristic: -0.80 [-0.87, -0.72] per doubling",
        "muP, rescaled: +0.00 [-0.07, +0.08] per doubling",
    ]
    fitted = [each for each in panel.get_lines() if each.get_marker() in ("", "None") and len(each.get_xdata()) == 5]
    for each, slope in zip(fitted, (-0.8, 0.0), strict=True):
        x, y = ([math.log2(value) for value in values] for values in (each.get_xdata(), each.get_ydata()))
        assert (y[-1] - y[0]) / (x[-1] - x[0]) == pytest.approx(slope)
    low, high = panel.get_ylim()
    assert math.log2(high / low) >= 6 - 1e-9  # flat looks flat


def test_drift_bars_end_where_the_data_do(study):
    judged = study.certificate.judgements[0]
    bars = [each.get_segments()[0][:, 1] for each in draw_drift(study).axes[0].collections][: len(judged.optima)]
    assert list(bars[0]) == [2 ** judged.optima[0].best.low, 2 ** judged.optima[0].best.high]
    assert list(bars[-1]) == [2 ** judged.optima[-1].best.value, 2 ** judged.optima[-1].best.high]


def test_drift_without_a_fit_or_a_certificate(study):
    unfitted = tuple(dataclasses.replace(each, drift=None) for each in study.certificate.judgements)
    record = dataclasses.replace(study, certificate=Certificate("test_loss", unfitted))
    legend = draw_drift(record).axes[0].get_legend()
    assert legend.get_texts()[0].get_text() == "SP, heuristic: no drift could be fitted"
    with pytest.raises(StudyError, match="no drift"):
        draw_drift(dataclasses.replace(study, certificate=None))


# Over the epochs.


def test_curves_at_the_narrowest_widths_best_setting(study):
    figure = draw_curves(study)
    top, bottom = figure.axes[:2], figure.axes[2:]
    assert [panel.get_title("left") for panel in top] == [
        "SP, heuristic: learning rate 0.125",
        "muP, rescaled: learning rate 0.125",
    ]
    widest = top[1].get_lines()[-1]
    runs = [each for each in study.results if each.point == Point(MUP, 1024, 0.125, 1.0, each.point.seed)]
    assert len(runs) == 3
    assert widest.get_ydata()[-1] == pytest.approx(sum(each.value("test_loss") for each in runs) / 3)
    assert list(widest.get_xdata()) == list(range(1, 21))
    assert {each.get_xdata()[0] for each in lines(top[0], "x")} == {4}  # the epoch in which they diverged
    for panel, judged in zip(bottom, study.certificate.judgements, strict=True):
        for wider, marker in zip(judged.wider, "os", strict=True):
            there = [mean for _, mean, _ in wider.values if math.isfinite(mean)]
            assert list(lines(panel, marker)[0].get_ydata()) == there
    assert len(lines(bottom[0], "x")) == 4  # widths 512 and 1024, early and late
    assert not lines(bottom[1], "x")


def test_curves_of_one_scheme_and_one_seed(study):
    record = of_scheme(study, MUP)
    record = dataclasses.replace(record, results=[each for each in record.results if each.point.seed == 0])
    assert len(draw_curves(record).axes) == 2


# A search.


def test_a_search_is_dots_coloured_by_damping_and_a_star(make_search):
    record = make_search()
    panel, bar = draw_search(record).axes
    dots = panel.collections[0]
    whole = [each for each in settings(record) if each.whole]
    assert dots.get_offsets().tolist() == [[each.lr, each.mean] for each in whole]
    order = sorted(range(len(whole)), key=lambda number: whole[number].damping)
    greens = [dots.get_facecolors()[number][1] for number in order]
    assert greens == sorted(greens, reverse=True)
    assert greens[0] > greens[-1] + 0.3
    best = record.best()
    star = lines(panel, "*")[0]
    assert star.get_xdata()[0] == best.lr
    assert star.get_ydata()[0] == min(each.mean for each in whole)
    assert bar.get_ylabel() == "damping"
    assert len(lines(panel, "x")) == sum(each.diverged for each in settings(record)) > 0


def test_a_search_without_damping_or_over_damping_alone(make_search):
    assert len(draw_search(make_search(damped=False)).axes) == 1  # no colour bar
    record = made([run(MUP, damping=damping, value=damping) for damping in (1.0, 2.0)], over=("damping",))
    panel = draw_search(record).axes[0]
    assert panel.get_xlabel() == "damping"
    assert lines(panel, "*")[0].get_xdata()[0] == 1.0


def test_transfer_of_a_search_does_not_fail(make_search):
    assert len(lines(draw_transfer(make_search()).axes[0])) == 1
