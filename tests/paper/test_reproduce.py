"""Recipes are run once whatever happens meanwhile, by one process or by several, and say how they were made smaller."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from mukron.cli import app
from mukron.paper import (
    RECIPES,
    Finding,
    Less,
    Outcome,
    ReproductionError,
    Request,
    Scale,
    load_evidence,
    parts,
    reproduce,
)
from mukron.paper import outcome as results
from mukron.paper import run as running
from mukron.paper.recipe import FAILS
from mukron.params import ParametrizationError
from mukron.study import work
from mukron.study.database import sqlite_at
from mukron.study.store import ENDED, Store
from mukron.study.transfer import DATABASE, STUDY_NAME
from mukron.workers import foreman

TRANSFER, CHECKS = "shampoo-lr-transfer", "gauss-newton-coordinate"  # two parts each: of four runs, and a check
pytestmark = pytest.mark.filterwarnings("ignore:layer .* factorized with:RuntimeWarning")


def request(folder, *names, **options) -> Request:
    return Request(names, Scale.SMOKE, str(folder), **options)


@pytest.fixture
def trained(monkeypatch):
    """The learning rates and widths that are trained, and the methods that are checked, from now on."""
    seen = []
    train, check_run = work.train, parts.check_run

    def counted(config, *args, **options):
        seen.append((config.scheme, config.width, config.lr))
        return train(config, *args, **options)

    def counted_check(config, **options):
        seen.append((config.method, config.scheme))
        return check_run(config, **options)

    monkeypatch.setattr(work, "train", counted)
    monkeypatch.setattr(parts, "check_run", counted_check)
    return seen


def times_ended(asked: Request) -> Counter:
    """How often every point of its studies was trained to its end, as their storages have it."""
    stores = [
        (part.title, Store(sqlite_at(part.folder / DATABASE), STUDY_NAME, part.part.config, part.part.metric))
        for part in asked.parts()
        if (part.folder / DATABASE).exists()
    ]
    entries = [(title, entry) for title, store in stores for entry in store.entries()]
    return Counter((title, entry.point) for title, entry in entries if entry.state == ENDED)


def numbers(folder, name):
    """The evidence without the time that it took."""
    return {
        (part, result.point): [dict(row) for row in result.rows]
        for part, found in load_evidence(folder / name).items()
        for result in found.results
    }


def test_what_was_stopped_in_its_middle_goes_on_there(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(running, "REPORT_INTERVAL", 0.0)  # it tells at every step of every run
    asked = request(tmp_path, TRANSFER)

    def stop(at):
        if at.runs == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(asked, progress=stop)
    assert not (tmp_path / TRANSFER).exists()
    before = times_ended(asked)
    assert len(before) == 5
    trained.clear()
    told = []
    reproduce(asked, progress=told.append)
    assert len(trained) == 8 - 5
    after = times_ended(asked)
    assert set(after.values()) == {1}
    assert set(before) < set(after)
    assert (told[0].runs >= 5, told[-1].runs, told[-1].of_runs, told[-1].parts, told[-1].now) == (True, 8, 8, 2, "")
    trained.clear()
    reproduce(asked)  # once more: all is there
    assert trained == []


@pytest.mark.parametrize("name", ["abc-parametrization", CHECKS])
def test_a_result_names_its_commit_and_minutes(tmp_path, monkeypatch, name):
    """Of a recipe that runs nothing, and of one whose parts were run."""
    monkeypatch.setattr(results, "source_commit", lambda: "0123456789ab")
    reproduce(request(tmp_path, name))
    stored = Outcome.load(tmp_path / name)
    assert stored.made["commit"] == "0123456789ab"
    assert (stored.minutes > 0) == bool(stored.made["runs"].endswith("training"))


def test_a_part_that_was_stopped_after_its_last_run_is_closed_at_once(tmp_path, trained):
    """By whoever comes by, and not only after all other parts."""
    asked = request(tmp_path, TRANSFER)
    reproduce(asked)
    trained.clear()
    for part in asked.parts():
        (part.folder / parts.COMPLETE_FILE).unlink()
    for part in asked.parts():
        assert part.run(lambda: False, lambda: None, wait=False)
        assert part.is_complete()
    assert trained == []


def test_a_damaged_mark_is_said_with_its_path(tmp_path):
    asked = request(tmp_path, CHECKS)
    reproduce(asked)
    mark = asked.parts()[0].folder / parts.COMPLETE_FILE
    mark.write_text("")
    with pytest.raises(ParametrizationError, match=re.escape(str(mark))):
        reproduce(asked)


def test_a_check_that_is_over_is_not_run_again(tmp_path, trained, monkeypatch):
    monkeypatch.setattr(running, "REPORT_INTERVAL", 0.0)

    def stop(at):
        if at.parts == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(request(tmp_path, CHECKS), progress=stop)
    assert trained == [("gauss-newton", "sp"), ("gauss-newton", "mup")]  # the second was not brought to its end
    trained.clear()
    reproduce(request(tmp_path, CHECKS))
    assert trained == [("gauss-newton", "mup")]


def test_two_workers_find_what_one_does(tmp_path, trained):
    one, two = (request(tmp_path / name, TRANSFER) for name in ("one", "two"))
    alone = reproduce(one)[TRANSFER]
    trained.clear()
    together = reproduce(two, workers=2)[TRANSFER]
    assert trained == []  # other processes did it all
    assert set(times_ended(two).values()) == {1}
    assert [judged.verdict for judged in together.claims] == [judged.verdict for judged in alone.claims]
    ours, theirs = (numbers(tmp_path / name, TRANSFER) for name in ("one", "two"))
    assert ours
    assert set(ours) == set(theirs)
    for point, rows in ours.items():
        for mine, other in zip(rows, theirs[point], strict=True):
            same = {name: value for name, value in other.items() if "seconds" not in name}
            assert {name: mine[name] for name in same} == pytest.approx(same, rel=1e-3)


def test_parts_that_two_recipes_share_are_run_once(tmp_path, trained):
    names = ("train-curve-cnn-fashion-mnist", "b-output-k-fac")
    reproduce(request(tmp_path, names[0]))
    assert len(trained) == 4
    trained.clear()
    found = reproduce(request(tmp_path, *names))
    assert trained == []
    assert list(found) == list(names)
    assert len(list((tmp_path / "runs").iterdir())) == 4
    assert numbers(tmp_path, names[0]) == numbers(tmp_path, names[1])


def test_tables_of_theory_need_no_runs(tmp_path):
    outcome = reproduce(request(tmp_path, "abc-parametrization"))["abc-parametrization"]
    assert (outcome.verdict, outcome.made["runs"]) == ("holds", "none: theory alone")
    assert not (tmp_path / "runs").exists()


# Less than all.


def test_less_of_a_part_is_less_of_everything_that_it_has():
    less = Less(epochs=3, widths=(512, 1024, 7), seeds=1)
    assert less.words() == "3 epochs at most, widths 512, 1024, 7, 1 seed at most"
    part = RECIPES["zero-transfer"].experiment(Scale.PAPER, less).parts["MLP, K-FAC, muP"]
    assert (part.config.epochs, part.widths, part.seeds) == (3, (512, 1024), (0,))
    check = RECIPES["coordinate"].experiment(Scale.PAPER, less).parts["MLP, K-FAC, SP"]
    assert (check.widths, check.seeds, check.steps) == ((512, 1024), 1, 10)
    narrow = RECIPES["coordinate"].experiment(Scale.PAPER, Less(widths=(512,))).parts["MLP, K-FAC, SP"]
    assert narrow.widths == (512, 1024)  # a check takes two
    with pytest.raises(ReproductionError, match="zero-transfer: has none of the widths asked for; its own: 512, 1024"):
        RECIPES["zero-transfer"].experiment(Scale.PAPER, Less(widths=(7,)))
    longer = RECIPES["zero-transfer"].experiment(Scale.PAPER, Less(epochs=1000, seeds=9)).parts
    assert longer == RECIPES["zero-transfer"].experiment(Scale.PAPER).parts


def test_less_is_run_and_said(tmp_path, monkeypatch):
    words = ["reproduce", TRANSFER, "--scale", "smoke", "--epochs", "1", "--widths", "64", "--seeds", "1"]
    monkeypatch.setattr("sys.argv", ["mukron", *words])
    said = invoke(*words, "--out", tmp_path)
    assert said.exit_code == 0, said.output
    outcome = Outcome.load(tmp_path / TRANSFER)
    assert outcome.less == "1 epoch at most, widths 64, 1 seed at most"
    assert outcome.made["command"] == f"mukron {' '.join(words)}"
    assert f"reduced: {outcome.less}" in (tmp_path / "README.md").read_text()
    for (_, point), rows in numbers(tmp_path, TRANSFER).items():
        assert point.width == 64
        assert [row["epoch"] for row in rows] == [1]


@pytest.fixture
def images(tmp_path):
    """A folder as ImageNet's, of three classes and a few small images."""
    Image = pytest.importorskip("PIL.Image")
    draws = np.random.RandomState(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("n01", "n02", "n03"):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draws.randint(0, 256, (40, 48, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "imagenet"


def test_imagenet_at_the_papers_scale_on_a_folder_of_images(tmp_path, images, monkeypatch, trained):
    """All settings are the paper's, but for the size of images and the number of learning rates, widths and epochs."""
    name = "imagenet-lr-width"
    whole = RECIPES[name]

    def make(scale):
        made = whole.make(scale)
        part = made.parts["muP"]
        smaller = part.config.replace(data_options={"size": 32})
        return dataclasses.replace(made, parts={"muP": dataclasses.replace(part, lr=(0.2,), config=smaller)})

    monkeypatch.setitem(RECIPES, name, dataclasses.replace(whole, make=make))
    less = Less(epochs=1, widths=(2.0,), seeds=1)
    outcome = reproduce(Request((name,), Scale.PAPER, str(tmp_path / "out"), less, data_dir=str(images)))[name]
    assert trained == [("mup", 2, 0.2)]
    assert (outcome.scale, outcome.less) == ("paper", "1 epoch at most, widths 2, 1 seed at most")
    [result] = load_evidence(tmp_path / "out" / name).study("muP").results
    assert (result.status, len(result.rows)) == ("finished", 1)
    assert {judged.verdict for judged in outcome.claims} == {"cannot be determined"}  # one width


# The command.


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nngp", "no-such", "nor-this"), "no recipe is called no-such, nor-this"),
        ((), "name recipes, or say --all"),
        (("nngp", "--all"), "name recipes, or say --all"),
        (("nngp", "--scale", "tiny"), "--scale 'tiny': known: smoke, small, paper"),
        (("nngp", "--widths", "many"), "--widths"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_before_anything_is_written(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    said = invoke("reproduce", *arguments)
    assert (said.exit_code, said.stdout) == (2, "")
    assert words in " ".join(said.stderr.split())
    assert "Traceback" not in said.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_all_recipes_and_what_is_kept(tmp_path):
    reproduce(request(tmp_path, "abc-parametrization"))
    said = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["reproduce", "--list", "--out", str(tmp_path)])
    assert said.exit_code == 0
    assert all(name in said.stdout for name in RECIPES)
    assert said.stdout.count("holds (smoke)") == 1


def test_the_command_says_what_it_found_and_writes_the_page(tmp_path):
    said = invoke("reproduce", "abc-parametrization", "--scale", "smoke", "--out", tmp_path)
    assert said.exit_code == 0
    assert said.stdout.strip() == str(tmp_path / "README.md")
    assert "abc-parametrization: holds" in said.stderr
    assert "3 of 3 methods as printed" in said.stderr
    (tmp_path / "README.md").unlink()
    assert invoke("reproduce", "--page", "--out", tmp_path).exit_code == 0
    assert "holds" in (tmp_path / "README.md").read_text()


def test_the_exit_code_tells_a_claim_that_does_not_hold_but_not_of_a_smoke_run(tmp_path, monkeypatch):
    name = "abc-parametrization-lazy"
    whole = RECIPES[name]

    def make(scale):
        made = whole.make(scale)
        wrong = dataclasses.replace(made.claims[0], check=lambda evidence: Finding(FAILS, "nothing is as printed"))
        return dataclasses.replace(made, claims=[wrong])

    monkeypatch.setitem(RECIPES, name, dataclasses.replace(whole, make=make))
    assert invoke("reproduce", name, "--scale", "smoke", "--out", tmp_path / "a").exit_code == 0
    assert invoke("reproduce", name, "--scale", "small", "--out", tmp_path / "b").exit_code == 1


def test_a_result_of_another_size_is_not_overwritten(tmp_path):
    assert invoke("reproduce", "abc-parametrization", "--scale", "paper", "--out", tmp_path).exit_code == 0
    said = invoke("reproduce", "abc-parametrization", "--scale", "smoke", "--out", tmp_path)
    assert said.exit_code == 2
    assert "holds a result of another size (paper); choose another folder" in " ".join(said.output.split())
    assert Outcome.load(tmp_path / "abc-parametrization").scale == "paper"


def test_the_page_of_nothing_and_of_names(tmp_path):
    for words, message in (
        (["--page", "--out", str(tmp_path / "none")], "there is no folder"),
        (["abc-parametrization", "--page", "--out", str(tmp_path)], "leave the names out"),
    ):
        said = invoke("reproduce", *words)
        assert said.exit_code == 2
        assert message in " ".join(said.output.split())


def test_a_worker_that_is_killed_is_replaced(tmp_path, monkeypatch):
    """The only worker of two that is left alone would do; here both are killed as soon as they are there."""
    started = []
    plain = foreman.subprocess.Popen

    def start(command, **options):
        process = plain(command, **options)
        started.append(process)
        if len(started) <= 2:
            process.kill()
        return process

    monkeypatch.setattr(foreman.subprocess, "Popen", start)
    found = reproduce(request(tmp_path, CHECKS), workers=2)
    assert set(found) == {CHECKS}
    assert len(started) > 2
