"""Kernel regression on the last features of untrained networks: what K-FAC's first step from a zero output arrives at.

Legend, for n training samples, m test samples and d features:
    H [n, d]   features, the inputs of the output layer     K = H H^T / d [n, n]
    Y [n, C]   centred one-hot targets                      f(x) = K(x, H) (K + ridge I)^-1 Y
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from mukron.data import Dataset, centred_one_hot
from mukron.diagnose.nngp import feature_kernel, kernel_regression, one_step_ridge
from mukron.paper.recipe import Regression
from mukron.study.points import Point, Result
from mukron.study.record import StudyRecord
from mukron.train.build import network_of
from mukron.train.config import RunConfig
from mukron.train.factories import base_width_of
from mukron.train.records import FINISHED

SAMPLES_AT_ONCE = 1000  # test samples at a time
METRIC = "test_accuracy"


def regress(part: Regression, dataset: Dataset) -> StudyRecord:
    """Returns the accuracies of kernel regression as the record of a study: one result for each seed.

    Args:
        part: The networks and their number.
        dataset: The data of the part's config.

    Returns:
        The record, whose results are called finished and have one row, of epoch 0.

    Example:
        >>> from mukron.train import RunConfig, dataset_of
        >>> config = RunConfig(method="kfac", scheme="mup", damping="rescaled:1", width=128)
        >>> record = regress(Regression(config, (128.0,), seeds=1), dataset_of(config.replace(samples=500)))
        >>> record.results[0].value("test_accuracy") > 0.8
        True
    """
    results = [_of_seed(part, seed, dataset) for seed in range(part.seeds)]
    return StudyRecord("kernel regression", part.config, ("lr",), METRIC, results)


@torch.no_grad()
def _of_seed(part: Regression, seed: int, dataset: Dataset) -> Result:
    began = time.perf_counter()
    (width,) = part.widths
    config = part.config.replace(width=width, seed=seed)
    model, _ = network_of(config, dataset)
    train, test = dataset.train, dataset.test
    x = dataset.prepare(train.inputs, config.weights_dtype)
    Y = centred_one_hot(train.targets, dataset.classes)
    K = feature_kernel(model, x)
    ridge = one_step_ridge(K, damping=part.rho, base_size=_base_size(config, dataset))
    row = {"epoch": 0, "train_accuracy": _accuracy(kernel_regression(K, Y, ridge=ridge), train.targets)}
    outputs = []
    for inputs in torch.split(test.inputs, SAMPLES_AT_ONCE):
        K_test = feature_kernel(model, dataset.prepare(inputs, config.weights_dtype), x)
        outputs.append(kernel_regression(K, Y, K_test, ridge=ridge))
    row[METRIC] = _accuracy(torch.cat(outputs), test.targets)
    point = Point(config.scheme, width, config.lr, part.rho, seed)
    return Result(point, FINISHED, [row], seconds=time.perf_counter() - began)


def _base_size(config: RunConfig, dataset: Dataset) -> int:
    """Returns the fan-in of the output layer, the last linear one, at the base width."""
    model, _ = network_of(config.replace(width=base_width_of(config)), dataset)
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1].in_features


def _accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).double().mean())
