"""Prepared preconditioners: built once from a factor and its damping, applied often to gradients.

Each is a symmetric P, one a group, and acts on matrices G [groups, ., .]:  right(G) = G P,  left(G) = P G.
They are plain tensors inside, so that they can be saved (``state``) and restored (``from_state``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

State = dict[str, Tensor | str | float]


class Operator:
    """A symmetric matrix that is applied and never looked at."""

    kinds: ClassVar[dict[str, type[Operator]]] = {}

    def __init_subclass__(cls) -> None:
        Operator.kinds[cls.__name__] = cls

    def right(self, G: Tensor) -> Tensor:
        raise NotImplementedError

    def left(self, G: Tensor) -> Tensor:
        return self.right(G.mT).mT

    # P = Q C Q^T for those that keep a basis Q; without one, Q = I and C = P

    def inside(self, G: Tensor) -> Tensor:
        """G C."""
        return self.right(G)

    def back(self, G: Tensor) -> Tensor:
        """G Q^T."""
        return G

    def lies_in(self, Q: Tensor | None) -> bool:
        """Whether that is its basis."""
        return Q is None

    @property
    def form(self) -> str:
        """For people: what is held."""
        return type(self).__name__.lower()

    @property
    def memory(self) -> int:
        """Bytes held."""
        held = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return sum(value.numel() * value.element_size() for value in held if isinstance(value, Tensor))

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        """Multiplications to apply it to a gradient of that size."""
        return 0

    def state(self) -> State:
        return {"kind": type(self).__name__, **{field.name: getattr(self, field.name) for field in fields(self)}}  # type: ignore[arg-type]

    @staticmethod
    def from_state(state: State) -> Operator:
        return Operator.kinds[str(state["kind"])](**{name: value for name, value in state.items() if name != "kind"})


@dataclass(frozen=True)
class Identity(Operator):
    """P = I."""

    def right(self, G: Tensor) -> Tensor:
        return G


@dataclass(frozen=True)
class Matrix(Operator):
    """P itself [groups, d, d]."""

    P: Tensor

    @property
    def form(self) -> str:
        return f"matrix {self.P.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return d_out * d_in * (d_in if in_side else d_out)

    def right(self, G: Tensor) -> Tensor:
        return torch.bmm(G, self.P)


@dataclass(frozen=True)
class Diagonal(Operator):
    """P = diag(p), p [groups, d]."""

    p: Tensor

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return d_out * d_in

    def right(self, G: Tensor) -> Tensor:
        return G * self.p.unsqueeze(-2)


@dataclass(frozen=True)
class SampleSpace(Operator):
    """P = (X^T X / n + rho I)^-1 for few rows X [groups, N, d], N < d, without a d x d matrix.

    S = (X X^T / n + rho I)^-1 is N x N, and by Woodbury's identity  P = (I - X^T S X / n) / rho.
    """

    X: Tensor
    S: Tensor
    rho: Tensor
    n: float

    @property
    def form(self) -> str:
        return f"sample space, {self.X.shape[-2]} rows of {self.X.shape[-1]}"

    def work(self, d_out: int, d_in: int, in_side: bool) -> int:
        return 2 * self.X.shape[-2] * d_out * d_in

    def right(self, G: Tensor) -> Tensor:
        # G P = (G - (G X^T S) X / n) / rho
        along = torch.bmm(torch.bmm(G, self.X.mT), self.S)
        return torch.baddbmm(G, along, self.X, alpha=-1 / self.n).div_(self.rho[:, None, None])

    def left(self, G: Tensor) -> Tensor:
        along = torch.bmm(self.S, torch.bmm(self.X, G))
        return torch.baddbmm(G, self.X.mT, along, alpha=-1 / self.n).div_(self.rho[:, None, None])

    def own_rows(self, D: Tensor) -> Tensor:
        """What turns D^T X into D^T X P, with no division by rho:  X P = S X  (the push-through identity)."""
        return torch.bmm(self.S, D)


@dataclass(frozen=True)
class LowRank:
    """A gradient as it arises: G = D^T H, signals D [groups, N, d_out] and inputs H [groups, N, d_in] of one batch.

    Preconditioning its two sides costs N^2 d each instead of the N d^2 that G itself would.
    """

    D: Tensor
    H: Tensor

    @staticmethod
    def is_cheaper(rows: int, d_out: int, d_in: int) -> bool:
        return rows * (d_in + d_out) < d_in * d_out

    def right(self, operator: Operator) -> LowRank:
        if isinstance(operator, SampleSpace) and same(operator.X, self.H):
            return LowRank(operator.own_rows(self.D), self.H)
        return LowRank(self.D, operator.right(self.H))

    def left(self, operator: Operator) -> LowRank:
        if isinstance(operator, SampleSpace) and same(operator.X, self.D):  # the empirical Fisher's
            return LowRank(operator.own_rows(self.D), self.H)
        return LowRank(operator.right(self.D), self.H)

    def matrix(self) -> Tensor:
        return self.D.mT @ self.H


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one and the same memory."""
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride())
