"""Kept verdicts are found again from evidence.json by a second implementation of the rules in docs/reproduce.md.

Nothing of ``mukron.paper`` judges here: numbers are read from the files, and the rules are written anew from their
table in the documentation. The certificates are taken from the files, as their own tests hold them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean, median, variance
from typing import Any

import numpy as np
import pytest

from mukron.exponents import student_quantile
from mukron.paper.tables import PRINTED_LAZY, PRINTED_MUP

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"
YES, PART, NO, UNKNOWN = "holds", "holds in part", "does not hold", "cannot be determined"
Setting = tuple[str, float, float | None]  # scheme, learning rate, damping
Number = tuple[float, float | None]  # a mean and its standard error; NaN: no run finished, None: one seed
NOTHING: Number = (math.nan, None)


class Study:
    """The runs of one part by width and setting."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content, self.metric = content, content["metric"]
        self.runs: dict[float, dict[Setting, list[float | None]]] = {}
        for run in content["results"]:
            value = run["rows"][-1].get(self.metric) if run["status"] == "finished" else None
            usable = value is not None and math.isfinite(value)
            setting = run["scheme"], run["lr"], run["damping"]
            self.runs.setdefault(run["width"], {}).setdefault(setting, []).append(value if usable else None)
        self.widths = sorted(self.runs)
        (self.judgement,) = content["certificate"]["judgements"] if content["certificate"] else (None,)

    def ranked(self, width: float) -> list[tuple[Setting, list[float]]]:
        whole = [(setting, values) for setting, values in self.runs[width].items() if None not in values]
        return sorted(whole, key=lambda pair: -mean(pair[1]))

    def number(self, width: float, setting: Setting | None = None, over_schemes: bool = False) -> Number:
        """At a setting, or at the best one."""
        ranked = dict(self.ranked(width))
        if not ranked or (setting is not None and setting not in ranked):
            return NOTHING
        values = ranked[setting] if setting is not None else next(iter(ranked.values()))
        noise = self.noise(over_schemes)
        return mean(values), None if noise is None else noise / math.sqrt(len(values))

    def noise(self, over_schemes: bool) -> float | None:
        spreads = []
        for width in self.widths:
            ranked = self.ranked(width)
            for scheme in {None} if over_schemes else {setting[0] for setting in self.runs[width]}:
                leading = [values for setting, values in ranked if scheme in (None, setting[0])][:3]
                spreads += [values for values in leading if len(values) > 1]
        if not spreads:
            return None
        freedom = median(len(values) - 1 for values in spreads)
        return math.sqrt(median(map(variance, spreads)) / (1 - 2 / (9 * freedom)) ** 3)

    def best(self, width: float) -> Setting | None:
        ranked = self.ranked(width)
        return ranked[0][0] if ranked else None

    def grid(self, width: float, axis: int) -> list[float]:
        return sorted({setting[axis] for setting in self.runs[width]})

    def beyond(self, width: float, axis: int = 1) -> bool:
        """Whether the best may lie beyond a grid of several settings."""
        every = {setting[axis] for settings in self.runs.values() for setting in settings}
        best = self.best(width)
        if best is None or len(every) < 2:
            return False
        if self.judgement is None:
            return best[axis] in (min(every), max(every))
        return width in self.open()

    def open(self) -> list[float]:
        ends = {each["width"]: (each["best"]["low"], each["best"]["high"]) for each in self.judgement["optima"]}
        return [width for width, pair in ends.items() if any(math.isinf(float(end)) for end in pair)]


def margin(a: Number, b: Number) -> float:
    return 0.01 if a[1] is None or b[1] is None else 2 * math.hypot(a[1], b[1])


def order(a: Number, b: Number) -> int:
    """1 if a is above b by more than noise, -1 if below, else 0; what did not finish is below."""
    lost = math.isnan(a[0]), math.isnan(b[0])
    if any(lost):
        return lost[1] - lost[0]
    return int(a[0] - b[0] > margin(a, b)) - int(b[0] - a[0] > margin(a, b))


@lru_cache
def parts(recipe: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((KEPT / recipe / "evidence.json").read_text(encoding="utf-8"))
    return content["parts"]


@lru_cache
def study(recipe: str, part: str) -> Study:
    return Study(parts(recipe)[part])


# The rules.


def transfers(recipe: str, part: str, axis: int) -> tuple[str, list[float], bool, bool]:
    """The certificate's verdict, the best settings, whether they are shown to stay, whether one serves every width."""
    record = study(recipe, part)
    verdict, drift = record.judgement["verdict"], record.judgement["drift"]
    bests = {width: best[axis] for width in record.widths if (best := record.best(width)) is not None}
    steps = []
    for width, own in bests.items():
        grid = record.grid(width, axis)
        steps += [abs(math.log2(other / own)) for other in grid[max(grid.index(own) - 1, 0) : grid.index(own) + 2]]
    doublings = math.log2(max(bests) / min(bests))
    fine = doublings > 0 and max(steps) / doublings <= 0.25
    bounded = drift is not None and all(math.isfinite(float(drift[end])) for end in ("low", "high"))
    same = len(set(bests.values())) == 1 and len(bests) == len(record.widths)
    stay = verdict == "transfers" or (
        same and fine and bounded and not record.open() and verdict != "does not transfer"
    )
    serves = False
    if len(set(bests.values())) > 1 and len(bests) == len(record.widths) and record.noise(False) is not None:
        serves = any(
            all(
                any(
                    setting[axis] == common and order(record.number(width), record.number(width, setting)) == 0
                    for setting, _ in record.ranked(width)
                )
                for width in record.widths
            )
            for common in {setting[axis] for setting in record.runs[record.widths[0]]}
        )
    return verdict, [bests[width] for width in sorted(bests)], stay, serves


def stays(recipe: str, part: str, axis: int = 1) -> str:
    record = study(recipe, part)
    verdict, bests, stay, serves = transfers(recipe, part, axis)
    if stay:
        return YES
    lost = len(bests) < len(record.widths)
    if verdict != "does not transfer" or (len(set(bests)) == 1 and not lost) or (record.open() and not lost):
        return UNKNOWN
    return PART if serves else NO


def moves(recipe: str, part: str, axis: int = 1, direction: int = 0) -> str:
    record = study(recipe, part)
    verdict, bests, stay, serves = transfers(recipe, part, axis)
    if stay:
        return NO
    same = len(set(bests)) == 1 and len(bests) == len(record.widths)
    if verdict != "does not transfer" or serves or (same and not record.open()):
        return UNKNOWN
    return NO if direction * math.log2(bests[-1] / bests[0]) < 0 and len(bests) == len(record.widths) else YES


def outperforms(recipe: str, better: str, worse: str, axis: int = 1) -> str:
    a, b = study(recipe, better), study(recipe, worse)
    sign = order(a.number(a.widths[-1]), b.number(b.widths[-1]))
    behind = {1: b, -1: a}.get(sign)
    if behind is None or behind.beyond(behind.widths[-1], axis):
        return UNKNOWN
    return YES if sign > 0 else NO


def rising(numbers: list[Number]) -> str:
    if len(numbers) < 2 or math.isnan(numbers[0][0]):
        return UNKNOWN
    falls = any(order(numbers[j], numbers[i]) < 0 for i, j in product(range(len(numbers)), repeat=2) if i < j)
    return {1: PART if falls else YES, 0: UNKNOWN, -1: NO}[order(numbers[-1], numbers[0])]


def wider(recipe: str, part: str) -> str:
    record = study(recipe, part)
    verdict = rising([record.number(width) for width in record.widths])
    behind = {YES: record.widths[0], PART: record.widths[0], NO: record.widths[-1]}.get(verdict)
    return UNKNOWN if behind is None or record.beyond(behind) else verdict


def wider_there(recipe: str, part: str) -> str:
    record = study(recipe, part)
    best = record.best(record.widths[0])
    return rising([record.number(width, best) for width in record.widths if best in record.runs[width]])


def narrower(recipe: str, part: str) -> str:
    record = study(recipe, part)
    narrow, wide = record.widths[0], record.widths[-1]
    sign = order(record.number(narrow), record.number(wide))
    behind = {1: wide, -1: narrow}.get(sign)
    return UNKNOWN if behind is None or record.beyond(behind) else {1: YES, -1: NO}[sign]


def narrower_there(recipe: str, part: str) -> str:
    record = study(recipe, part)
    narrow, wide = record.widths[0], record.widths[-1]
    best = record.best(narrow)
    return {1: YES, 0: UNKNOWN, -1: NO}[order(record.number(narrow, best), record.number(wide, best))]


def edge(recipe: str, part: str, choose: Callable[[Any], float]) -> str:
    record = study(recipe, part)
    edges = [choose(setting[2] for setting, _ in record.ranked(width)) for width in record.widths]
    if edges[-1] == edges[0]:
        return UNKNOWN
    return NO if edges[-1] < edges[0] else YES if edges == sorted(edges) else PART


def alike(one: Number, others: list[Number], within: float) -> str:
    gaps = [(math.inf if math.isnan(each[0]) else abs(each[0] - one[0]), each) for each in others]
    if any(gap - (0 if math.isinf(gap) else margin(each, one)) > within for gap, each in gaps):
        return NO
    return YES if all(gap + margin(each, one) <= within for gap, each in gaps) else UNKNOWN


# Exponents.


def exponents(recipe: str, part: str, quantity: str) -> dict[str, tuple[float, float, float]]:
    """By layer: the exponent of the width, and its interval."""
    found = {}
    rows = [row for row in parts(recipe)[part]["record"]["rows"] if row[3] == quantity]
    for layer in dict.fromkeys(row[4] for row in rows):
        x = np.log([row[0] for row in rows if row[4] == layer])
        y = np.log([row[5] for row in rows if row[4] == layer])
        (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
        reach = student_quantile(0.975, len(x) - 2) * math.sqrt(covariance[0, 0])
        found[layer] = float(slope), float(slope) - reach, float(slope) + reach
    return found


def off(exponent: tuple[float, float, float], theory: float = 0.0) -> bool:
    return exponent[1] > theory + 0.25 or exponent[2] < theory - 0.25


def near(exponent: tuple[float, float, float], theory: float = 0.0) -> bool:
    return abs(exponent[0] - theory) <= 0.25 and theory - 0.5 < exponent[1] and exponent[2] < theory + 0.5


def count(right: int, wrong: int, total: int) -> str:
    return YES if total and right == total else (PART if right else NO) if wrong else UNKNOWN


def depends(recipe: str, part: str) -> str:
    layers = exponents(recipe, part, "features").values()
    some = sum(map(off, layers))
    if some:
        return YES if some == len(layers) else PART
    return NO if all(map(near, layers)) else UNKNOWN


def decays(recipe: str, part: str, *names: str) -> str:
    layers = [each for name, each in exponents(recipe, part, "features").items() if not names or name in names]
    low, not_low = sum(each[2] < -0.25 for each in layers), sum(each[1] > -0.25 for each in layers)
    needed = len(names) or 1
    return YES if low >= needed else UNKNOWN if len(layers) - not_low >= needed else PART if low else NO


def damping_scales(recipe: str, part: str) -> str:
    theory = parts(recipe)[part]["record"]["predicted"]
    found = [(each, theory[f"largest/{name}"]) for name, each in exponents(recipe, part, "damping").items()]
    return count(sum(near(*pair) for pair in found), sum(off(*pair) for pair in found), len(found))


def damping_valid(recipe: str, part: str) -> str:
    found = exponents(recipe, part, "ratio").values()
    return count(sum(map(near, found)), sum(map(off, found)), len(found))


def damping_valid_inside(recipe: str, part: str) -> str:
    roles = parts(recipe)[part]["record"]["roles"]
    layers: dict[str, list[tuple[float, float, float]]] = {}
    for factor, each in exponents(recipe, part, "ratio").items():
        layers.setdefault(factor[:-2], []).append(each)
    right = wrong = 0
    for layer, factors in layers.items():
        valid, invalid = all(map(near, factors)), any(map(off, factors))
        right += valid if roles[layer] == "hidden" else invalid
        wrong += invalid if roles[layer] == "hidden" else valid
    return count(right, wrong, len(layers))


# Rules of one recipe.


def best_of_words(method: str, b: str) -> Number:
    names = [name for name in parts("word2vec-b") if name.startswith(f"{method}, b_L = {b}, ")]
    assert len(names) > 1  # multipliers
    return max((study("word2vec-b", name).number(256) for name in names), key=lambda number: number[0])


def nngp_number(method: str, b: int) -> Number:
    return study("nngp", f"{method}, b_L = {b}, batch 1024").number(32)


def scalings(tuned_where: str) -> str:
    def rho(scheme: str) -> tuple[float, ...]:
        return tuple(map(float, re.findall(r"fixed:([^,]+),([^,]+)", scheme)[0]))

    def at_edge(record: Study, own: tuple[float, ...]) -> bool:
        tried = [rho(setting[0]) for settings in record.runs.values() for setting in settings]
        return any(number in (min(grid), max(grid)) for number, grid in zip(own, zip(*tried, strict=True), strict=True))

    narrow = study("k-fac-d-scale", "narrow")
    carried = rho(narrow.best(64)[0])
    cells: dict[str, tuple[Number, bool]] = {}
    for name in parts("k-fac-d-scale"):
        if name == "narrow":
            continue
        record = study("k-fac-d-scale", name)
        if tuned_where == "narrow":
            (setting,) = (each for each in record.runs[1024] if rho(each[0]) == carried)
            cells[name] = record.number(1024, setting, over_schemes=True), at_edge(narrow, carried)
        else:
            best = record.best(1024)
            cells[name] = (
                record.number(1024, best, over_schemes=True),
                best is not None and at_edge(record, rho(best[0])),
            )
    claimed, its_edge = cells.pop("d_A = -1, d_B = 1")
    orders = [order(number, claimed) for number, _ in cells.values() if not math.isnan(number[0])]
    if 1 in orders:
        return UNKNOWN if its_edge else NO
    behind = any(edge for number, edge in cells.values() if not math.isnan(number[0]))
    return UNKNOWN if 0 in orders or behind else YES


def table_3(recipe: str, name: str, early: bool) -> str:
    sp, mup = (study(recipe, f"{name}, {scheme}") for scheme in ("SP", "muP"))
    rules = {next(iter(record.runs[1]))[0].partition("/")[2] for record in (sp, mup)}
    epochs = mup.content["config"]["epochs"]
    if len(rules) > 1 or (not early and 3 * epochs < 300):
        return UNKNOWN
    assert epochs <= 100  # else the early claim needs an epoch before the last
    return {1: YES, 0: UNKNOWN, -1: NO}[order(mup.number(mup.widths[-1]), sp.number(sp.widths[-1]))]


def joined_verdicts(verdicts: list[str]) -> str:
    """Of a claim that says several things."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return PART if {YES, PART} & set(verdicts) else NO


def better(a: Number, b: Number, or_equal: bool = False) -> str:
    equal = YES if or_equal and not (math.isnan(a[0]) and math.isnan(b[0])) else UNKNOWN
    return {1: YES, 0: equal, -1: NO}[order(a, b)]


def learns(recipe: str, part: str) -> str:
    layers = list(exponents(recipe, part, "features").values())
    wrong = sum(map(off, layers))
    if wrong:
        return PART if wrong < len(layers) else NO
    return YES if all(map(near, layers)) else UNKNOWN


def everywhere(recipe: str, scheme: str, rule: Callable[[str], str]) -> str:
    return joined_verdicts([rule(name) for name in parts(recipe) if f", {scheme}, " in name])


def step_over_gradient(layer: str, power: str) -> str:
    names = {"input": "fc1", "hidden": "fc2", "output": "fc3"}
    column = f"rate/{names[layer]}.weight"
    right = []
    for end in (0, -1):
        points = []
        for run in parts("k-fac-precond")["MLP"]["results"]:
            values = [row[column] for row in run["rows"] if row.get(column)]
            points += [(run["width"], values[end])] if values and run["status"] == "finished" else []
        widths, values = zip(*points, strict=True)
        slope = float(np.polyfit(np.log(widths), np.log(values), 1)[0])
        right.append(abs(slope - float(power)) <= 0.25)
    return YES if all(right) else PART if any(right) else NO


def cnn_number(recipe: str, method: str, b: str, batch: str) -> Number:
    return study(recipe, f"{method}, b_L = {b}, batch {batch}").number(32)


def gains_grow(recipe: str) -> str:
    gaps: list[Number] = []
    for batch in ("64", "256", "1024"):
        one, many = (cnn_number(recipe, "K-FAC", b, batch) for b in ("1", "64"))
        gaps.append((one[0] - many[0], math.hypot(one[1] or 0.0, many[1] or 0.0) or None))
    rises = [gap for gap, _ in gaps] == sorted(gap for gap, _ in gaps)
    return {1: YES if rises else PART, 0: UNKNOWN, -1: NO}[order(gaps[-1], gaps[0])]


def in_another_metric(record: Study, width: float, metric: str) -> Number:
    """The mean of a metric at the setting that is best by the study's own; noise at the three best of each width."""
    of_setting: dict[tuple[float, Setting], list[float]] = {}
    for run in record.content["results"]:
        setting = run["scheme"], run["lr"], run["damping"]
        value = run["rows"][-1].get(metric) if run["rows"] else None
        of_setting.setdefault((run["width"], setting), []).extend([] if value is None else [value])
    spreads = [
        values
        for each in record.widths
        for setting, _ in record.ranked(each)[:3]
        if len(values := of_setting[each, setting]) > 1
    ]
    best = record.best(width)
    if best is None:
        return NOTHING
    values = of_setting[width, best]
    if not spreads:
        return mean(values), None
    freedom = median(len(each) - 1 for each in spreads)
    noise = math.sqrt(median(map(variance, spreads)) / (1 - 2 / (9 * freedom)) ** 3)
    return mean(values), noise / math.sqrt(len(values))


def training_highest_at_one(recipe: str) -> str:
    def number(b: float) -> Number:
        return in_another_metric(study(recipe, f"K-FAC, b_L = {b:g}, batch 1024"), 32, "train_accuracy")

    return joined_verdicts([better(number(1), number(b)) for b in (0.5, 2, 4, 16, 64)])


def higher_at_first(recipe: str) -> str:
    firsts = []
    for b in (64, 1):
        curves = [
            [row["test_accuracy"] for row in run["rows"] if "test_accuracy" in row]
            for run in parts(recipe)[f"K-FAC, b_L = {b}, batch 1024"]["results"]
        ]
        longest = max(map(len, curves))
        firsts.append(max(curve[0] for curve in curves if len(curve) == longest))
    return YES if firsts[0] > firsts[1] else NO


def smaller_rate(recipe: str) -> str:
    rates = [study(recipe, f"K-FAC, b_L = {b}, batch 1024").best(32)[1] for b in ("64", "0.5", "1")]
    return joined_verdicts([YES if rates[0] < other else NO for other in rates[1:]])


def does_not_fall(recipe: str, part: str) -> str:
    record = study(recipe, part)
    numbers = [record.number(width) for width in record.widths]
    falls = any(order(numbers[j], numbers[i]) < 0 for i, j in product(range(len(numbers)), repeat=2) if i < j)
    return NO if falls else YES


def loss_falls_throughout(recipe: str, part: str) -> str:
    curves = [
        [row["train_loss"] for row in run["rows"]] for run in parts(recipe)[part]["results"]
    ]  # by width, one seed
    wrong = 0
    for losses in zip(*curves, strict=True):
        above = max(loss - min(losses[: n + 1]) for n, loss in enumerate(losses))
        wrong += above > 0.05 * max(losses)
    return YES if not wrong else NO if wrong == len(curves[0]) else PART


def stays_at_the_kernel(recipe: str, part: str) -> str:
    kernel, record = study(recipe, "kernel regression"), parts(recipe)[part]
    (width,) = kernel.widths
    verdicts = []
    for step in range(5):
        values = [run["rows"][step]["test_accuracy"] for run in record["results"]]
        error = math.sqrt(variance(values) / len(values)) if len(values) > 1 else None
        verdicts.append(alike(kernel.number(width), [(mean(values), error)], 0.03))
    return NO if NO in verdicts else YES if set(verdicts) == {YES} else UNKNOWN


def printed(scheme: str, rows: dict[str, tuple[str, str, str]]) -> str:
    """(b, c) of input, output and hidden weights by the closed forms for a = 0 (docs/theory.md), r = 0 or 1/2."""
    powers = {"sgd": (0, 0), "shampoo": (0.5, 0.5), "kfac": (1, 1), "foof": (1, 0)}
    for method, cells in rows.items():
        e_A, e_B = powers[method]
        if scheme == "mup":
            expected = [(0, e_B - 1), (1, 1 - e_A), (0.5, e_B - e_A)]
        else:  # lazy: the input's learning rate stays, and the sums over a fan-in are divided by it
            expected = [(0, 0), (0.5, 1 - e_A), (0.5, 1 - e_A)] if scheme == "lazy" else [(0, 0), (0.5, 0), (0.5, 0)]
        found = [tuple(float(Fraction(number.strip())) for number in cell.split(",")) for cell in cells]
        if found != expected:
            return NO
    return YES


# From the words of a claim to its rule. A recipe and the claim's groups are passed on.

RULES: list[tuple[str, Callable[..., str]]] = [
    (r"(.+), SGD: in SP the best learning rate falls .*", lambda r, n: moves(r, f"{n}, SGD, SP", direction=-1)),
    (r"(.+), SGD: in muP it stays\.", lambda r, n: stays(r, f"{n}, SGD, muP")),
    (r"(.+), K-FAC: in SP with the heuristic damping it shifts\.", lambda r, n: moves(r, f"{n}, K-FAC, SP")),
    (r"(.+), K-FAC: in muP with the rescaled damping it stays\.", lambda r, n: stays(r, f"{n}, K-FAC, muP")),
    (r"(.+), K-FAC: in muP wider is better\.", lambda r, n: wider(r, f"{n}, K-FAC, muP")),
    (r"(.+), K-FAC: in muP wider is better at one .*", lambda r, n: wider_there(r, f"{n}, K-FAC, muP")),
    (r"(.+, K-FAC): at the widest muP is better than SP.*", lambda r, n: outperforms(r, f"{n}, muP", f"{n}, SP")),
    (r"(.+, K-FAC): in SP test accuracy at the widest is lower .*", lambda r, n: narrower(r, f"{n}, SP")),
    (r"(.+, K-FAC): in SP it is lower at the widest for a fixed .*", lambda r, n: narrower_there(r, f"{n}, SP")),
    (r"(SGD|K-FAC): in UP the best learning rate stays\.", lambda r, n: stays(r, f"MLP, {n}, UP")),
    (r"(SGD|K-FAC): at the widest UP .*", lambda r, n: outperforms(r, f"MLP, {n}, muP", f"MLP, {n}, UP")),
    (r"In (SP|muP) the best learning rate (?:stays|is stable too)\.", lambda r, n: stays(r, only(r, n))),
    (r"In muP wider is better\.", lambda r: wider(r, only(r, "muP"))),
    (r"In muP wider is better at one .*", lambda r: wider_there(r, only(r, "muP"))),
    (r"(MLP|CNN): in muP the best learning rate stays\.", lambda r, n: stays(r, f"{n}, muP")),
    (r"(MLP|CNN): at the widest muP is better than SP\.", lambda r, n: outperforms(r, f"{n}, muP", f"{n}, SP")),
    (r"(.+): in SP with the heuristic the best damping grows .*", lambda r, n: moves(r, f"{n}, SP, heuristic", 2, 1)),
    (r"(.+): in muP with the rescaled rule it stays\.", lambda r, n: stays(r, f"{n}, muP, rescaled", 2)),
    (
        r"(.+): at the widest muP with the rescaled rule .*",
        lambda r, n: outperforms(r, f"{n}, muP, rescaled", f"{n}, SP, heuristic", 2),
    ),
    (r"(.+): with the heuristic the maximum damping .*", lambda r, n: edge(r, f"{n}, SP, heuristic", max)),
    (r"(.+): with the heuristic the minimum damping .*", lambda r, n: edge(r, f"{n}, SP, heuristic", min)),
    (r"(?:(.+), )?(K-FAC|Shampoo): in SP (?:the change|it) .*", lambda r, *n: depends(r, f"{joined(n)}, SP")),
    (r"In SP the change of features depends on the width\.", lambda r: depends(r, "SP")),
    (r"(?:(.+), )?(K-FAC): .* decays\.", lambda r, *n: decays(r, f"{joined(n)}, muP, heuristic")),
    (r"(.+): the rescaled damping scales as .*", lambda r, n: damping_scales(r, f"{n}, muP, rescaled")),
    (r"(.+): the rescaled damping is valid: .*", lambda r, n: damping_valid(r, f"{n}, muP, rescaled")),
    (
        r"(.+): the heuristic damping is valid in hidden .*",
        lambda r, n: damping_valid_inside(r, f"{n}, muP, heuristic"),
    ),
    (
        r"(SGD|Shampoo) is almost the same .* within 3 points\.",
        lambda r, n: alike(nngp_number(n, 1), [nngp_number(n, b) for b in (2, 4, 16, 64)], 0.03),
    ),
    (
        r"K-FAC falls to the kernel's solution .* within 3 points\.",
        lambda r: alike(study(r, "kernel regression").number(32), [nngp_number("K-FAC", 64)], 0.03),
    ),
    (
        r"K-FAC is better at b_L = 1 than (at 0\.5|far above it)\.",
        lambda r, where: {1: YES, 0: UNKNOWN, -1: NO}[
            order(best_of_words("K-FAC", "1"), best_of_words("K-FAC", "0.5" if "0.5" in where else "64"))
        ],
    ),
    (
        r"Shampoo is about as good at every b_L above 1 .*",
        lambda r: alike(best_of_words("Shampoo", "1"), [best_of_words("Shampoo", b) for b in ("1.5", "2", "64")], 0.05),
    ),
    (
        r"(?:(.+), )?(K-FAC): (?:with|in muP with) the rescaled damping it does not\.",
        lambda r, *n: learns(r, f"{joined(n)}, muP, rescaled"),
    ),
    (r"(?:(.+), )?(Shampoo): in muP it does not\.", lambda r, *n: learns(r, f"{joined(n)}, muP")),
    (r"In muP with its damping features are learned at every width\.", lambda r: learns(r, "muP")),
    (r"In muP features are learned at every width whatever .*", lambda r: everywhere(r, "muP", lambda n: learns(r, n))),
    (
        r"In SP it decays in the input and hidden layers .*",
        lambda r: everywhere(r, "SP", lambda n: decays(r, n, "fc1", "fc2")),
    ),
    (r"The (input|hidden|output) layer's step .* as width\^(-?\d), from .*", lambda r, *n: step_over_gradient(*n)),
    (
        r"K-FAC, batch (\d+): b_L = 1 beats (.+)\.",
        lambda r, n, b: better(cnn_number(r, "K-FAC", "1", n), cnn_number(r, "K-FAC", b, n)),
    ),
    (
        r"SGD, batch (\d+): b_L = 1 is not better than 64\.",
        lambda r, n: better(cnn_number(r, "SGD", "64", n), cnn_number(r, "SGD", "1", n), or_equal=True),
    ),
    (r"K-FAC: what b_L = 1 gains over 64 is less .*", gains_grow),
    (
        r"K-FAC is worse where b_L is much above 1 than at 1\.",
        lambda r: better(nngp_number("K-FAC", 1), nngp_number("K-FAC", 64)),
    ),
    (
        r"K-FAC: no b_L above 1 beats 1\.",
        lambda r: joined_verdicts(
            [better(nngp_number("K-FAC", 1), nngp_number("K-FAC", b), True) for b in (2, 4, 16, 64)]
        ),
    ),
    (r"K-FAC: the training accuracy is highest at b_L = 1 alone\.", training_highest_at_one),
    (r"K-FAC at b_L = 64 has a high test accuracy after the first .*", higher_at_first),
    (
        r"In the end it is lower\.",
        lambda r: better(cnn_number(r, "K-FAC", "1", "1024"), cnn_number(r, "K-FAC", "64", "1024")),
    ),
    (r"The best learning rate of b_L = 64 is smaller .*", smaller_rate),
    (r"In SP the accuracy of word analogies falls .*", lambda r: narrower(r, "SP")),
    (r"In muP it does not fall\.", lambda r: does_not_fall(r, "muP")),
    (r"In muP the training loss is lower the wider, throughout\.", lambda r: loss_falls_throughout(r, "muP")),
    (
        r"At the widest the correlation with WordSim-353 is higher .*",
        lambda r: {1: YES, 0: UNKNOWN, -1: NO}[
            correlations_in_order(*(in_another_metric(study(r, n), 1024, "words/similarity") for n in ("muP", "SP")))
        ],
    ),
    (
        r"K-FAC at b_L = 64 with eps = 1e-06 has the kernel's .*",
        lambda r: stays_at_the_kernel(r, "K-FAC, b_L = 64, eps = 1e-06"),
    ),
    (
        r"K-FAC at b_L = 64 without an eps has the kernel's .*",
        lambda r: stays_at_the_kernel(r, "K-FAC, b_L = 64, eps = 0"),
    ),
    (r"The conditions of muP give these exponents .*", lambda r: printed("mup", PRINTED_MUP)),
    (
        r"SP: b = 0 for input weights, 1/2 for the others, c = 0\.",
        lambda r: printed("sp", {"kfac": ("0, 0", "1/2, 0", "1/2, 0")}),
    ),
    (r"The uniform parametrization at r = 1/2 has these .*", lambda r: printed("lazy", PRINTED_LAZY)),
    (r"The damping that is best at width 64 is best .*", lambda r: scalings("narrow")),
    (r"With the damping tuned at width 1024 .*", lambda r: scalings("wide")),
    (r"(ResNet-18, .+): muP has the higher accuracy at large widths\.", lambda r, n: table_3(r, n, early=False)),
    (r"(ResNet-18, .+): at the widest muP has it within a third .*", lambda r, n: table_3(r, n, early=True)),
]


def correlations_in_order(a: Number, b: Number) -> int:
    """Of one seed: by more than 5 percent of the larger."""
    gap = 0.05 * max(abs(a[0]), abs(b[0]))
    return int(a[0] - b[0] > gap) - int(b[0] - a[0] > gap)


def joined(names: tuple[str | None, ...]) -> str:
    return ", ".join(name for name in names if name)


def only(recipe: str, scheme: str) -> str:
    (name,) = (name for name in parts(recipe) if name.endswith(f", {scheme}"))
    return name


def claims() -> list[tuple[str, str, str, str]]:
    return [
        (path.parent.name, claim["claim"], claim["verdict"], claim["measured"])
        for path in sorted(KEPT.glob("*/result.json"))
        for claim in json.loads(path.read_text(encoding="utf-8"))["claims"]
    ]


def rule_of(recipe: str, claim: str) -> Callable[[], str]:
    if claim == "At the widest muP is better than SP.":
        if recipe == "training_curve-left":  # at one learning rate
            return lambda: better(*(study(recipe, name).number(1024) for name in ("muP", "SP")))
        return lambda: outperforms(recipe, only(recipe, "muP"), only(recipe, "SP"))
    if recipe == "nngp" and claim == "K-FAC is better at b_L = 1 than at 0.5.":
        return lambda: better(*(study(recipe, f"K-FAC, b_L = {b}, batch 1024").number(32) for b in ("1", "0.5")))
    for pattern, rule in RULES:
        if match := re.fullmatch(pattern, claim):
            return lambda: rule(recipe, *match.groups())
    raise AssertionError(f"{recipe}: no rule for {claim!r}")


@pytest.mark.parametrize(("recipe", "claim", "verdict", "measured"), claims())
def test_the_verdict_is_found_again(recipe: str, claim: str, verdict: str, measured: str) -> None:
    """Of every claim: one without a rule here fails."""
    assert rule_of(recipe, claim)() == verdict, measured


def test_every_kept_recipe_is_judged() -> None:
    assert {recipe for recipe, *_ in claims()} == {path.parent.name for path in KEPT.glob("*/evidence.json")}
    assert len(claims()) > 150
