"""What factors remember, from text."""

from __future__ import annotations

import pytest

from mukron.memory import EMA, Batch, Sum, Window, parse_memory


@pytest.mark.parametrize(
    ("text", "memory"),
    [("batch", Batch()), ("sum", Sum()), ("ema", EMA()), ("EMA:0.5", EMA(0.5)), ("window:2", Window(2))],
)
def test_a_memory_from_text(text, memory):
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["emma:0.5", "sum:3", ""])
def test_text_that_is_no_memory(text):
    with pytest.raises(ValueError, match="known: batch, sum, ema:DECAY, auto:DECAY, window:BATCHES"):
        parse_memory(text)
