"""A made-up study: under SP the best learning rate falls with the width, under muP it stays and wider is better."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean, stdev

import pytest

from mukron.study.certificate import Certificate, Interval, Judgement, Optimum, Regret, Wider
from mukron.study.points import PRUNED, Point, Result
from mukron.study.record import StudyRecord
from mukron.train import RunConfig
from mukron.train.records import DIVERGED, FINISHED

SP, MUP = "sp/heuristic:0.001", "mup/rescaled:1"
WIDTHS = (64, 128, 256, 512, 1024)
RATES = tuple(2.0**power for power in range(-9, 0))
SEEDS, EPOCHS = 3, 20
DRIFT = {SP: -0.8, MUP: 0.0}  # of log2 of the best learning rate, per doubling of the width
MADE = {
    "command": "mukron transfer --method kfac --schemes sp/heuristic,mup/rescaled --widths 64,128,256,512,1024",
    "date": "2024-05-07 12:00",
    "machine": "2 cores, Linux x86_64",
    "mukron": "0.1.0",
    "torch": "2.6.0",
    "storage": "sqlite:///study.db",
}


def best_power(scheme: str, width: float) -> float:
    """Where the made-up optimum is, as a power of two."""
    return -3.3 + DRIFT[scheme] * math.log2(width / 64)


def train(point: Point) -> Result:
    """A loss that falls to a parabola in log2 of the learning rate; far above the optimum it diverges."""
    draw = random.Random(repr(point))
    off = math.log2(point.lr) - best_power(point.scheme, point.width)
    wide = math.log2(point.width / 64)
    if off > 2.6:
        rows = [{"epoch": epoch, "test_loss": 2.3 * 4**epoch} for epoch in range(1, 4)]
        return Result(point, DIVERGED, rows, "the loss is not finite in epoch 4", 0.2)
    gain = -0.11 if point.scheme == MUP else 0.03
    sharp = 0.16 * 2 ** (gain * wide + 0.3 * off**2)
    low = math.exp(draw.gauss(0, 0.04)) / (1 / sharp + 1 / 2.2)  # never worse than at the start
    fall = 0.30 * 2 ** (0.1 * wide if point.scheme == MUP else -0.12 * wide)
    rows = [{"epoch": epoch, "test_loss": low + 2.1 * math.exp(-fall * epoch)} for epoch in range(1, EPOCHS + 1)]
    return Result(point, FINISHED, rows, "", 1.5)


def values_of(results: list[Result], scheme: str, width: float, epoch: int | None = None) -> dict[float, list[float]]:
    """By learning rate, the seeds' losses, where every seed finished."""
    found: dict[float, list[Result]] = {}
    for result in results:
        if (result.point.scheme, result.point.width) == (scheme, width):
            found.setdefault(result.point.lr, []).append(result)
    whole = {lr: runs for lr, runs in found.items() if all(run.status == FINISHED for run in runs)}
    return {lr: [run.value("test_loss", epoch) for run in runs] for lr, runs in whole.items()}


def judge(results: list[Result], scheme: str) -> Judgement:
    """As a certificate would say it; the last optimum of SP is at the edge."""
    optima, regret, carried = [], [], None
    for width in WIDTHS:
        values, power = values_of(results, scheme, width), best_power(scheme, width)
        own = min(values, key=lambda lr: fmean(values[lr]))
        carried = carried or own
        mean, noise = fmean(values[own]), stdev(values[own])
        edge = scheme == SP and width == WIDTHS[-1]
        interval = Interval(power, -math.inf if edge else power - 0.3, power + 0.25)
        optima.append(Optimum(width, interval, own, mean, noise, ("at the edge of the grid",) if edge else ()))
        worse = fmean(values[carried]) - mean if carried in values else math.inf
        regret.append(Regret(width, carried, own, worse, noise, worse / noise))
    drift = Interval(DRIFT[scheme], DRIFT[scheme] - 0.07, DRIFT[scheme] + 0.08)
    wider = tuple(wider_is_better(results, scheme, carried, *when) for when in (("early", 5), ("late", EPOCHS)))
    moves = scheme == SP
    reasons = (
        f"the best learning rate moves by {drift.value:+.2f} [{drift.low:+.2f}, {drift.high:+.2f}] in log2 with every "
        "doubling of the width",
        f"at the narrowest width's best learning rate, {carried:g}, the widest network "
        + ("diverges" if moves else "is as good as at its own"),
        "wider is worse, early and late" if moves else "wider is better, early and late",
    )
    verdict = "does not transfer" if moves else "transfers"
    return Judgement(scheme, "lr", tuple(optima), drift, tuple(regret), wider, verdict, reasons)


def wider_is_better(results: list[Result], scheme: str, carried: float, when: str, epoch: int) -> Wider:
    by_width = [(width, values_of(results, scheme, width, epoch).get(carried, [math.inf])) for width in WIDTHS]
    values = tuple(
        (width, fmean(each), stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None) for width, each in by_width
    )
    worse = WIDTHS[1:] if scheme == SP else ()
    return Wider(when, epoch, values, not worse, worse)


def transfer_study(name: str = "digits-kfac", **changes: object) -> StudyRecord:
    points = [
        Point(scheme, width, lr, 0.001 if scheme == SP else 1.0, seed)
        for scheme in (SP, MUP)
        for width in WIDTHS
        for lr in RATES
        for seed in range(SEEDS)
    ]
    results = [train(point) for point in points]
    certificate = Certificate("test_loss", tuple(judge(results, scheme) for scheme in (SP, MUP)))
    config = RunConfig(epochs=EPOCHS, samples=1024, batch=None, loss="mse")
    return StudyRecord(name, config, ("lr",), "test_loss", tuple(results), certificate, {**MADE, **changes})


def search(trials: int = 40, damped: bool = True) -> StudyRecord:
    """What ``mukron tune`` leaves: one width, learning rates and dampings as a sampler drew them."""
    draw, results = random.Random(0), []
    for number in range(trials):
        lr, damping = 2 ** draw.uniform(-9, 0), 2 ** draw.uniform(-6, 3)
        result = train(Point(MUP, 128, lr, damping, 0))
        point = result.point if damped else Point("mup", 128, lr, None, 0)
        given_up = number % 7 == 6
        rows, status = (result.rows[:5], PRUNED) if given_up else (result.rows, result.status)
        results.append(Result(point, status, rows, result.reason))
    config = RunConfig(method="kfac" if damped else "sgd", epochs=EPOCHS)
    return StudyRecord("tune", config, ("lr", "damping") if damped else ("lr",), "test_loss", tuple(results))


@pytest.fixture(scope="session")
def study() -> StudyRecord:
    return transfer_study()


@pytest.fixture(scope="session")
def make_study() -> Callable[..., StudyRecord]:
    return transfer_study


@pytest.fixture(scope="session")
def make_search() -> Callable[..., StudyRecord]:
    return search
