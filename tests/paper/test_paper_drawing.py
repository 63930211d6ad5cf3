"""The figures of recipes show the evidence's numbers, inspected as matplotlib has them; poor evidence is drawn too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from mukron.diagnose.check import Check
from mukron.diagnose.configured import check_run
from mukron.diagnose.record import Measurement, Record
from mukron.figures import COLOURS, save, shade
from mukron.paper import drawing
from mukron.paper.drawing import ComparedPanel, ExponentPanel, Panel, WidthLine, WidthPanel
from mukron.paper.errors import ReproductionError
from mukron.paper.evidence import Evidence
from mukron.study.points import Point, Result
from mukron.study.record import StudyRecord
from mukron.table import Table
from mukron.train import RunConfig
from mukron.train.records import DIVERGED, FINISHED

SP, MUP = "sp/heuristic:0.001", "mup/rescaled:1"
WIDTHS, RATES, SEEDS, EPOCHS = (64, 128, 256), (0.125, 0.25, 0.5), (0, 1), 4


def value_of(scheme, width, lr, seed):
    """Made-up accuracies: under SP the best learning rate falls with the width."""
    best = 0.5 * 64 / width if scheme == SP else 0.25
    return 0.9 - 0.1 * abs(math.log2(lr / best)) + 0.01 * seed


def run(scheme=MUP, width=64, lr=0.25, seed=0, accuracy=0.9, status=FINISHED):
    rows = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "test_accuracy": accuracy * epoch / EPOCHS,
            "train_accuracy": accuracy * epoch / EPOCHS + 0.05,
            "test_loss": EPOCHS / epoch,
            "distance/fc1.weight": epoch / width,
            "distance/fc2.weight": 3 * epoch / width,
        }
        for epoch in range(1, EPOCHS + 1)
    ]
    return Result(Point(scheme, width, lr, 0.001 if scheme == SP else 1.0, seed), status, rows)


def study(schemes=(SP, MUP), widths=WIDTHS, rates=RATES, seeds=SEEDS, lost=(), metric="test_accuracy", less=0.0):
    """lost: (scheme, width, lr) whose last seed diverges."""
    results = []
    for scheme in schemes:
        for width in widths:
            for lr in rates:
                for seed in seeds:
                    gone = (scheme, width, lr) in lost and seed == seeds[-1]
                    value = value_of(scheme, width, lr, seed) - less
                    results.append(run(scheme, width, lr, seed, value, DIVERGED if gone else FINISHED))
    return StudyRecord("made", RunConfig(epochs=EPOCHS), ("lr",), metric, tuple(results))


def everything(widths=WIDTHS):
    return [(scheme, width, lr) for scheme in (SP, MUP) for width in widths for lr in RATES]


POOR = {
    "nothing ended": StudyRecord("made", RunConfig(epochs=EPOCHS), ("lr",), "test_accuracy", ()),
    "all diverged": study(lost=everything()),
    "one run": study((MUP,), (64,), (0.25,), (0,)),
    "one that diverged": study((MUP,), (64,), (0.25,), (0,), [(MUP, 64, 0.25)]),
    "no epochs": StudyRecord("made", RunConfig(), ("lr",), "test_accuracy", (Result(run().point, DIVERGED),)),
    "widths lost": study(lost=everything((128, 256))),
}


@pytest.fixture(scope="module")
def evidence():
    return Evidence({"mlp": study(lost=[(SP, 256, 0.5)]), "cnn": study(widths=(1, 2, 4, 8)), **POOR})


def lines(panel, marker="o", dashes="-"):
    found = [each for each in panel.get_lines() if each.get_marker() == marker]
    return [each for each in found if marker in "*x" or each.get_linestyle() == dashes]


def shown(figure):
    return [panel for panel in figure.axes if panel.get_visible()]


def legend(holder):
    return [each.get_text() for each in holder.get_texts()]


# Against the setting.


def test_transfer_draws_the_mean_of_every_setting_a_line_a_width(evidence):
    figure = drawing.transfer([[Panel("SP", "mlp", "sp"), Panel("muP", "mlp", MUP)]])(evidence)
    for panel, scheme, title in zip(shown(figure), (SP, MUP), ("SP", "muP"), strict=True):
        assert panel.get_title("left") == title
        drawn = lines(panel)
        assert [each.get_color() for each in drawn] == [shade(number, 3) for number in range(3)]
        for each, width in zip(drawn, WIDTHS, strict=True):
            assert tuple(each.get_xdata()) == RATES
            for lr, mean in zip(RATES, each.get_ydata(), strict=True):
                if (scheme, width, lr) == (SP, 256, 0.5):
                    assert math.isnan(mean)
                else:
                    assert mean == pytest.approx(value_of(scheme, width, lr, 0.5))
        band = panel.collections[0].get_paths()[0].vertices[:, 1]
        seeds = [value_of(scheme, 64, lr, seed) for lr in RATES for seed in SEEDS]
        assert (band.min(), band.max()) == pytest.approx((min(seeds), max(seeds)))
    left, right = shown(figure)
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xscale() == "log"
    assert left.yaxis.get_major_formatter()(0.85) == "85.0%"


def test_transfer_marks_each_best_and_what_diverged(evidence):
    figure = drawing.transfer([[Panel("SP", "mlp", "sp"), Panel("muP", "mlp", "mup")]])(evidence)
    left, right = shown(figure)
    assert [star.get_xdata()[0] for star in lines(left, "*")] == [0.5, 0.25, 0.125]
    assert [star.get_xdata()[0] for star in lines(right, "*")] == [0.25, 0.25, 0.25]
    (cross,) = lines(left, "x")
    assert (cross.get_xdata()[0], cross.get_color()) == (0.5, shade(2, 3))
    assert cross.get_ydata()[0] < 0.2  # of the panel's height: where bad accuracies are
    assert not lines(right, "x")
    assert legend(figure.legends[0]) == ["width 64", "width 128", "width 256", "best", "diverged"]


def test_losses_are_bad_above(evidence):
    loss = Evidence({"mlp": study(metric="test_loss", lost=[(SP, 256, 0.5)])})
    (panel,) = shown(drawing.transfer([[Panel("SP", "mlp")]])(loss))
    assert lines(panel, "x")[0].get_ydata()[0] > 0.8
    assert panel.get_ylabel() == "test loss"


def test_rows_of_other_widths_have_a_legend_each(evidence):
    rows = [[Panel("SP", "mlp", "sp"), Panel("muP", "mlp", "mup")], [Panel("CNN", "cnn", "mup")]]
    figure = drawing.transfer(rows)(evidence)
    first, second, third = shown(figure)
    assert first.get_legend() is None
    assert legend(second.get_legend()) == ["64", "128", "256"]
    assert legend(third.get_legend()) == ["1", "2", "4", "8"]
    assert [each.get_color() for each in lines(third)] == [shade(number, 4) for number in range(4)]
    assert legend(figure.legends[0]) == ["best", "diverged"]
    assert len(figure.axes) == 4  # of which one is not shown


def test_transfer_against_the_damping_takes_the_best_learning_rate():
    results = []
    for damping in (0.5, 1.0, 2.0):
        for lr in (0.1, 0.2):
            point = Point(MUP, 64, lr, damping, 0)
            results.append(Result(point, FINISHED, [{"epoch": 1, "test_accuracy": lr + damping / 10}]))
    record = StudyRecord("made", RunConfig(), ("lr", "damping"), "test_accuracy", results)
    (panel,) = shown(drawing.transfer([[Panel("muP", "a")]], axis="damping")(Evidence({"a": record})))
    (drawn,) = lines(panel)
    assert list(drawn.get_xdata()) == [0.5, 1.0, 2.0]
    assert list(drawn.get_ydata()) == pytest.approx([0.25, 0.3, 0.4])
    assert panel.get_xlabel() == "damping"


def test_two_metrics_share_no_axis(evidence):
    two = Evidence({"a": evidence["mlp"], "b": study(metric="test_loss")})
    with pytest.raises(ReproductionError, match="test accuracy, test loss; put them in two rows"):
        drawing.transfer([[Panel("a", "a"), Panel("b", "b")]])(two)
    drawing.transfer([[Panel("a", "a")], [Panel("b", "b")]])(two)


# Against the exponent of the output layer, the epoch, the width.


def test_over_exponent_shows_each_studys_best_and_the_second_metric_dashed(evidence):
    evidence = Evidence({"half": study((MUP,), less=0.1), "one": study((MUP,)), "none": POOR["all diverged"]})
    panels = [ExponentPanel("K-FAC", {0.5: "half", 1.0: "one", math.inf: "none"}), ExponentPanel("SGD", {1.0: "one"})]
    figure = drawing.over_exponent(panels, second="train_accuracy")(evidence)
    left, right = shown(figure)
    assert [each.get_text() for each in left.get_xticklabels()] == ["0.5", "1", "∞"]
    for each in lines(left):
        assert list(each.get_ydata()[:2]) == pytest.approx([0.805, 0.905])
        assert math.isnan(each.get_ydata()[2])
    for each in lines(left, dashes="--"):
        assert list(each.get_ydata()[:2]) == pytest.approx([0.855, 0.955])
    assert [cross.get_xdata()[0] for cross in lines(left, "x")] == [2, 2, 2]
    assert left.get_ylim() == right.get_ylim()
    assert legend(figure.legends[0])[3:] == ["test accuracy", "train accuracy", "diverged"]
    apart = shown(drawing.over_exponent(panels, share=False)(evidence))
    assert apart[0].get_ylim() != apart[1].get_ylim()
    assert not lines(apart[0], dashes="--")


def test_a_level_is_drawn_across_all_panels_and_named(evidence):
    evidence = Evidence({"one": study((MUP,)), "kernel": study((MUP,), widths=(64,), rates=(0.25,), less=0.8)})
    for draw in (
        drawing.over_exponent([ExponentPanel("a", {1.0: "one"}), ExponentPanel("b", {1.0: "one"})], level="kernel"),
        drawing.compared_over_epochs([ComparedPanel("a", {"1": "one"}), ComparedPanel("b", {"1": "one"})], "kernel"),
    ):
        figure = draw(evidence)
        for panel in shown(figure):
            (level,) = lines(panel, "None", "-.")
            assert list(level.get_ydata()) == pytest.approx([0.105, 0.105])
            assert panel.get_ylim()[0] < 0.105
        assert legend(figure.legends[0])[-1] == "kernel"


def test_parts_are_compared_in_one_panel(evidence):
    evidence = Evidence({"one": study((MUP,)), "two": study((MUP,), less=0.1), "none": POOR["all diverged"]})
    figure = drawing.compared_over_epochs([ComparedPanel("K-FAC", {"1": "one", "2": "two", "3": "none"})])(evidence)
    (panel,) = shown(figure)
    drawn = [each for each in panel.get_lines() if len(each.get_ydata()) == EPOCHS]
    assert [each.get_ydata()[-1] for each in drawn] == pytest.approx([0.905, 0.805])
    assert len({each.get_color() for each in drawn}) == 2
    assert legend(figure.legends[0]) == ["1", "2", "3"]


def test_points_beyond_the_axis_of_a_transfer_figure_are_marked():
    far = replace(study((MUP,)), results=[*study((MUP,)).results, run(lr=1.0, accuracy=-9.0), run(lr=1.0, seed=1)])
    far = replace(far, results=[*far.results[:-1], run(lr=1.0, accuracy=-9.0, seed=1)])
    (panel,) = shown(drawing.transfer([[Panel("a", "far")]])(Evidence(far=far)))
    (arrow,) = lines(panel, "v")
    assert arrow.get_xdata()[0] == 1.0
    (panel,) = shown(drawing.over_epochs([[Panel("a", "far")]])(Evidence(far=far)))
    assert not lines(panel, "v")


def test_accuracies_and_correlations_of_words_are_on_a_plain_axis():
    record = study((MUP,), widths=(64,))
    rows = [{"epoch": epoch, "test_accuracy": 0.5, "words/similarity": 0.1 * epoch} for epoch in (1, 2, 3)]
    words = replace(record, results=[replace(each, rows=rows) for each in record.results])
    (panel,) = shown(drawing.over_epochs([[Panel("a", "words", quantity="words/similarity")]])(Evidence(words=words)))
    assert panel.get_yscale() == "linear"


def test_over_epochs_follows_each_widths_best_setting(evidence):
    figure = drawing.over_epochs([[Panel("SP", "mlp", "sp"), Panel("muP", "mlp", "mup")]])(evidence)
    for panel in shown(figure):
        for each in panel.get_lines():
            assert list(each.get_xdata()) == [1, 2, 3, 4]
            assert list(each.get_ydata()) == pytest.approx([0.905 * epoch / EPOCHS for epoch in range(1, 5)])
    (panel,) = shown(drawing.over_epochs([[Panel("SP", "mlp")]], metric="test_loss", against="step")(evidence))
    assert (panel.get_ylabel(), panel.get_xlabel()) == ("test loss", "step")
    assert list(panel.get_lines()[0].get_xdata()) == [10, 20, 30, 40]
    assert list(panel.get_lines()[0].get_ydata()) == [4, 2, 4 / 3, 1]


def test_over_epochs_takes_a_column_or_the_mean_of_several(evidence):
    for quantity, times in (("distance/fc1.weight", 1), ("*/fc2.*", 3), ("distance/", 2)):
        (panel,) = shown(drawing.over_epochs([[Panel("muP", "mlp", "mup")]], quantity=quantity)(evidence))
        for each, width in zip(panel.get_lines(), WIDTHS, strict=True):
            assert list(each.get_ydata()) == pytest.approx([times * epoch / width for epoch in range(1, 5)])
        assert panel.get_yscale() == "log"
        assert panel.get_ylabel() == quantity.strip("/*")


def test_panels_of_other_quantities_have_axes_of_their_own(evidence):
    quantities = ("distance/fc1.weight", "distance/fc2.weight", "test_loss")
    row = [Panel(quantity, "mlp", "mup", quantity) for quantity in quantities]
    found = shown(drawing.over_epochs([row], label="size")(evidence))
    assert len({panel.get_ylim() for panel in found}) == 3
    assert [panel.get_ylabel() for panel in found] == ["size", "size", "test loss"]


def test_layers_over_epochs_draws_the_widest_a_line_a_layer(evidence):
    (panel,) = shown(drawing.layers_over_epochs([[Panel("muP", "mlp", "mup", "distance/*.weight")]])(evidence))
    assert [each.get_color() for each in panel.get_lines()] == [shade(0, 2), shade(1, 2)]
    for each, times in zip(panel.get_lines(), (1, 3), strict=True):
        assert list(each.get_ydata()) == pytest.approx([times * epoch / 256 for epoch in range(1, 5)])
    assert (panel.get_ylabel(), panel.get_yscale()) == ("distance", "log")


def test_a_width_without_a_curve_is_named(evidence):
    (panel,) = shown(drawing.over_epochs([[Panel("muP", "widths lost", "mup")]])(evidence))
    assert [each.get_text() for each in panel.texts] == ["nothing to show at width 128, 256"]


def test_against_width_shows_ours_and_the_papers(evidence):
    paper = {128: 0.8, 64: 0.7}
    panels = [WidthPanel("MLP", [WidthLine("SP", "mlp", "sp", paper), WidthLine("muP", "mlp", "mup")])]
    figure = drawing.best_over_width(panels)(evidence)
    (panel,) = shown(figure)
    ours, theirs = lines(panel), lines(panel, dashes=":")
    assert [each.get_color() for each in ours + lines(panel, "s")] == list(COLOURS[:2])
    assert tuple(ours[0].get_xdata()) == WIDTHS
    assert list(ours[0].get_ydata()) == pytest.approx([0.905] * 3)
    (dotted,) = theirs
    assert (list(dotted.get_xdata()), list(dotted.get_ydata())) == ([64, 128], [0.7, 0.8])
    assert dotted.get_color() == ours[0].get_color()
    assert legend(figure.legends[0]) == ["SP", "muP", "the paper"]


def test_panels_of_other_lines_name_their_own(evidence):
    panels = [WidthPanel("A", [WidthLine("K-FAC", "mlp")]), WidthPanel("B", [WidthLine("Shampoo", "cnn")])]
    figure = drawing.best_over_width(panels)(evidence)
    assert [legend(panel.get_legend()) for panel in shown(figure)] == [["K-FAC"], ["Shampoo"]]
    assert not figure.legends


def test_four_panels_are_two_by_two(evidence):
    figure = drawing.best_over_width([WidthPanel(name, [WidthLine("", "mlp")]) for name in "ABCD"])(evidence)
    assert {panel.get_subplotspec().get_geometry()[:2] for panel in figure.axes} == {(2, 2)}


@pytest.mark.parametrize("part", POOR)
@pytest.mark.parametrize("metric", ["test_accuracy", "test_loss"])
def test_poor_evidence_is_drawn(evidence, part, metric, tmp_path):
    poor = Evidence({part: replace(evidence[part], metric=metric)})
    panels = [[Panel("", part), Panel("", part, "ntk")]]
    draws = [
        drawing.transfer(panels),
        drawing.over_epochs(panels),
        drawing.over_epochs(panels, quantity="distance/"),
        drawing.layers_over_epochs([[Panel("", part, None, "distance/"), Panel("", part, "ntk", "none/")]]),
        drawing.over_exponent([ExponentPanel("", {1.0: part})], second="train_accuracy"),
        drawing.best_over_width([WidthPanel("", [WidthLine("ours", part, paper={1: 0.5})])]),
        drawing.best_over_width([WidthPanel("", [WidthLine("ours", part)])]),
    ]
    for draw in draws:
        figure = draw(poor)
        figure.savefig(tmp_path / "figure.svg")  # lays it out, which is where odd axes break
    assert [each.get_text() for each in shown(draws[0](poor))[1].texts] == ["nothing to show"]


def test_the_same_evidence_gives_the_same_file(evidence, tmp_path):
    draw = drawing.transfer([[Panel("SP", "mlp", "sp"), Panel("muP", "mlp", "mup")]])
    first, second = (save(draw(evidence), tmp_path / name)[0].read_bytes() for name in "ab")
    assert first == second


def test_a_long_title_stays_in_its_panel(evidence):
    panels = [[Panel("Shampoo, embedding times 0.1, output times 16", "mlp")] * 5]
    titles = [panel.get_title("left").splitlines() for panel in shown(drawing.transfer(panels)(evidence))]
    assert all(len(title) == 2 for title in titles)


# Coordinate checks.


@pytest.fixture(scope="module")
def checked():
    config = RunConfig(model="mlp", method="kfac", lr=0.01, samples=16)
    return check_run(config, widths=(64, 128), seeds=2, steps=1)


def test_a_check_shows_a_line_a_layer_with_its_exponent(checked):
    figure = drawing.checks([[Panel("muP", "MLP"), Panel("again", "MLP")]])(Evidence({"MLP": checked}))
    left, right = shown(figure)
    named = [each for each in checked.features if each.reading == "features" and each.layer != "output"]
    assert legend(left.get_legend()) == [f"{each.layer} {each.measured.slope:+.2f}" for each in named]
    assert len(named) == 3
    for drawn, each in zip(left.get_lines(), named, strict=True):
        rows = checked.record.select("features", each.layer)
        means = [sum(row.value for row in rows if row.width == width) / 2 for width in (64, 128)]
        assert list(drawn.get_ydata()) == pytest.approx(means)
    assert left.get_ylim() == right.get_ylim()
    low, high = left.get_ylim()
    assert high >= 99.9 * low  # flat looks flat


def check_of(*rows, widths=(64, 128)):
    return Check(Record(tuple(rows), widths, 1, "kfac", "mup", "", {}, {}))


def test_of_many_layers_a_check_shows_some_from_the_first_to_the_last():
    rows = [Measurement(width, 0, 1, "features", f"layer{number}", 1.0) for width in (64, 128) for number in range(30)]
    (panel,) = shown(drawing.checks([[Panel("", "a")]])(Evidence({"a": check_of(*rows)})))
    names = [each.split()[0] for each in legend(panel.get_legend())]
    assert len(set(names)) == drawing.MOST_LAYERS
    assert (names[0], names[-1]) == ("layer0", "layer29")
    assert panel.get_legend().get_title().get_text() == "8 of 30 layers"
    assert legend(panel.get_legend())[0] == "layer0 +0.00"


def test_poor_checks_are_drawn(tmp_path):
    broken = check_of(*(Measurement(width, 0, 1, "features", "fc1", math.nan) for width in (64, 128)))
    still = check_of(*(Measurement(width, 0, 1, "features", "fc1", 0.0) for width in (64, 128)))
    found = Evidence({"none": check_of(), "broken": broken, "still": still})
    figure = drawing.checks([[Panel(name, name) for name in found]])(found)
    figure.savefig(tmp_path / "figure.svg")
    _, second, third = shown(figure)
    assert legend(second.get_legend()) == ["fc1 explodes"]
    assert legend(third.get_legend()) == ["fc1 stands still"]


# Cells.


def cells(evidence):
    return ["0.1", "0.2"], ["4", "16"], [[0.25, math.nan], [0.5, 0.75]]


@pytest.mark.parametrize(("lowest", "where"), [(False, (1, 1)), (True, (0, 0))])
def test_a_map_has_its_numbers_and_frames_the_best(lowest, where):
    draw = drawing.heat(cells, x="learning rate", y="batch", title="SP", lowest=lowest, form=".0%", label="accuracy")
    panel, scale = shown(draw(Evidence()))
    assert (scale.get_ylabel(), scale.get_ylim()) == ("accuracy", (0.25, 0.75))
    assert [each.get_text() for each in panel.texts] == ["25%", "-", "50%", "75%"]
    assert [each.get_xy() for each in panel.patches] == [where]
    assert panel.collections[0].get_clim() == (0.25, 0.75)
    assert (panel.get_ylabel(), panel.get_xlabel(), panel.get_title("left")) == ("batch", "learning rate", "SP")
    assert panel.yaxis_inverted()  # the first row on top


def test_a_map_of_nothing_is_drawn(tmp_path):
    panel, _ = shown(drawing.heat(lambda evidence: (["a"], ["b"], [[math.inf]]), "x", "y")(Evidence()))
    assert [each.get_text() for each in panel.texts] == ["-"]
    assert not panel.patches
    panel.figure.savefig(tmp_path / "figure.svg")


def test_a_table_is_drawn_cell_by_cell(tmp_path):
    made = Table("A title", ("layer", "b"), (("input", "$0$"), ("output", "1_2")), ("A note.", ""))
    figure = drawing.table(lambda evidence: made)(Evidence())
    figure.savefig(tmp_path / "figure.svg")
    written = [each.get_text() for each in figure.axes[0].texts]
    assert written == ["A title", "layer", "b", "input", "$0$", "output", "1_2", "A note."]
    assert not any(each.get_parse_math() for each in figure.axes[0].texts)
