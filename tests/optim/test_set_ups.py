"""Set-ups of several processes: those that differ are refused on all ranks, and none of them waits for another."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from ranks import in_ranks

NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)  # before that fully_shard is for GPUs alone
REPLICATES = NEW and importlib.util.find_spec("torch.distributed._composable.replicate_with_fsdp") is not None

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.parametrize(
    "what",
    [
        *("options_that_differ", "a_scaler", "a_first_step_of_no_length", "layers_added_later"),
        "compressed_gradients",
    ],
)
def test_two_ranks(what, tmp_path):
    in_ranks(f"set_ups:{what}", 2, tmp_path)


@pytest.mark.skipif(not NEW, reason="fully_shard needs torch 2.9 without GPUs")
def test_replicas_with_other_weights_are_refused(tmp_path):
    in_ranks("set_ups:replicas_that_differ", 4, tmp_path)


@pytest.mark.skipif(not REPLICATES, reason="this torch has no such replicate")
def test_replicate_that_makes_dtensors(tmp_path):
    in_ranks("set_ups:replicate_without_shards", 2, tmp_path)


@pytest.mark.skipif(not NEW, reason="fully_shard needs torch 2.9 without GPUs")
@pytest.mark.parametrize("what", ["tensor_parallelism", "sharded_parameters_in_other_places"])
def test_models_that_others_have_spread(what, tmp_path):
    in_ranks(f"set_ups:{what}", 2, tmp_path)
