"""A study's database that was damaged or edited: the study goes on to the same numbers, or names the file."""

from __future__ import annotations

import gc
import shutil
import sqlite3

import pytest
import soak
from storage_edits import edit

from mukron.study import Design, StudyError, TransferStudy
from mukron.train import RunConfig
from mukron.workers import locks
from mukron.workers.locks import locked

DESIGN = Design(
    RunConfig(method="sgd", base_width=8, epochs=1, samples=32), widths=(8, 16), lr=(0.1, 0.2), seeds=2, schemes="mup"
)


def results(folder):
    """All numbers of a study that is run to its end."""
    record = TransferStudy(DESIGN, folder=folder, one_by_one=True).run(progress=False)
    rows = {str(result.point): [{**row, "seconds": 0} for row in result.rows] for result in record.results}
    return dict(sorted(rows.items())), {result.status for result in record.results}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "whole"
    numbers = results(folder)
    gc.collect()
    database = sqlite3.connect(folder / "study.db")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all of it in one file
    database.close()
    return folder, numbers


def test_an_edited_database_is_read_as_it_was_or_refused_by_its_name(study, tmp_path):
    folder, numbers = study

    def use() -> bool:
        try:
            return results(copy) == numbers
        except StudyError as error:
            if f"{copy / 'study.db'}: " not in str(error) or "move it away" not in str(error):
                raise AssertionError(f"unclear: {error}") from error
            raise

    def try_one(seed: int) -> tuple[str, str]:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copyfile(folder / "study.db", copy / "study.db")
        edit(copy / "study.db", seed)
        try:
            return soak.outcome(use)
        finally:
            gc.collect()  # closes connections

    copy = tmp_path / "copy"
    soak.check("a study's database", soak.number(24, slow=105), try_one)


def test_a_held_lock_is_said_and_given_up(study, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "SAID_AFTER", 0.1)
    monkeypatch.setattr(locks, "GIVEN_UP_AFTER", 0.5)
    copy = shutil.copytree(study[0], tmp_path / "copy")
    with (
        locked(copy / "study.db.lock"),
        pytest.warns(RuntimeWarning, match=r"study\.db\.lock: waiting for another process"),
        pytest.raises(StudyError, match=r"study\.db\.lock: another process has held this lock for .*End it"),
    ):
        results(copy)
    assert results(copy) == study[1]


def test_trials_without_their_question_are_not_taken_for_those_of_another(study, tmp_path):
    copy = shutil.copytree(study[0], tmp_path / "copy")
    database = sqlite3.connect(copy / "study.db")
    with database:
        database.execute("DELETE FROM study_user_attributes")
    database.close()
    with pytest.raises(StudyError, match=r"study\.db: damaged, or edited: .*there are trials, but not what they train"):
        results(copy)
