"""Which points a study has, in which order, and what cannot be one."""

from __future__ import annotations

from math import log2

import pytest
from small_studies import TINY
from torch import nn

from mukron.damping import Heuristic, Rescaled
from mukron.optim import SPECS
from mukron.study import Point, Result, Search, StudyError, usual_schemes
from mukron.study.design import TRIES, Design
from mukron.study.points import label, read_scheme
from mukron.study.store import ENDED, LOST, RUNNING, WORKER_DIED, Entry
from mukron.train.records import INTERRUPTED

LR = (0.01, 0.02)


def design(**options):
    return Design(**{"config": TINY, "widths": (16, 8), "schemes": ("sp/heuristic", "mup"), "lr": LR, **options})


def entry(number, point, state, loss=0.5, **more):
    result = None
    if state == ENDED:
        result = Result(point, "finished", [{"epoch": 1, "train_loss": loss}])
    return Entry(number, point, state, result, **more)


def test_a_grid_has_every_point_once_all_of_a_seed_first():
    points = list(design(seeds=(0, 1)).points([]))
    assert len(points) == len(set(points)) == design(seeds=(0, 1)).total == 16
    assert [point.seed for point in points] == [0] * 8 + [1] * 8
    assert [point.width for point in points[:8]] == [8] * 4 + [16] * 4
    assert {point.scheme for point in points} == {"sp/heuristic:0.001", "mup/rescaled:1"}


def test_a_point_is_a_run_with_its_own_scheme_width_rate_damping_and_seed():
    config = Point("sp/heuristic:0.001", 16, 0.02, 0.25, 3).config(TINY)
    assert TINY.differences(config).keys() == {"scheme", "width", "lr", "damping", "seed"}
    assert (config.scheme, config.width, config.lr, config.seed) == ("sp", 16, 0.02, 3)
    assert config.damping == Heuristic(0.25)
    assert Point("mup/rescaled:1,0", 8, 0.1, 4.0, 0).config(TINY).damping == Rescaled(4.0, floor=0.0)
    assert Point("mup", 8, 0.1, None, 0).config(TINY.replace(method="sgd")).damping is None


def test_dampings_are_multiples_of_each_schemes_own():
    found = {(p.scheme, p.damping) for p in design(damping=(0.5, 1, 2)).points([])}
    sp, mup = "sp/heuristic:0.001", "mup/rescaled:1"
    assert found == {(sp, 0.0005), (sp, 0.001), (sp, 0.002), (mup, 0.5), (mup, 1.0), (mup, 2.0)}


def test_the_next_point_is_the_first_that_nobody_runs_or_has_run():
    grid = design(seeds=(0,))
    a, b, c, *_ = grid.points([])
    assert grid.next([]) == a
    assert grid.next([entry(0, a, ENDED), entry(1, b, RUNNING)]) == c
    assert grid.next([entry(0, a, ENDED), entry(1, b, LOST, reason=WORKER_DIED)]) == b
    everything = [entry(number, point, RUNNING) for number, point in enumerate(grid.points([]))]
    assert grid.next(everything) is None


def test_a_point_that_kills_its_workers_is_left_alone_until_another_command():
    grid = design(seeds=(0,))
    a, b, *_ = grid.points([])
    deaths = [entry(number, a, LOST, reason=WORKER_DIED) for number in range(TRIES)]
    assert grid.next(deaths[:-1]) == a
    assert grid.next(deaths) == b
    assert grid.deadly(deaths, since=0) == [a]
    assert grid.next(deaths, since=TRIES) == a  # the same command once more tries again
    assert grid.next([entry(number, a, LOST, reason=INTERRUPTED) for number in range(TRIES)]) == a


def test_a_search_proposes_settings_within_their_ranges_and_runs_each_with_every_seed():
    search = design(search=Search(4), seeds=(0, 1), damping=(0.1, 10))
    assert search.total == 2 * 2 * 4 * 2
    entries = []
    while (point := search.next(entries)) is not None:
        assert 0.01 <= point.lr <= 0.02
        unit = 0.001 if point.scheme.startswith("sp") else 1.0
        assert 0.1 * unit <= point.damping <= 10 * unit
        entries.append(entry(len(entries), point, ENDED, loss=point.lr))
    points = [each.point for each in entries]
    assert len(points) == len(set(points)) == search.total
    for scheme, width in search.slices:
        settings = {(p.lr, p.damping) for p in points if (p.scheme, p.width) == (scheme, width)}
        assert len(settings) == 4
    assert search.next(entries) is None
    assert search.by_state(entries)[ENDED] == entries


def test_a_search_comes_near_the_best():
    """The lowest loss is at 2^-4; random settings between 2^-12 and 1 lie within a factor of 2 one time in six."""
    search = design(widths=(8,), schemes=("mup",), lr=(2**-12, 1.0), seeds=(0,), search=Search(20))
    entries = []
    while (point := search.next(entries)) is not None:
        entries.append(entry(len(entries), point, ENDED, loss=(log2(point.lr) + 4) ** 2))
    near = [abs(log2(each.point.lr) + 4) < 1 for each in entries]
    assert sum(near[10:]) >= 5


def test_a_search_goes_on_where_more_trials_are_asked_for():
    small, large = design(search=Search(2), seeds=(0,)), design(search=Search(3), seeds=(0,))
    entries = []
    for search in (small, large):
        while (point := search.next(entries)) is not None:
            entries.append(entry(len(entries), point, ENDED))
        assert len(entries) == search.total


def test_it_survives_the_way_to_another_process():
    import json

    for each in (design(), design(search=Search(5, "random"), damping=(0.5, 2))):
        assert Design.from_dict(json.loads(json.dumps(each.to_dict()))) == each


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"widths": ()}, "widths: expected numbers above 0"),
        ({"lr": (0.1, -1)}, "lr: expected numbers above 0"),
        ({"seeds": ()}, "seeds: expected whole numbers"),
        ({"schemes": ()}, "schemes: expected at least one"),
        ({"schemes": ("mop",)}, r"scheme 'mop'.*as in sp/heuristic:1e-3"),
        ({"schemes": ("mup/rescald",)}, "rescald"),
        ({"config": TINY.replace(method="sgd"), "schemes": ("mup",), "damping": (1, 2)}, "damping: sgd has none"),
        ({"schemes": ("mup/rescaled:0",), "damping": (1, 2)}, "multiples of 0"),
        ({"lr": (0.1,), "search": Search(3)}, "needs two ends"),
        ({"search": Search(3, pruner="median")}, "a pruner compares runs of one width and scheme"),
        ({"config": TINY.replace(method="shampoo")}, "heuristic"),
    ],
)
def test_what_cannot_be_a_study_is_refused(options, said):
    with pytest.raises(StudyError, match=said):
        design(**options)


@pytest.mark.parametrize("options", [{"trials": 0}, {"sampler": "best"}, {"pruner": "garden"}])
def test_what_cannot_be_a_search_is_refused(options):
    with pytest.raises(StudyError, match="search: "):
        Search(**options)


@pytest.mark.parametrize("method", [name for name, spec in SPECS.items() if spec.damping is not None])
def test_a_schemes_own_damping_is_the_optimizers(method):
    (group,) = SPECS[method].optimizer(nn.Linear(4, 3)).param_groups
    assert SPECS[method].damping.plain() == group["damping_rule"]


def test_schemes_have_one_spelling_and_a_name_for_people():
    assert read_scheme("mup", "kfac") == ("mup/rescaled:1", 1.0)
    assert read_scheme("sp/heuristic:0.01", "kfac") == ("sp/heuristic:0.01", 0.01)
    assert read_scheme("mup", "shampoo") == ("mup/max-eigenvalue:1e-06", 1e-6)
    assert read_scheme("mup", "sgd") == ("mup", None)
    assert label("sp/heuristic:0.001") == "SP, heuristic"
    assert label("mup") == "muP"
    assert usual_schemes("kfac") == ("sp/heuristic:0.001", "mup/rescaled:1")
    assert usual_schemes("sgd") == ("sp", "mup")
    assert usual_schemes("shampoo:1/4") == ("sp/max-eigenvalue:1e-06", "mup/max-eigenvalue:1e-06")


def test_points_that_differ_by_rounding_alone_are_one():
    rounded = design(lr=(0.1 * 3, 0.3, 0.1 + 0.2), damping=(0.1 * 3, 0.3))
    assert len(list(rounded.points([]))) == 3 * 2 * 2
    assert design(lr=(0.1 * 3,)).next([entry(0, point, ENDED) for point in design(lr=(0.3,)).points([])]) is None


def test_a_search_whose_range_has_few_numbers_ends():
    search = design(widths=(8,), schemes=("mup",), lr=(1.0, 1.0 + 2e-14), seeds=(0,), search=Search(50))
    entries = []
    while (point := search.next(entries)) is not None:
        assert point not in {each.point for each in entries}
        entries.append(entry(len(entries), point, ENDED))
    assert 0 < len(entries) < 50


def test_a_search_counts_the_settings_within_its_range():
    one = {"widths": (8,), "schemes": ("mup",), "seeds": (0,)}
    grid = [entry(n, point, ENDED) for n, point in enumerate(design(**one, lr=(1e-4, 1e-3)).points([]))]
    search = design(**one, lr=(0.01, 0.02), search=Search(2))
    assert 0.01 <= search.next(grid).lr <= 0.02
    assert search.by_state(grid)[ENDED] == []


def test_a_point_that_was_trained_after_all_is_not_deadly():
    grid = design(seeds=(0,))
    first = next(grid.points([]))
    deaths = [entry(number, first, LOST, reason=WORKER_DIED) for number in range(TRIES)]
    assert grid.deadly([*deaths, entry(TRIES, first, ENDED)], since=0) == []
    assert design(widths=(99,)).deadly(deaths, since=0) == []  # another command's
