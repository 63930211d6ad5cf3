"""Kronecker preconditioners: one operator a side, W <- W - eta P_out G P_in."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from mukron.linalg import Factor, LowRank, Operator

OUT_SIDE, IN_SIDE = ("B", "L"), ("A", "R")  # factors of the layer's output and of its input


def prepare(
    factors: Mapping[str, Factor], rho: Mapping[str, Tensor], powers: Mapping[str, Fraction], solver: str
) -> tuple[dict[str, Operator], dict[str, str]]:
    """(X + rho_X I)^-e for every factor X, and the rungs of the ladder that were needed."""
    operators, rungs = {}, {}
    for name, factor in factors.items():
        operators[name], rung = factor.prepare(at_least_rounding(rho[name], factor), powers[name], solver)
        if rung:
            rungs[name] = rung
    return operators, rungs


def at_least_rounding(rho: Tensor, factor: Factor) -> Tensor:
    """A factor is damped by at least its own rounding, and one that is all zero (no signal yet) by 1."""
    trace = factor.trace()
    rounding = torch.finfo(trace.dtype).eps * trace.abs() / factor.d
    return torch.maximum(rho, rounding).where(trace + rho != 0, 1.0)


def apply(operators: Mapping[str, Operator], G: Tensor | LowRank) -> Tensor | LowRank:
    """P_out G P_in for G [groups, d_out, d_in], in the form in which G came."""
    for name, operator in operators.items():
        if isinstance(G, LowRank):
            G = G.right(operator) if name in IN_SIDE else G.left(operator)
        else:
            G = operator.right(G) if name in IN_SIDE else operator.left(G)
    return G


def apply_out(operators: Mapping[str, Operator], g: Tensor) -> Tensor:
    """P_out g for a bias's gradient g [groups, d_out]: an input weight whose input is the constant 1."""
    for name, operator in operators.items():
        if name in OUT_SIDE:
            g = operator.left(g.unsqueeze(-1)).squeeze(-1)
    return g
