"""Optimization methods as the theory sees them: which statistics of a layer they divide by, and to which power.

A method updates  W <- W - eta * P(G)  with G = delta diag(chi) h^T the gradient of a layer u = W h, where

    h      the layer's input, one column a sample           |h|^2     = Theta(M^[fan-in grows])
    delta  the derivative of the network's output by u      |delta|^2 = Theta(M^(1 - 2s)), or Theta(1) at the output
    s      a_L + b_L, the exponent of the output weights' size

Every method here divides by powers of factors whose eigenvalues have a size in M known from these two norms:

    A = E[h h^T]          B = E[delta delta^T]                          K-FAC, FOOF and its mirror
    L = E[G G^T]          R = E[G^T G]             both ~ |h|^2 |delta|^2  Shampoo
    K = (delta^T delta) o (h^T h)                       ~ |h|^2 |delta|^2  layer-wise Gauss-Newton (the layer's NTK)
    V = E[G_ij^2]                                  ~ one entry's square    Adam

A method that has an optimizer is added by its record, ``mukron.optim.spec.register``; others are rows of ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from mukron.theory.power import Number, Power
from mukron.theory.roles import Role


@dataclass(frozen=True)
class Factor:
    """A statistic of a layer that a method divides by."""

    name: str
    h: int = 0  # 1 if it contains |h|^2
    delta: int = 0  # 1 if it contains |delta|^2
    damped: bool = True

    def size(self, role: Role, s: Fraction) -> Power:
        """p such that the factor's eigenvalues are Theta(M^p)."""
        return Power(Fraction(self.h * role.fan_in), self.delta * role.fan_out * (1 - 2 * s))


@dataclass(frozen=True)
class EntrySquare(Factor):
    """The square of one entry of the gradient of the *parameter*: entries of h are Theta(1), of delta Theta(M^-s)."""

    damped: bool = False

    def size(self, role: Role, s: Fraction) -> Power:
        return Power(Fraction(0), -2 * s * role.fan_out)


A = Factor("A", h=1)
B = Factor("B", delta=1)
L = Factor("L", h=1, delta=1)
R = Factor("R", h=1, delta=1)
K = Factor("K", h=1, delta=1)
V = EntrySquare("V")


@dataclass(frozen=True)
class Method:
    """A row of exponents: the update is the gradient divided by ``factor ** exponent`` for each of its factors."""

    name: str
    title: str
    factors: tuple[tuple[Factor, Fraction], ...] = ()

    @property
    def e_A(self) -> Fraction:
        """The power of |h|^2 divided by; the paper's e_A (Shampoo's e, split over two factors, adds up to e)."""
        return sum((e for factor, e in self.factors if factor.h), Fraction(0))

    @property
    def e_B(self) -> Fraction:
        """The power of |delta|^2 divided by; the paper's e_B."""
        return sum((e for factor, e in self.factors if factor.delta), Fraction(0))

    @property
    def entrywise(self) -> bool:
        return any(isinstance(factor, EntrySquare) for factor, _ in self.factors)

    @property
    def damped(self) -> tuple[Factor, ...]:
        """The factors that take a damping term."""
        return tuple(factor for factor, _ in self.factors if factor.damped)

    @property
    def shift(self) -> int:
        """c changes by ``-shift * k`` when a changes by k.

        W = w / M^a shrinks both the gradient of w and its effect on W, hence 2. Adam's update of w does not depend on
        the gradient's size, hence 1. K-FAC's and Shampoo's factors are taken by u and W, as in the paper, not by w.
        """
        return 1 if self.entrywise else 2

    def response(self, role: Role, s: Fraction) -> Power:
        """p such that one step of learning rate 1 (at a = 0) moves the layer's output by dW h = Theta(M^p).

        G h = delta diag(chi) (h^T h) is Theta(M^(fan-in - s)); every factor divides by its own size to its power.
        """
        move = Power(Fraction(role.fan_in), -s * role.fan_out)
        for factor, e in self.factors:
            move = move + -e * factor.size(role, s)
        return move


def kronecker(e_A: Number, e_B: Number) -> Method:
    """Any method that divides by A^e_A on the input side and B^e_B on the output side."""
    powers = ((A, Fraction(e_A)), (B, Fraction(e_B)))
    name = f"kronecker:{Fraction(e_A)},{Fraction(e_B)}"
    return Method(name, f"Kronecker ({Fraction(e_A)}, {Fraction(e_B)})", tuple((f, e) for f, e in powers if e))


def shampoo(e: Number = Fraction(1, 2)) -> Method:
    """Shampoo with L^(-e/2) G R^(-e/2); the usual one is e = 1/2."""
    e = Fraction(e)
    if e < 0:
        raise ValueError(f"Shampoo's exponent e must not be negative, got {e}")
    usual = e == Fraction(1, 2)
    name, title = ("shampoo", "Shampoo") if usual else (f"shampoo:{e}", f"Shampoo (e = {e})")
    return Method(name, title, ((L, e / 2), (R, e / 2)))


@dataclass(frozen=True)
class Family:
    """Methods that differ in their exponents alone, written NAME:EXPONENTS, as in "shampoo:1/4".

    Attributes:
        name: What stands before the colon.
        exponents: The names of the exponents: keyword arguments of ``make`` and, if there is one, of the optimizer.
        make: From exact exponents to the method.
    """

    name: str
    exponents: tuple[str, ...]
    make: Callable[..., Method]

    @property
    def pattern(self) -> str:
        """As help texts write it: "kronecker:E_A,E_B"."""
        return f"{self.name}:{','.join(self.exponents).upper()}"

    def read(self, text: str) -> dict[str, Fraction]:
        """The exponents in the text after the colon, by name."""
        parts = text.split(",")
        if len(parts) != len(self.exponents):
            raise ValueError(f"expected {len(self.exponents)} exponents, got {len(parts)}")
        return dict(zip(self.exponents, map(Fraction, parts), strict=True))


ONE = Fraction(1)
SGD = Method("sgd", "SGD")
ADAM = Method("adam", "Adam", ((V, ONE / 2),))
KFAC = Method("kfac", "K-FAC", ((A, ONE), (B, ONE)))
FOOF = Method("foof", "FOOF", ((A, ONE),))
FOOF_MIRROR = Method("foof-mirror", "FOOF's mirror", ((B, ONE),))
SHAMPOO = shampoo()
GAUSS_NEWTON = Method("gauss-newton", "Gauss-Newton", ((K, ONE),))

METHODS: dict[str, Method] = {
    method.name: method for method in (SGD, ADAM, KFAC, FOOF, FOOF_MIRROR, SHAMPOO, GAUSS_NEWTON)
}
FAMILIES: dict[str, Family] = {
    "shampoo": Family("shampoo", ("e",), shampoo),
    "kronecker": Family("kronecker", ("e_A", "e_B"), kronecker),
}
ALIASES = {"adamw": "adam", "gn": "gauss-newton"}


def get_method(method: Method | str) -> Method:
    """The method of that name: one of ``METHODS``, ``"shampoo:1/4"`` or ``"kronecker:1,1/2"``."""
    if isinstance(method, Method):
        return method
    name, _, exponents = method.strip().lower().partition(":")
    name = ALIASES.get(name, name)
    family = FAMILIES.get(name)
    if family is not None and exponents:
        try:
            return family.make(**family.read(exponents))
        except (ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"method {method!r}: {error}; exponents are exact numbers, as in 'shampoo:1/4' or 'kronecker:1,1/2'"
            ) from error
    if exponents or name not in METHODS:
        patterns = [family.pattern for family in FAMILIES.values()]
        raise ValueError(f"unknown method {method!r}; known: {_listed([*METHODS, *ALIASES, *patterns])}")
    return METHODS[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
