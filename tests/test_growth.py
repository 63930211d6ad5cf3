"""Twice as large takes at most about twice as long: counted in lines of mukron that run, not in seconds."""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import mukron
from mukron.study import Design
from mukron.study.store import ENDED, Entry
from mukron.train import RunConfig


def deep(layers):
    def make(width):
        blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width))]
        return nn.Sequential(nn.Linear(4, width), *blocks, nn.Linear(width, 2))

    return make


def lines_run(act):
    """How often each line of mukron runs while something is done; a comprehension counts one for each item."""
    count: Counter[tuple[str, int]] = Counter()

    def trace(frame, event, _):
        if "mukron" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count[frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def shapes(layers):
    return lambda: mukron.base_shapes(deep(layers), width=8)


def parametrize(layers):
    base, model = mukron.base_shapes(deep(layers), width=8), deep(layers)(16)
    return lambda: mukron.parametrize(model, base)


def step(layers):
    base, model = mukron.base_shapes(deep(layers), width=8), deep(layers)(16)
    optimizer = mukron.KFAC(model, mukron.parametrize(model, base), lr=0.01, damping=1.0, fisher="empirical")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def take():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()

    take()
    return take


def next_point(points):
    config = RunConfig(method="sgd", base_width=8, epochs=1, samples=32)
    design = Design(config, widths=(8, 16), lr=[0.001 * 1.01**n for n in range(2 * points)], seeds=1, schemes="mup")
    entries = [Entry(n, point, ENDED) for n, point in zip(range(2 * points), design.points([]), strict=False)]
    design.next(entries)
    return lambda: design.next(entries)


@pytest.mark.parametrize("make", [shapes, parametrize, step, next_point])
def test_no_line_runs_more_than_in_proportion(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small, large = (lines_run(make(size)) for size in (20, 40))
    assert sum(small.values()) > 40
    assert sum(large.values()) < 2.2 * sum(small.values())
    grown = {line: (small[line], times) for line, times in large.items() if times > 2.2 * max(small[line], 10)}
    assert not grown
