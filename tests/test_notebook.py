"""Results print as a few lines, and show as HTML that escapes names, needs no other file and holds a figure."""

from __future__ import annotations

import base64
import re
import struct
from collections import OrderedDict
from html.parser import HTMLParser

import pytest
import torch

from mukron import base_shapes, figures, notebook, parametrize, plan
from mukron.diagnose import (
    Approach,
    ApproachStep,
    BranchCheck,
    Check,
    DepthCheck,
    Measurement,
    Record,
    coordinate_check,
)
from mukron.diagnose.landing import Landing
from mukron.exponents import Exponent
from mukron.models import GPT, MLP
from mukron.optim.shapes import LayerShape, NetworkShapes
from mukron.study import Point, Result, StudyError, StudyRecord, certify
from mukron.study.planning import plan_for
from mukron.train import Run, RunConfig, RunError

NASTY = "<script>alert('x')</script>&amp;"


def check(layers: int = 3, widths: tuple[int, ...] = (64, 128, 256)) -> Check:
    rows = tuple(
        Measurement(width, seed, 1, "features", f"{NASTY}{layer}", 0.5)
        for width in widths
        for seed in (0, 1)
        for layer in range(layers)
    )
    return Check(Record(rows, widths, 1, method="kfac", scheme="mup", damping="", roles={}, predicted={}))


def run(epochs: int = 3) -> Run:
    rows = [
        {"epoch": epoch, "lr": 0.1, "train_loss": 1 / epoch, "test_loss": None, "test_accuracy": 0.5, "seconds": 1.0}
        for epoch in range(1, epochs + 1)
    ]
    return Run(RunConfig(method="sgd", width=64), "diverged", rows, reason=f"why? {NASTY}", seconds=2.0)


def study(name: str = NASTY, *, certified: bool = True) -> StudyRecord:
    points = [Point("mup", width, lr, None, seed=0) for width in (64, 128) for lr in (0.1, 0.2, 0.4)]
    results = [Result(point, "finished", [{"epoch": 1, "test_loss": 0.5 + abs(point.lr - 0.2)}]) for point in points]
    certificate = certify(results, ("lr",), "test_loss") if certified else None
    return StudyRecord(name, RunConfig(method="sgd"), ("lr",), "test_loss", results, certificate)


def approach() -> Approach:
    return Approach(
        (ApproachStep(0, 0.5, 0.0, 1.0, 0.0), ApproachStep(1, 0.1, 1.0, 0.0, 1.0)), ridge=0.1, trouble=NASTY
    )


def network(width: int) -> torch.nn.Module:
    layers = {NASTY: torch.nn.Linear(4, width), "head": torch.nn.Linear(width, 2)}
    return torch.nn.Sequential(OrderedDict(layers))


def gpt(width: int, depth: int) -> torch.nn.Module:
    return GPT(width, depth, base_depth=2)


def prediction():
    return plan(ranks=2, shapes=NetworkShapes(NASTY, (LayerShape("up", 64, 64),)), batch=8)


RESULTS = {
    "check": check,
    "depth": lambda: DepthCheck((2, 4, 8), {f"features/{NASTY}.*.up": Exponent(0.3, 0.2, 0.4)}, unfit=(NASTY,)),
    "branches": lambda: BranchCheck((2, 8), {NASTY: (0.4, 0.4)}, {NASTY: 0.0}),
    "approach": approach,
    "landing": lambda: Landing({NASTY: approach()}),
    "certificate": lambda: study().certificate,
    "study": study,
    "search": lambda: study(certified=False),
    "run": run,
    "plan": lambda: plan_for(RunConfig(method="kfac", width=16, base_width=16, lr=0.1, samples=64), 64, steps=0),
    "base shapes": lambda: base_shapes(network, width=16),
    "parametrization": lambda: parametrize(network(64), base_shapes(network, width=16)),
    "record": lambda: check().record,
    "prediction": prediction,
}
PLOTS = ("check", "depth", "branches", "study", "search", "run")
NAMES_TAGS = (
    "check",
    "depth",
    "branches",
    "approach",
    "landing",
    "study",
    "search",
    "run",
    "base shapes",
    "parametrization",
    "prediction",
)  # those above that have names of tags


class Page(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", RESULTS)
def test_results_print_as_a_few_lines(name):
    result = RESULTS[name]()
    lines = repr(result).splitlines()
    assert str(result) == repr(result)
    assert 2 <= len(lines) <= 12
    assert max(map(len, lines)) <= 200  # a name may be long


@pytest.mark.parametrize("name", RESULTS)
def test_html_escapes_everything_and_needs_no_other_file(name):
    result = RESULTS[name]()
    shown = result._repr_html_()
    page = Page(shown)
    assert not page.open
    assert not {"script", "link", "style", "iframe"} & {tag for tag, _ in page.tags}
    assert all(not value.startswith("http") for _, given in page.tags for value in given.values() if value)
    assert (NASTY in page.text) == (name in NAMES_TAGS)  # as text, escaped once
    assert any(tag == "table" for tag, _ in page.tags)
    images = [given for tag, given in page.tags if tag == "img"]
    assert len(images) == (name in (*PLOTS, "landing"))
    for image in images:
        png = base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,"))
        width, height = struct.unpack(">II", png[16:24])
        assert 200 < width < 1500
        assert 80 < height < 1500


@pytest.mark.parametrize("name", RESULTS)
def test_colours_are_those_of_the_page(name):
    """On dark and on light pages: no colour of text is set, and white is only behind figures."""
    for tag, given in Page(RESULTS[name]()._repr_html_()).tags:
        style = given.get("style") or ""
        assert re.findall(r"(?<![-\w])color: (\w+)", style) in ([], ["inherit"])
        assert ("background" in style) == (tag == "img")


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_figures(name):
    from matplotlib.figure import Figure

    assert isinstance(RESULTS[name]().plot(), Figure)


@pytest.mark.parametrize("name", PLOTS)
def test_without_matplotlib(name, monkeypatch):
    monkeypatch.setattr(figures, "available", lambda: False)
    monkeypatch.setattr(notebook, "available", lambda: False)
    result = RESULTS[name]()
    assert "<img" not in result._repr_html_()
    with pytest.raises(ValueError, match="need matplotlib: pip install matplotlib"):
        result.plot()


def test_the_figure_of_a_run_has_its_numbers():
    figure = run(3).plot()
    loss, accuracy = figure.axes
    assert loss.get_title(loc="left") == "loss"
    assert accuracy.get_title(loc="left") == "accuracy"
    assert list(loss.lines[0].get_xdata()) == [1, 2, 3]
    assert list(loss.lines[0].get_ydata()) == [1.0, 0.5, 1 / 3]
    assert [line.get_label() for line in loss.lines] == ["train"]  # no epoch has a finite test loss


def test_a_run_without_epochs():
    empty = Run(RunConfig(method="sgd"), "interrupted", reason="stopped")
    assert "interrupted, 0 epochs" in repr(empty)
    assert "<img" not in empty._repr_html_()
    with pytest.raises(RunError, match="nothing to draw"):
        empty.plot()


def test_a_long_run_shows_its_last_epochs():
    table = run(30).table()
    assert [row[0] for row in table.rows] == [str(epoch) for epoch in range(21, 31)]
    assert table.notes == ("20 epochs before these.",)


def test_the_figure_of_depth_has_the_slopes():
    exponents = {f"features/blocks.*.{layer}": Exponent(0.1 * layer, -0.1, 0.5) for layer in range(40)}
    figure = DepthCheck((2, 4), exponents).plot()
    assert list(figure.axes[0].lines[0].get_xdata()) == pytest.approx([0.1 * layer for layer in range(10, 40)])
    assert "10 flatter ones" in figure.get_suptitle()


def test_a_study_that_tuned_one_thing_does_not_draw_another():
    with pytest.raises(StudyError, match="this study tuned lr"):
        study().plot("damping")


def test_a_study_of_which_nothing_ended():
    empty = StudyRecord("empty", RunConfig(), ("lr",), "test_loss", ())
    assert "no run has ended" in repr(empty)
    assert "<img" not in empty._repr_html_()


def test_a_real_check_is_short():
    torch.manual_seed(0)
    result = coordinate_check(
        lambda width: MLP(width, inputs=4, classes=3),
        lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=0.1)),
        (torch.randn(8, 4), torch.randint(3, (8,))),
        base_width=16,
        widths=(16, 32, 64),
        seeds=2,
        steps=1,
    )
    assert len(repr(result)) < 1000
    assert repr(result).startswith(result.title)
    assert len(repr(result.record)) < 1000


def test_plans_of_deep_networks_are_short():
    shapes = base_shapes(gpt, width=16, depth=2)
    p = parametrize(gpt(64, 12), shapes)
    assert repr(shapes).splitlines() == [
        "Base shapes: 25 parameters at width 16, depth 2",
        f"{sum(parameter.numel() for parameter in gpt(16, 2).parameters()):,} numbers; 25 of them grow with the width",
        "residual blocks: blocks (2)",
    ]
    assert repr(p).splitlines()[:3] == [
        "Parametrization: mup, base width 16, 125 parameters",
        "roles: 2 input, 50 vector, 72 hidden, 1 output",
        "growth since the base shapes: r_in up to 4, r_out up to 4, L up to 6",
    ]
    for result in (shapes, p):
        assert len(repr(result)) < 1000
        assert result._repr_html_().count("<tr>") == 10  # with the head; there are 25 and 125 parameters
        assert "blocks.0-" in result._repr_html_()  # equal rows are one


def test_a_plan_says_what_was_asked_for():
    p = parametrize(MLP(32), base_shapes(MLP, width=16), decay="1/width", output_exponent="zero")
    assert "output_exponent zero by request" in repr(p)
    assert "decay 1 by request" in repr(p)
    assert "by request" not in repr(parametrize(MLP(32), base_shapes(MLP, width=16)))


def test_base_shapes_of_one_network_do_not_know_yet_what_grows():
    shapes = base_shapes(MLP(16), roles={"fc1.weight": "input"})
    assert "what grows with the width is seen when a wider network is parametrized" in repr(shapes)
    assert "declared roles: 1" in repr(shapes)
    assert ("fc1.weight", "16 x 784", "-", "input") in [row[:4] for row in shapes._tables()[0].rows]


def test_explanations_show_as_tables():
    plan = parametrize(MLP(32), base_shapes(MLP, width=16))
    assert "<table" in plan.explain("kfac")._repr_html_()
