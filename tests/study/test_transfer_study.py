"""A transfer study from Python, in one process: resumed, extended, searched, kept."""

from __future__ import annotations

import dataclasses
import json

import pytest
from small_studies import TINY, lost, times_ended, tiny_study, wanted

from mukron.data import load
from mukron.study import Search, StudyError, StudyRecord, TransferStudy
from mukron.study.store import INTERRUPTED
from mukron.study.work import progress_of
from mukron.train import RunConfig, train


def test_every_point_is_the_run_it_says(tmp_path):
    record = tiny_study(tmp_path, widths=(8, 16), lr=(0.01, 0.02), seeds=1).run()
    assert len(record.results) == 8
    for result in record.results:
        alone = train(result.point.config(TINY))
        assert result.status == alone.status
        assert [{**row, "seconds": 0} for row in result.rows] == [{**row, "seconds": 0} for row in alone.epochs]


def test_a_finished_study_runs_nothing_again(tmp_path):
    first = tiny_study(tmp_path).run()
    again = tiny_study(tmp_path)
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
def test_it_continues_with_more_and_runs_the_new_points_alone(tmp_path, more, points):
    tiny_study(tmp_path).run()
    before = len(tiny_study(tmp_path).store.entries())
    study = tiny_study(tmp_path, **more)
    record = study.run()
    assert len(study.store.entries()) - before == points
    assert set(times_ended(study).values()) == {1}
    assert len(record.results) == 24 + points  # what was there before is a part of it


def test_an_interrupted_trial_is_given_back_and_the_rest_is_kept(tmp_path):
    study = tiny_study(tmp_path)

    def interrupt(at):
        if at.done == 5 and at.running:
            import signal

            signal.raise_signal(signal.SIGINT)

    study._teller = lambda workers, progress: (
        lambda now=False: interrupt(progress_of(study.design, study.store.entries(), 1))
    )
    with pytest.raises(KeyboardInterrupt):
        study.run()
    assert [entry.reason for entry in lost(study)] in ([INTERRUPTED], [])
    assert sum(times_ended(study).values()) in (5, 6)
    assert StudyRecord.load(tmp_path / "study.json").results  # what there was is written down
    tiny_study(tmp_path).run()
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
    study = tiny_study(tmp_path, search=Search(4), lr=(0.001, 0.1))
    record = study.run()
    assert len(record.results) == 2 * 2 * 4 * 2
    by_slice = {}
    for result in record.results:
        by_slice.setdefault((result.point.scheme, result.point.width), set()).add(result.point.lr)
    assert all(len(rates) == 4 for rates in by_slice.values())
    more = tiny_study(tmp_path, search=Search(5), lr=(0.001, 0.1)).run()
    assert len(more.results) == 2 * 2 * 5 * 2


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
    study = tiny_study(tmp_path, lr=(0.01, 1e6))
    seen = []
    record = study.run(progress=seen.append)
    diverged = [result for result in record.results if result.status == "diverged"]
    assert {result.point.lr for result in diverged} == {1e6}
    assert seen[-1].diverged == len(diverged) > 0
    assert all(result.reason for result in diverged)


def test_the_record_survives_its_file_and_names_how_it_was_made(tmp_path):
    record = tiny_study(tmp_path).run(command="mukron transfer --method kfac")
    stored = StudyRecord.load(tmp_path / "study.json")
    assert stored == dataclasses.replace(record, results=stored.results)
    assert [result.to_dict() for result in stored.results] == [result.to_dict() for result in record.results]
    assert stored.made["command"] == "mukron transfer --method kfac"
    assert stored.made["storage"] == "study.db"
    assert "torch" in stored.made["versions"]
    json.loads((tmp_path / "study.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_best_setting_is_the_best_mean_of_those_that_finished(tmp_path):
    record = tiny_study(tmp_path, lr=(0.01, 0.02, 1e6)).run()
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
    study = TransferStudy(TINY, widths=(8,), lr=(0.01,), seeds=1, folder=tmp_path, dataset=digits)
    assert len(study.run().results) == 2
    with pytest.raises(StudyError, match="other processes do not have this data set"):
        study.run(workers=2)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="a study cannot be kept there"):
        tiny_study(tmp_path / "file" / "study").run()


def test_time_left_is_told_from_what_runs_of_that_width_took(tmp_path):
    study = tiny_study(tmp_path, widths=(8, 16, 32))
    assert progress_of(study.design, [], 1).seconds_left is None
    study.run()
    ended = [dataclasses.replace(entry, seconds=entry.point.width) for entry in study.store.entries()]
    assert progress_of(study.design, ended, 1).seconds_left == 0
    narrow = [entry for entry in ended if entry.point.width == 8]
    expected = 12 * 8 * (16 / 8) ** 2 + 12 * 8 * (32 / 8) ** 2
    assert progress_of(study.design, narrow, 1).seconds_left == pytest.approx(expected)
    assert progress_of(study.design, narrow, 4).seconds_left == pytest.approx(expected / 4)


def test_the_default_is_the_built_in_network():
    assert TransferStudy(widths=(64, 128), lr=(0.1,)).design.config == RunConfig()
