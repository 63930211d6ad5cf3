"""Studies of a user's own data, loss and text."""

from __future__ import annotations

import pytest

from mukron.study import Design, StudyError, TransferStudy
from mukron.train import RunConfig, loop


def test_a_metric_that_the_loss_of_ones_own_does_not_have_is_told(tmp_path):
    config = RunConfig(
        **{"model": "users_task:Numbers", "data": "users_task:signs", "loss": "users_task:of_two"},
        **{"method": "adamw", "base_width": 16, "epochs": 1},
    )
    design = Design(config, widths=[16], lr=[0.01, 0.02], metric="train_accuracy")
    with pytest.raises(StudyError, match="'train_accuracy': runs of this study do not have it; they have lr, train_l"):
        TransferStudy(design, folder=tmp_path).run()


def test_a_text_by_any_spelling_of_its_path(tmp_path, monkeypatch):
    def unwanted(*arguments):
        raise AssertionError("a study needs no samples of text")

    (tmp_path / "corpus.txt").write_text("to be or not to be " * 60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "written_sample", unwanted)
    config = RunConfig(
        **{"model": "gpt", "model_options": {"depth": 1}, "base_width": 16, "data": "./corpus.txt", "epochs": 1},
        **{"data_options": {"length": 16}, "samples": 32, "test_samples": 4, "method": "adamw"},
    )
    design = Design(config, widths=[16], lr=[1e-9, 0.02], schemes=["mup"], seeds=1, metric="test_bits_per_byte")
    record = TransferStudy(design, folder=tmp_path / "study").run()
    assert len(record.results) == 2
    assert record.best("mup").lr == 0.02  # fewer bits are better
