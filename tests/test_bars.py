"""Bars are seen on a terminal and in notebooks, by the first process alone, and nowhere else."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch

from mukron import bars
from mukron.diagnose import coordinate_check, depth_check
from mukron.models import MLP, ResidualMLP
from mukron.study import Design, TransferStudy
from mukron.train import RunConfig, train

SMALL = RunConfig(method="sgd", width=16, base_width=16, epochs=1, samples=256, batch=64, lr=0.1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(bars, "INTERVAL", 0.0)
    stream = Terminal()
    monkeypatch.setattr(bars, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


@pytest.fixture
def notebook(monkeypatch):
    """What IPython shows in a notebook, page by page."""
    pages: list[str] = []
    handle = SimpleNamespace(update=pages.append)

    def display(page, display_id):
        pages.append(page)
        return handle

    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(
        get_ipython=lambda: shell, display=SimpleNamespace(HTML=lambda page: page, display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(bars, "INTERVAL", 0.0)
    return pages


BATCH = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def sgd(model, plan):
    return torch.optim.SGD(plan.param_groups("sgd", lr=0.1))


def check(progress=None):
    short = {"base_width": 8, "widths": (8, 16), "seeds": 1, "steps": 1}
    coordinate_check(lambda width: MLP(width, inputs=4, classes=3), sgd, BATCH, **short, progress=progress)


def check_depth(progress=None):
    def network(width, depth):
        return ResidualMLP(width, inputs=4, classes=3, depth=depth, base_depth=2)

    depth_check(network, sgd, BATCH, base_width=8, base_depth=2, depths=(2, 4), seeds=1, progress=progress)


def run(progress=None):
    train(SMALL, progress=progress)


FUNCTIONS = {"coordinate check": check, "depth check": check_depth, "train": run}


@pytest.mark.parametrize("title", FUNCTIONS)
def test_a_terminal_shows_a_bar_and_keeps_nothing_of_it(title, terminal):
    FUNCTIONS[title]()
    *lines, last = terminal.getvalue().split("\r\x1b[K")
    assert last == ""
    assert sum(line.startswith(f"{title} [") for line in lines) >= 2


def test_a_study_shows_a_bar(terminal, tmp_path):
    design = Design(SMALL, widths=(16,), schemes=("mup",), lr=(0.1, 0.2), seeds=1)
    TransferStudy(design, folder=tmp_path / "first").run()
    assert "first [" in terminal.getvalue()
    assert "2/2 runs" in terminal.getvalue()


@pytest.mark.parametrize("title", FUNCTIONS)
def test_a_notebook_shows_a_bar(title, notebook):
    FUNCTIONS[title]()
    assert notebook[-1] == ""
    assert notebook[0].startswith(f"<div>{title} <progress value=")


@pytest.mark.parametrize("title", FUNCTIONS)
def test_no_bar_where_none_is_wanted(title, terminal, notebook):
    FUNCTIONS[title](progress=False)
    assert (terminal.getvalue(), notebook) == ("", [])


def test_no_bar_without_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(bars, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    run()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_one_process_shows_the_bar(rank, shown, terminal, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with bars.progress_of_function(None, "count", lambda done: (done, 3, "")) as report:
        assert (report is not None) == shown


def test_ones_own_function_takes_the_place_of_the_bar(terminal):
    seen = []
    check(progress=lambda *at: seen.append(at))
    assert seen[-1] == (2, 2, "done")
    assert terminal.getvalue() == ""


def test_the_bar_goes_when_the_function_fails(terminal):
    def fail() -> None:
        with bars.progress_of_function(None, "count", lambda done: (done, 3, "")) as report:
            report(1)
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert "count [########" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_long_lines_are_cut_and_texts_are_escaped(terminal, notebook, monkeypatch):
    monkeypatch.setattr(bars.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=40))
    bars._on_terminal("t" * 60, 1, 2, "x")
    assert len(terminal.getvalue().removeprefix("\r\x1b[K")) == 39
    with bars.progress_of_function(None, "<b>", lambda text: (1, 2, text)) as report:
        report("<i>")
    assert "&lt;b&gt;" in notebook[0]
    assert "&lt;i&gt;" in notebook[0]
