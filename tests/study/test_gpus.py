"""The workers of a study on a machine with several GPUs; the GPUs are made up."""

from __future__ import annotations

import pytest
import torch
from small_studies import LIGHT, tiny_study

from mukron.study import StudyError
from mukron.study.work import StudyForeman, workers_for


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def foreman(tmp_path, device: str, workers: int) -> StudyForeman:
    study = tiny_study(tmp_path, LIGHT.replace(device=device))
    return StudyForeman(study.job(), study.store, workers, tmp_path / "log")


def seen(foreman: StudyForeman) -> list[str | None]:
    return [foreman.environment(place).get("CUDA_VISIBLE_DEVICES") for place in range(foreman.workers)]


def test_auto_is_one_worker_a_gpu(three_gpus):
    assert workers_for("auto", "cuda") == 3
    assert workers_for("auto", "cuda:1") == workers_for("auto", "cpu") == 1
    assert workers_for("2", "cuda") == workers_for(2, "cpu") == 2


def test_without_gpus_auto_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert workers_for("auto", "cuda") == 1


@pytest.mark.parametrize("workers", [0, "0", "-1", "many", "1.5", True])
def test_other_numbers_are_refused(workers):
    with pytest.raises(StudyError, match=r"workers=.*expected a number of processes, at least 1, or 'auto'"):
        workers_for(workers, "cpu")


def test_each_worker_sees_one_gpu_and_more_workers_take_turns(three_gpus, tmp_path):
    assert seen(foreman(tmp_path, "cuda", 4)) == ["0", "1", "2", "0"]


def test_the_gpus_are_those_that_the_user_has_left_visible(three_gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5a,7")
    assert seen(foreman(tmp_path, "cuda", 3)) == ["4", "GPU-5a", "7"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_device_that_was_named_stays(three_gpus, tmp_path, device):
    assert seen(foreman(tmp_path, device, 2)) == [None, None]
