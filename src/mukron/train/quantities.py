"""Quantities that probes compute from tensors and curvature factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from mukron.linalg import Factor, FactorizationError, MatrixFactor

MAX_DENSE_SIZE = 512  # up to this size all eigenvalues are computed, above it only the largest, iteratively


def first_tensor(output: Any) -> Tensor | None:
    """Returns the first floating-point tensor in a module's output.

    Args:
        output: A tensor, a dataclass, a mapping, a tuple or a list, also nested.

    Returns:
        The tensor, or None if there is none.

    Example:
        >>> first_tensor((None, {"logits": torch.ones(2)}))
        tensor([1., 1.])
    """
    return next(all_tensors(output), None)


def all_tensors(output: Any) -> Iterator[Tensor]:
    """Returns the floating-point tensors in a module's output, in their order.

    Args:
        output: A tensor, a dataclass, a mapping, a tuple or a list, also nested.

    Yields:
        The tensors.

    Example:
        >>> len(list(all_tensors({"logits": torch.ones(2), "hidden": [torch.ones(1), torch.tensor(1)]})))
        2
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    if is_dataclass(output) and not isinstance(output, type):
        output = {field.name: getattr(output, field.name) for field in fields(output)}
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        yield from all_tensors(value)


def rms_difference(now: list[Tensor], before: list[Tensor]) -> float:
    """Returns the root mean square of the difference over all calls of a layer.

    Args:
        now: The layer's outputs, one per call.
        before: The outputs they are compared with.

    Returns:
        The root mean square.

    Example:
        >>> rms_difference([torch.ones(2)], [torch.zeros(2)])
        1.0
    """
    return root_mean_square([sum_of_squares(a, b) for a, b in zip(now, before, strict=True)])


def sum_of_squares(now: Tensor, before: Tensor) -> tuple[float, int]:
    """Returns the sum of the squared differences, and their number.

    Args:
        now: A tensor.
        before: The tensor it is compared with.

    Returns:
        The sum and the number.

    Example:
        >>> sum_of_squares(torch.ones(3), torch.zeros(3))
        (3.0, 3)
    """
    return float((now.double() - before.double()).square().sum()), now.numel()


def root_mean_square(squares: list[tuple[float, int]]) -> float:
    """Returns the root mean square from sums of squares and their numbers.

    Args:
        squares: Pairs of a sum of squares and the number of terms.

    Returns:
        The root mean square.

    Example:
        >>> root_mean_square([(3.0, 3), (1.0, 1)])
        1.0
    """
    return math.sqrt(sum(total for total, _ in squares) / sum(count for _, count in squares))


def largest_eigenvalue(factor: Factor) -> float:
    """Returns the largest eigenvalue of a curvature factor.

    Args:
        factor: The factor; a matrix larger than ``MAX_DENSE_SIZE`` is not decomposed but iterated on.

    Returns:
        The mean over the factor's groups, or NaN if it cannot be computed.

    Example:
        >>> largest_eigenvalue(MatrixFactor(torch.diag(torch.tensor([1.0, 3.0]))[None]))
        3.0
    """
    try:
        if isinstance(factor, MatrixFactor) and factor.d > MAX_DENSE_SIZE and "eigh" not in factor.__dict__:
            return float(torch.stack([_by_lobpcg(M) for M in factor.M]).mean())
        return float(factor.largest_eigenvalue().mean())
    except (LinAlgError, FactorizationError):
        return math.nan


def _by_lobpcg(M: Tensor) -> Tensor:
    """Iterates with LOBPCG on the matrix divided by its trace, whose squares do not overflow."""
    trace = M.trace()
    if not trace > 0 or not trace.isfinite():
        return trace
    start = torch.randn(len(M), 1, generator=torch.Generator().manual_seed(0)).to(M)
    value: Tensor = torch.lobpcg(M / trace, X=start, niter=100)[0][0]
    return value * trace
