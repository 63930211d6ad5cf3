"""A transfer study from Python, in one process: resumed, extended, searched, kept."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from small_studies import TINY, lost, times_ended, tiny_study, wanted

from mukron.data import load
from mukron.study import Design, Search, StudyError, StudyRecord, TransferStudy
from mukron.study.progress import progress_of
from mukron.train import RunConfig, train
from mukron.train.records import INTERRUPTED


def test_every_point_is_the_run_it_says(tmp_path):
    record = tiny_study(tmp_path, widths=(8, 16), lr=(0.01, 0.02), seeds=1).run()
    assert len(record.results) == 8
    for result in record.results:
        alone = train(result.point.config(TINY))
        assert result.status == alone.status
        assert [{**row, "seconds": 0} for row in result.rows] == [{**row, "seconds": 0} for row in alone.epochs]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a study that has come to its end, and what it found: tests take a copy of it."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, tiny_study(folder).run()


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished study, as good as the first: see ``test_a_study_that_is_moved_is_still_there``."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_finished_study_runs_nothing_again(finished):
    folder, first = finished
    again = tiny_study(folder)
    record = again.run()
    assert times_ended(again) == dict.fromkeys(wanted(again), 1)
    assert record.results == first.results
    assert record.certificate == first.certificate


@pytest.mark.parametrize(
    ("more", "points"),
    [
        ({"widths": (8, 16, 24)}, 12),
        ({"lr": (0.01, 0.02, 0.03, 0.04)}, 8),
        ({"seeds": 3}, 12),
        ({"schemes": ("sp/heuristic", "mup", "ntk")}, 12),
        ({"damping": (0.5, 1.0)}, 24),
        ({"widths": (32,), "lr": (0.5,), "seeds": 1}, 2),
    ],
)
def test_it_continues_with_more_and_runs_the_new_points_alone(copied, more, points):
    before = len(tiny_study(copied).store.entries())
    study = tiny_study(copied, **more)
    record = study.run()
    assert len(study.store.entries()) - before == points
    assert set(times_ended(study).values()) == {1}
    assert len(record.results) == 24 + points  # what was there before is a part of it


def test_an_interrupted_trial_is_given_back_and_the_rest_is_kept(tmp_path):
    options = {"lr": (0.01, 0.02), "seeds": 1}
    study = tiny_study(tmp_path, **options)

    def interrupt(at):
        if at.done == 2 and at.running:
            import signal

            signal.raise_signal(signal.SIGINT)

    study._reporter = lambda workers, progress: (
        lambda now=False: interrupt(progress_of(study.design, study.store.entries(), 1))
    )
    with pytest.raises(KeyboardInterrupt):
        study.run()
    assert [entry.reason for entry in lost(study)] in ([INTERRUPTED], [])
    assert sum(times_ended(study).values()) in (2, 3)
    assert StudyRecord.load(tmp_path / "study.json").results  # what there was is written down
    tiny_study(tmp_path, **options).run()
    assert times_ended(study) == dict.fromkeys(wanted(study), 1)


def test_a_trial_whose_run_is_kept_continues_in_its_middle(tmp_path):
    options = {"widths": (8,), "lr": (0.01,), "seeds": 1, "schemes": ("mup",), "keep_runs": True}
    study = tiny_study(tmp_path, TINY.replace(epochs=6), **options)
    [point] = wanted(study)
    config = point.config(study.design.config)
    folder = tmp_path / "runs" / config.key()

    def stop(at):
        if at.row and at.row["epoch"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, folder, progress=stop)
    [result] = study.run().results
    assert [row["epoch"] for row in result.rows] == [1, 2, 3, 4, 5, 6]
    alone = train(config).epochs
    assert [row["train_loss"] for row in result.rows] == [row["train_loss"] for row in alone]


def test_a_search_tries_so_many_settings_at_every_width(tmp_path):
    study = tiny_study(tmp_path, search=Search(3), lr=(0.001, 0.1))
    record = study.run()
    assert len(record.results) == 2 * 2 * 3 * 2
    by_slice = {}
    for result in record.results:
        by_slice.setdefault((result.point.scheme, result.point.width), set()).add(result.point.lr)
    assert all(len(rates) == 3 for rates in by_slice.values())
    more = tiny_study(tmp_path, search=Search(4), lr=(0.001, 0.1)).run()
    assert len(more.results) == 2 * 2 * 4 * 2


def test_a_pruner_gives_up_runs_that_fall_behind(tmp_path):
    search = Search(30, "random", "median")
    config = TINY.replace(epochs=8)
    record = tiny_study(tmp_path, config, widths=(8,), schemes=("mup",), seeds=1, lr=(1e-5, 0.05), search=search).run()
    pruned = [result for result in record.results if result.status == "pruned"]
    finished = [result for result in record.results if result.status == "finished"]
    assert len(record.results) == 30
    assert pruned
    assert all(len(result.rows) < 8 and "fell behind" in result.reason for result in pruned)
    assert min(r.value("train_loss", 2) for r in finished) <= min(r.value("train_loss", 2) for r in pruned)
    assert record.certificate is None  # one width
    assert record.best().lr == min(finished, key=lambda result: result.value("train_loss")).point.lr


def test_diverged_runs_are_results_and_are_counted(tmp_path):
    study = tiny_study(tmp_path, lr=(0.01, 1e6), seeds=1)
    seen = []
    record = study.run(progress=seen.append)
    diverged = [result for result in record.results if result.status == "diverged"]
    assert {result.point.lr for result in diverged} == {1e6}
    assert seen[-1].diverged == len(diverged) > 0
    assert all(result.reason for result in diverged)


def test_the_record_survives_its_file_and_names_how_it_was_made(copied):
    record = tiny_study(copied).run(command="mukron transfer --method kfac")
    stored = StudyRecord.load(copied / "study.json")
    assert stored == dataclasses.replace(record, results=stored.results)
    assert [result.to_dict() for result in stored.results] == [result.to_dict() for result in record.results]
    assert stored.made["command"] == "mukron transfer --method kfac"
    assert stored.made["storage"] == "study.db"
    assert "torch" in stored.made["versions"]
    json.loads((copied / "study.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_best_setting_is_the_best_mean_of_those_that_finished(tmp_path):
    record = tiny_study(tmp_path, lr=(0.01, 0.02, 1e6), schemes=("mup",)).run()
    best = record.best(scheme="mup/rescaled:1", width=16)
    means = {}
    for result in record.results:
        if (result.point.scheme, result.point.width, result.status) == ("mup/rescaled:1", 16, "finished"):
            means.setdefault(result.point.lr, []).append(result.value("train_loss"))
    assert best.lr == min(means, key=lambda lr: sum(means[lr]))
    assert (best.scheme, best.width) == ("mup", 16)
    assert record.ranking().rows[0][0] == "1"
    with pytest.raises(StudyError, match="no run at width 99 finished"):
        record.best(width=99)


def test_own_data_that_is_loaded_already_is_for_one_process(tmp_path):
    digits = load("digits")
    study = TransferStudy(Design(TINY, widths=8, lr=0.01, seeds=1), folder=tmp_path, dataset=digits)
    assert len(study.run().results) == 2
    with pytest.raises(StudyError, match="other processes do not have this data set"):
        study.run(workers=2)


@pytest.mark.parametrize("name", ["a b%41", "h#y", "q?x=1", "\N{GREEK SMALL LETTER MU}P"])
def test_the_study_is_in_its_folder_whatever_that_is_called(tmp_path, name):
    """Or it is said that it cannot be: an address knows some characters as its own."""
    said = ""
    try:
        tiny_study(tmp_path / name, widths=(8,), lr=(0.01,), schemes=("mup",), seeds=1).run()
    except StudyError as error:
        said = str(error)
    assert (tmp_path / name / "study.db").exists() or ("?" in name and "choose one without" in said)
    assert {path.name for path in tmp_path.iterdir()} <= {name}


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="a study cannot be kept there"):
        tiny_study(tmp_path / "file" / "study").run()


def test_time_left_is_told_from_what_runs_of_that_width_took(tmp_path):
    study = tiny_study(tmp_path, widths=(8, 16, 32), lr=(0.01,))  # four points a width
    assert progress_of(study.design, [], 1).seconds_left is None
    while claim := study.store.claim(study.design.next):  # as if trained
        study.store.end(claim, "finished", [{"epoch": 1, "train_loss": 1.0}], "", 0.0)
    ended = [dataclasses.replace(entry, seconds=entry.point.width) for entry in study.store.entries()]
    assert progress_of(study.design, ended, 1).seconds_left == 0
    narrow = [entry for entry in ended if entry.point.width == 8]
    expected = 4 * 8 * (16 / 8) + 4 * 8 * (32 / 8)  # by the width, where nothing else is known
    assert progress_of(study.design, narrow, 1).seconds_left == pytest.approx(expected)
    assert progress_of(study.design, narrow, 4).seconds_left == pytest.approx(expected / 4)
    alike = [dataclasses.replace(entry, seconds=5.0) for entry in ended if entry.point.width < 32]
    assert progress_of(study.design, alike, 1).seconds_left == pytest.approx(4 * 5)  # small ones cost the same
    assert progress_of(study.design, alike[:2], 1).seconds_left is None


def test_the_default_is_the_built_in_network():
    assert Design(widths=(64, 128), lr=0.1).config == RunConfig()


def test_a_study_of_the_damping_is_judged_by_its_own_points_where_others_are_stored_too(tmp_path):
    options = {"schemes": ("mup",), "seeds": 1}
    question = {**options, "lr": (0.02,), "damping": (0.5, 1.0, 2.0)}
    tiny_study(tmp_path / "shared", **options).run()  # of the learning rate first, as people do
    shared = tiny_study(tmp_path / "shared", **question).run()
    alone = tiny_study(tmp_path / "alone", **question).run()
    assert {result.point for result in shared.results} == {result.point for result in alone.results}
    assert shared.certificate == alone.certificate
    back = tiny_study(tmp_path / "shared", **options).run()  # and the other way round
    assert {result.point.damping for result in back.results} == {1.0}
    assert {result.point.lr for result in back.results} == {0.01, 0.02, 0.04}


def test_a_study_that_is_moved_is_still_there(tmp_path):
    tiny_study(tmp_path / "one", lr=(0.01,), seeds=1).run()
    (tmp_path / "one").rename(tmp_path / "two")
    moved = tiny_study(tmp_path / "two", lr=(0.01,), seeds=1)
    moved.run()
    assert times_ended(moved) == dict.fromkeys(wanted(moved), 1)


def test_ctrl_c_in_the_last_step_of_a_run_stops_the_study_too(tmp_path):
    """That run has come to its own end, so it does not know that it was stopped."""
    import signal

    study = tiny_study(tmp_path, TINY.replace(epochs=1, batch=None), seeds=1)
    steps = []

    def interrupt_in_second(now=False):
        steps.append(now)
        if sum(times_ended(study).values()) == 1 and len(steps) > 2 and not any(map(callable, steps)):
            steps.append(print)
            signal.raise_signal(signal.SIGINT)

    study._reporter = lambda workers, progress: interrupt_in_second
    with pytest.raises(KeyboardInterrupt):
        study.run()
    assert sum(times_ended(study).values()) < 12


def test_data_is_loaded_before_a_point_is_claimed(tmp_path, monkeypatch):
    """However long that takes, no trial waits for it with its heart not beating."""
    import mukron.study.work as work

    study, running = tiny_study(tmp_path, lr=(0.01,), seeds=1), []

    def slow(*arguments):
        running.append(len(study.store.entries()))
        return load("digits")

    monkeypatch.setattr(work, "dataset_of", slow)
    study.run()
    study.run()  # nothing to do: nothing is loaded
    assert running == [0]


def test_a_point_given_back_while_a_worker_looks_is_taken_up(tmp_path, monkeypatch):
    """Between its claim, which found the point taken, and its look at who is running."""
    study = tiny_study(tmp_path, widths=(8,), lr=(0.01,), schemes=("mup",), seeds=1)
    store = study.store
    theirs = store.claim(study.design.next)
    real = store.claim_many

    def claim(choose):
        mine = real(choose)
        if not mine and store.entries()[0].state == "running":
            store.give_up(theirs, INTERRUPTED)
        return mine

    monkeypatch.setattr(store, "claim_many", claim)
    assert len(study.run().results) == 1


def test_another_metric_judges_again_but_a_search_keeps_its_own(copied):
    again = tiny_study(copied, metric="test_accuracy")
    record = again.run()
    assert record.certificate.metric == "test_accuracy"
    assert len(again.store.entries()) == 24
    with pytest.raises(StudyError, match=r"metric 'bleu': the runs here do not have it; they have epoch, step, lr"):
        tiny_study(copied, metric="bleu", seeds=3).run()
    assert len(again.store.entries()) == 24  # said before anything is trained
    with pytest.raises(StudyError, match="this search goes by train_loss"):
        tiny_study(copied, metric="test_loss", search=Search(2)).run()


def test_numbers_of_numpy_and_single_ones_are_taken(tmp_path):
    import numpy as np

    study = tiny_study(
        tmp_path, widths=2 ** np.arange(3, 5), lr=np.float32(0.5), damping=2.0, seeds=np.arange(2), schemes="mup"
    )
    assert {(p.width, p.lr, p.damping, p.seed) for p in wanted(study)} == {
        (width, 0.5, 2.0, seed) for width in (8, 16) for seed in (0, 1)
    }
    with pytest.raises(StudyError, match=r"expected Search\(trials=...\), got 5"):
        tiny_study(tmp_path, search=5)
