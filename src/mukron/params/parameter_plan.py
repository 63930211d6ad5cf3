"""The plan of one parameter, and its plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mukron.layers import Shape
from mukron.params.resolve import Growth
from mukron.params.storage import Data
from mukron.theory import Method, Role
from mukron.typed import fields_of, read_as


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its role, how much its sides grew, and its initial spread.

    Attributes:
        growth: Its role, how much its fan-in and fan-out have grown since the base width, and the depth since the base
            depth if it is inside of a residual block.
        shape: Its shape here.
        base_shape: Its shape at the base width.
        base_std: Standard deviation of its initial values at the base width; 0 if they are all equal.
        std: Standard deviation of its initial values here, once parametrized; None: as drawn, not known (SP on the meta
            device).
        tied: The other names of the same tensor.
        fallback: True if second-order methods do not precondition it (a norm's gain, a bare parameter).
        embedding: True if it belongs to an embedding, which optimizers with a ``trust`` leave to the fallback rule.
        matrix: True if it is a matrix to methods that need gradients alone (Shampoo, SOAP, Muon), even if others cannot
            precondition it: a fused projection of attention, a recurrent weight, a bare one between growing sides.
        ties_head: True if it is the weight of an embedding and of a head, and nothing else uses it.

    Example:
        >>> import mukron
        >>> from mukron.models import MLP
        >>> shapes = mukron.base_shapes(MLP, width=16)
        >>> p = mukron.parametrize(MLP(64), shapes)
        >>> str(p.parameters["fc2.weight"].role)
        'hidden'
    """

    growth: Growth
    shape: Shape
    base_shape: Shape
    base_std: float
    std: float | None
    tied: tuple[str, ...] = ()
    fallback: bool = False
    embedding: bool = False
    matrix: bool = False
    ties_head: bool = False

    def suits(self, method: Method) -> bool:
        """Whether a method that works layer by layer can precondition it.

        Args:
            method: The method.
        """
        if method.matrices_only and len(self.shape) < 2:
            return False
        return not self.fallback or (method.gradients_alone and self.matrix) or self.sums_transposed(method)

    def sums_transposed(self, method: Method) -> bool:
        """Whether a method preconditions it by its uses in an embedding and in a head: one with factors of both sides.

        Args:
            method: The method.
        """
        return self.ties_head and method.has_both_sides and self.role is not Role.OUTPUT

    @property
    def role(self) -> Role:
        """The parameter's role: what grows with the width, its fan-in, its fan-out, both or neither."""
        return self.growth.role


def parameter_to_dict(plan: ParameterPlan) -> Data:
    """Plain JSON data of one parameter's plan."""
    return {
        "role": plan.role.value,
        "r_in": str(plan.growth.r_in),
        "r_out": str(plan.growth.r_out),
        "L": None if plan.growth.L is None else str(plan.growth.L),
        "shape": list(plan.shape),
        "base_shape": list(plan.base_shape),
        "base_std": plan.base_std,
        "std": plan.std,
        "tied": list(plan.tied),
        "fallback": plan.fallback,
        "embedding": plan.embedding,
        "matrix": plan.matrix,
        "ties_head": plan.ties_head,
    }


def parameter_from_dict(entry: Any, place: str) -> ParameterPlan:
    """The inverse of ``parameter_to_dict``; files of older versions lack the last entries."""
    content = dict(fields_of(entry, place, "role", "r_in", "r_out"))
    growth = {name: content.pop(name) for name in ("role", "r_in", "r_out", "L") if name in content}
    plan: ParameterPlan = read_as(ParameterPlan, {**content, "growth": growth}, place)
    if min(plan.growth.r_in, plan.growth.r_out, plan.growth.L or 1) <= 0:
        raise ValueError(f"{place}: expected growth above 0, found {growth}")
    check_sizes(plan.shape, place)
    check_sizes(plan.base_shape, place)
    if len(plan.shape) != len(plan.base_shape):
        raise ValueError(
            f"{place}: expected shapes of one length, found {list(plan.shape)} and {list(plan.base_shape)}"
        )
    return plan


def check_sizes(shape: Shape, place: str) -> None:
    """Refuse a shape with negative sizes."""
    if min(shape, default=0) < 0:
        raise ValueError(f"{place}: expected sizes, found {list(shape)}")
