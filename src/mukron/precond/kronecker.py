"""Kronecker preconditioners: one operator a side, W <- W - eta P_out G P_in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from mukron.linalg import Factor, FactorizationError, Inverse, LowRank, Operator, attempt, invert

Layer = tuple[Mapping[str, Factor], Mapping[str, Tensor]]  # its factors, and the damping of each
Prepared = tuple[dict[str, Operator], dict[str, str]]  # operators, and the rungs of the ladder that were needed
Preparation = tuple[list[Prepared | FactorizationError], list[Tensor]]  # and numbers that must be finite
OUT_SIDE, IN_SIDE = ("B", "L"), ("A", "R")  # factors of the layer's output and of its input


def prepare(layers: Sequence[Layer], powers: Mapping[str, Fraction], solver: str, rescue: bool = True) -> Preparation:
    """(X + rho_X I)^-e for every factor X of many layers. What is an inverse is made for all layers at once.

    rescue: look at how the inverses came out, and climb the ladder for those that failed. Without it nothing is read
    from the device, and the caller has to see that the numbers returned are finite.
    """
    rhos = at_least_rounding(layers)
    wanted = {
        (number, name): damped
        for number, (factors, _) in enumerate(layers)
        for name, factor in factors.items()
        if (damped := factor.damped(rhos[number][name], powers[name], solver)) is not None
    }
    numbers: list[Tensor] = []
    if rescue:
        made: Sequence[Inverse | FactorizationError] = invert(list(wanted.values()))
    else:
        matrices, numbers = attempt(list(wanted.values()))
        made = [Inverse(matrix, rho) for matrix, (_, rho) in zip(matrices, wanted.values(), strict=True)]
    inverses = dict(zip(wanted, made, strict=True))
    prepared: list[Prepared | FactorizationError] = []
    for number, (factors, _) in enumerate(layers):
        operators, rungs = {}, {}
        try:
            for name, factor in factors.items():
                inverse = inverses.get((number, name))
                if isinstance(inverse, FactorizationError):
                    raise inverse
                if inverse is None:
                    operators[name], rung = factor.prepare(rhos[number][name], powers[name], solver)
                else:
                    operators[name], rung = factor.operator(inverse), inverse.rung
                if rung:
                    rungs[name] = rung
        except FactorizationError as error:
            prepared.append(error)
        else:
            prepared.append((operators, rungs))
    return prepared, numbers


def at_least_rounding(layers: Sequence[Layer]) -> list[dict[str, Tensor]]:
    """A factor is damped by at least its own rounding, and one that is all zero (no signal yet) by 1.

    All of them as one vector: on a GPU each small operation costs a launch.
    """
    places = [(number, name) for number, (factors, _) in enumerate(layers) for name in factors]
    found: list[dict[str, Tensor]] = [{} for _ in layers]
    for kind in {layers[number][1][name].dtype for number, name in places}:
        some = [(number, name) for number, name in places if layers[number][1][name].dtype == kind]
        factors = [layers[number][0][name] for number, name in some]
        sizes = [len(factor.trace()) for factor in factors]
        traces = torch.cat([factor.trace() for factor in factors])
        rounding = traces * _rounding(kind, traces.device, *zip(sizes, (factor.d for factor in factors), strict=True))
        rho = torch.maximum(torch.cat([layers[number][1][name] for number, name in some]), rounding)
        for (number, name), part in zip(some, torch.split(rho.where(rho != 0, 1.0), sizes), strict=True):
            found[number][name] = part
    return found


@lru_cache(maxsize=64)
def _rounding(kind: torch.dtype, device: torch.device, *sizes: tuple[int, int]) -> Tensor:
    """eps / d for every group of factors with so many groups and d rows."""
    numbers = [torch.finfo(kind).eps / d for groups, d in sizes for _ in range(groups)]
    return torch.tensor(numbers, dtype=kind, device=device)


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
