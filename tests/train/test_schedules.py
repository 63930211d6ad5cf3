"""Learning rates over a run, against what the words say."""

from __future__ import annotations

import math

import pytest
import torch

from mukron.train.schedules import Schedule


def factors(text, epochs=4, steps=5, warmup=0.0):
    schedule = Schedule.parse(text)
    return [schedule.factor(step, steps, epochs, warmup) for step in range(epochs * steps)]


def test_constant_and_warmup():
    assert factors("constant") == [1.0] * 20
    assert factors("constant", warmup=0.8) == [0.25, 0.5, 0.75] + [1.0] * 17


def test_cosine_and_linear_are_torchs():
    for text, kind, options in (
        ("cosine", torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 20}),
        ("linear", torch.optim.lr_scheduler.LinearLR, {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 20}),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = kind(optimizer, **options)
        expected = []
        for _ in range(20):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert factors(text) == pytest.approx(expected)


def test_decay_begins_where_warmup_ends():
    found = factors("cosine", warmup=2)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10:] == pytest.approx([(1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)])
    assert all(value > 0 for value in factors("linear", warmup=4))  # nothing is left to decay


def test_steps_drop_at_the_start_of_their_epochs():
    assert factors("step:1,2.4") == pytest.approx([1.0] * 5 + [0.2] * 7 + [0.04] * 8)


@pytest.mark.parametrize("text", ["constant", "cosine", "linear", "step:60,120,160", "step:0.5"])
def test_a_schedule_is_how_it_is_written(text):
    assert str(Schedule.parse(f" {text.upper()} ")) == text


def test_only_decays_to_zero_know_their_end():
    assert [Schedule.parse(text).knows_its_end for text in ("constant", "step:1", "cosine", "linear")] == [
        False,
        False,
        True,
        True,
    ]
