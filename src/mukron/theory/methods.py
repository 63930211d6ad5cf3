"""Optimization methods as the theory sees them: which statistics of a layer they divide by, and to which power.

A method updates  W <- W - eta * P(G)  with G = delta diag(chi) h^T the gradient of a layer u = W h. P divides by powers
of the statistics in ``theory.statistics``, whose eigenvalues have a known size in M.

A method that has an optimizer is added by its record, ``mukron.optim.spec.register``; others are rows of ``METHODS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mukron.readers import exact_number, shown
from mukron.theory.power import Number, Power
from mukron.theory.roles import Role
from mukron.theory.statistics import V_L, V_LR, V_R, A, B, EntrySquare, K, L, R, S, Statistic, V


@dataclass(frozen=True)
class Method:
    """A method of optimization: its update is the gradient divided by powers of statistics of the layer.

    Attributes:
        name: The name by which ``get_method`` finds it.
        title: The name in tables.
        factors: The statistics that the gradient is divided by, each with its exponent.
        matrices_only: Whether it is for matrices inside a network alone: biases, and by default embeddings and output
            layers, are left to a fallback rule.
        gradients_alone: Whether it needs nothing but gradients, so that it can take matrices that no layer is called
            with: fused projections of attention, recurrent and bare ones.

    Example:
        >>> from mukron.theory import get_method
        >>> kfac = get_method("kfac")
        >>> [(statistic.name, str(exponent)) for statistic, exponent in kfac.factors]
        [('A', '1'), ('B', '1')]
    """

    name: str
    title: str
    factors: tuple[tuple[Statistic, Fraction], ...] = ()
    matrices_only: bool = False
    gradients_alone: bool = False

    @property
    def layerwise(self) -> bool:
        """Whether it works layer by layer, and leaves parameters that it does not take to a fallback rule."""
        return bool(self.damped) or self.matrices_only

    @property
    def has_both_sides(self) -> bool:
        """Whether it divides by the factors A and B, of inputs and of signals, as K-FAC does."""
        return {statistic.name for statistic, _ in self.factors} == {"A", "B"}

    @property
    def e_A(self) -> Fraction:
        """The power of |h|^2 that the method divides by, the paper's e_A (for Shampoo the sum over L and R)."""
        return sum((e for statistic, e in self.factors if statistic.h), Fraction(0))

    @property
    def e_B(self) -> Fraction:
        """The power of |delta|^2 that the method divides by, the paper's e_B."""
        return sum((e for statistic, e in self.factors if statistic.delta), Fraction(0))

    @property
    def entrywise(self) -> bool:
        """Whether each entry of the gradient is divided by a statistic of its own, as in Adam."""
        return any(isinstance(statistic, EntrySquare) for statistic, _ in self.factors)

    @property
    def scale_free(self) -> bool:
        """Whether its steps do not depend on the size of the gradient."""
        return self.entrywise or self.e_A == self.e_B == Fraction(1, 2)

    @property
    def damped(self) -> tuple[Statistic, ...]:
        """The statistics that damping is added to."""
        return tuple(statistic for statistic, _ in self.factors if statistic.damped)

    @property
    def damped_in_vectors(self) -> tuple[Statistic, ...]:
        """Those of them that a bias has: for Shampoo, whose L and R are one factor of a vector, the first alone."""
        return self.damped[:1] if self.gradients_alone else self.damped

    @property
    def has_eps(self) -> bool:
        """Whether an eps guards its division, as in Adam. Methods with damping have none, nor has Lion."""
        return any(statistic.guarded for statistic, _ in self.factors)

    @property
    def shift(self) -> int:
        """The number such that c changes by ``-shift * k`` when a changes by k.

        W = w / M^a shrinks both the gradient of w and its effect on W, hence 2. Adam's update of w does not depend on
        the gradient's size, hence 1. The statistics of K-FAC and Shampoo are derived from u and W, as in the paper,
        not from w.
        """
        return 1 if self.entrywise else 2

    def response(self, role: Role, s: Fraction) -> Power:
        """Return the power p such that one step changes the layer's output by dW h = Theta(M^p).

        The step has the learning rate 1, and a = 0.

        Args:
            role: The role of the layer's weight.
            s: The exponent of the output weights' size, ``scheme.s``.

        Returns:
            The power, by the two sides of the layer and the depth.
        """
        # G h = delta diag(chi) (h^T h) = Theta(M^(fan-in - s) / L); each statistic divides by its size to its exponent
        change = Power(Fraction(role.fan_in), -s * role.fan_out, depth=Fraction(-1))
        return change + -self.divisor(role, s)

    def in_blocks(self, b_in: float, b_out: float) -> float:
        """Return what a learning rate and an eps are multiplied by where matrices are cut into more blocks.

        A block sees |h|^2 / b_in and |delta|^2 / b_out, and divides by less than the whole matrix would.

        Args:
            b_in: The number of blocks along the input side over that at the base width.
            b_out: The number along the output side over that at the base width.

        Returns:
            The factor, b_in^-e_A b_out^-e_B.

        Example:
            >>> from mukron.theory import get_method
            >>> get_method("shampoo").in_blocks(4, 4)
            0.25
        """
        return float(b_in**-self.e_A * b_out**-self.e_B)

    def divisor(self, role: Role, s: Fraction) -> Power:
        """Return the power p such that the method divides the gradient by Theta(M^p); an eps must scale alike.

        Args:
            role: The role of the layer's weight.
            s: The exponent of the output weights' size, ``scheme.s``.

        Returns:
            The power, by the two sides of the layer and the depth.
        """
        return sum((e * statistic.size(role, s) for statistic, e in self.factors), start=Power())


def kronecker(e_A: Number = Fraction(1, 2), e_B: Number = Fraction(1, 2)) -> Method:
    """Return the method that divides by A^e_A on the input side and by B^e_B on the output side.

    K-FAC is (1, 1), FOOF (1, 0), its mirror (0, 1). With (1/2, 1/2) steps do not depend on the size of the gradient.

    Args:
        e_A: The exponent of A = E[h h^T].
        e_B: The exponent of B = E[delta delta^T].

    Returns:
        The method, with the name ``"kronecker:E_A,E_B"``, and ``"kronecker"`` for (1/2, 1/2).

    Example:
        >>> from mukron.theory import kronecker
        >>> kronecker(1, "1/2").name
        'kronecker:1,1/2'
    """
    on_A, on_B = exact_number(e_A), exact_number(e_B)
    factors = ((A, on_A), (B, on_B))
    usual = on_A == on_B == Fraction(1, 2)
    name = "kronecker" if usual else f"kronecker:{on_A},{on_B}"
    title = f"Kronecker ({on_A}, {on_B})"
    return Method(name, title, tuple((statistic, e) for statistic, e in factors if e))


def shampoo(e: Number = Fraction(1, 2), sides: str = "both") -> Method:
    """Return Shampoo: L^(-e/2) G R^(-e/2), or with a factor on one side alone, L^-e G or G R^-e.

    The power e is that of a gradient's whole order: two factors have half of it each, one factor has all of it. L and R
    have the same size, so all three have one law. For the gradient of a single batch they are the same step.

    Args:
        e: The sum of the exponents. The usual Shampoo has 1/2.
        sides: Which sides have a factor: "both", "input" (R) or "output" (L).

    Returns:
        The method.

    Raises:
        ValueError: e is negative, or there are no such sides.

    Example:
        >>> from mukron.theory import Role, shampoo, solve
        >>> shampoo("1/4").title
        'Shampoo (e = 1/4)'
        >>> print(-solve(shampoo(sides="output"))[Role.HIDDEN].c)
        r_out^1/2 / r_in^1/2
    """
    e = exact_number(e)
    if e < 0:
        raise ValueError(f"Shampoo's exponent e must not be negative, got {e}")
    factors = {"both": ((L, e / 2), (R, e / 2)), "input": ((R, e),), "output": ((L, e),)}
    if sides not in factors:
        raise ValueError(f"unknown sides {sides!r}; known: {_quoted(factors)}")
    usual, both = e == Fraction(1, 2), sides == "both"
    name = "shampoo" if usual and both else f"shampoo:{e}" if both else f"shampoo:{e},{sides}"
    notes = [] if usual else [f"e = {e}"]
    notes += [] if both else [f"{sides} side"]
    title = f"Shampoo ({', '.join(notes)})" if notes else "Shampoo"
    return Method(name, title, factors[sides], gradients_alone=True)


SIDES = {"both": V_LR, "input": V_R, "output": V_L}


def soap(sides: str = "both") -> Method:
    """Return SOAP: Adam in the eigenbases of Shampoo's L and R, or of one of them.

    Args:
        sides: Which sides of a gradient are turned into their eigenbasis: "both", "input" or "output".

    Returns:
        The method.

    Raises:
        ValueError: There are no such sides.

    Example:
        >>> from mukron.theory import Role, soap, solve
        >>> print(-solve(soap())[Role.HIDDEN].c, -solve(soap("input"))[Role.HIDDEN].c, sep=", ")
        r_out^1/2 / r_in^1/2, r_in^-1/2
    """
    if sides not in SIDES:
        raise ValueError(f"unknown sides {sides!r}; known: {_quoted(SIDES)}")
    name, title = ("soap", "SOAP") if sides == "both" else (f"soap:{sides}", f"SOAP ({sides} side)")
    return Method(name, title, ((SIDES[sides], Fraction(1, 2)),), matrices_only=True, gradients_alone=True)


@dataclass(frozen=True)
class Family:
    """Methods that differ in a few settings alone, written NAME:SETTINGS, as in "shampoo:1/4" and "soap:input".

    Attributes:
        name: What stands before the colon.
        settings: Their names: keyword arguments of ``make`` and, if there is one, of the optimizer.
        make: From the settings to the method.
        parse: From the text of one setting to its value: an exact number, unless it says otherwise.
        optional: Names of settings that may follow, as text: "shampoo:1/2,input".

    Example:
        >>> from mukron.theory import FAMILIES
        >>> FAMILIES["kronecker"].pattern
        'kronecker:E_A,E_B'
    """

    name: str
    settings: tuple[str, ...]
    make: Callable[..., Method]
    parse: Callable[[str], Any] = exact_number
    optional: tuple[str, ...] = ()

    @property
    def pattern(self) -> str:
        """Return the form that help texts show: "kronecker:E_A,E_B", "shampoo:E[,SIDES]"."""
        optional = "".join(f"[,{name}]" for name in self.optional)
        return f"{self.name}:{(','.join(self.settings) + optional).upper()}"

    def read(self, text: str) -> dict[str, Any]:
        """Return the settings, by name, in the text after the colon.

        Args:
            text: Their values, separated by commas.

        Returns:
            The settings.

        Raises:
            ValueError: There are too many or too few of them, or one is not what it should be.
        """
        parts, least = text.split(","), len(self.settings)
        most = least + len(self.optional)
        if not least <= len(parts) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(f"expected {expected} after the colon, got {len(parts)}")
        needed = dict(zip(self.settings, map(self.parse, parts[:least]), strict=True))
        return needed | dict(zip(self.optional, map(str.strip, parts[least:]), strict=False))


ONE = Fraction(1)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("sgd", "SGD"),
        Method("adam", "Adam", ((V, ONE / 2),)),
        Method("lion", "Lion", ((EntrySquare("V", guarded=False), ONE / 2),)),  # a sign: an entry over its size
        Method("kfac", "K-FAC", ((A, ONE), (B, ONE))),
        Method("foof", "FOOF", ((A, ONE),)),
        Method("foof-mirror", "FOOF's mirror", ((B, ONE),)),
        kronecker(),
        shampoo(),
        soap(),
        Method("muon", "Muon", ((S, ONE / 2),), matrices_only=True, gradients_alone=True),
        Method("gauss-newton", "Gauss-Newton", ((K, ONE),)),
    )
}
FAMILIES: dict[str, Family] = {
    "shampoo": Family("shampoo", ("e",), shampoo, optional=("sides",)),
    "kronecker": Family("kronecker", ("e_A", "e_B"), kronecker),
    "soap": Family("soap", ("sides",), soap, parse=str),
}
ALIASES = {"adamw": "adam", "gn": "gauss-newton"}
TITLES = {"adamw": "AdamW"}  # names that are not their method's own: AdamW has Adam's exponents


def get_method(method: Method | str) -> Method:
    """Return the method of a name.

    Args:
        method: A name in ``METHODS``, ``"shampoo:E[,SIDES]"`` as in ``"shampoo:1/4"`` and ``"shampoo:1/2,input"``,
            ``"kronecker:E_A,E_B"`` as in ``"kronecker:1,1/2"``, or ``"soap:SIDES"`` as in ``"soap:input"``. A
            ``Method`` is returned as it is.

    Returns:
        The method.

    Raises:
        ValueError: There is no method of this name, or what follows its colon is not what it should be.
        TypeError: It is no name.

    Example:
        >>> from mukron.theory import get_method
        >>> get_method("kfac").title
        'K-FAC'
        >>> get_method("kronecker:1,1/2").e_B
        Fraction(1, 2)
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f'method must be a name, such as "kfac", or a Method, got {method!r:.80}')
    name, _, exponents = method.strip().lower().partition(":")
    name = ALIASES.get(name, name)
    family = FAMILIES.get(name)
    if family is not None and exponents:
        try:
            return family.make(**family.read(exponents))
        except ValueError as error:
            raise ValueError(
                f"method {shown(method)}: {error}; examples: 'shampoo:1/4', 'kronecker:1,1/2', 'soap:input'"
            ) from error
    if exponents or name not in METHODS:
        patterns = [family.pattern for family in FAMILIES.values()]
        raise ValueError(f"unknown method {shown(method)}; known: {_quoted([*METHODS, *ALIASES, *patterns])}")
    return METHODS[name]


def method_title(method: Method | str) -> str:
    """Return what people call a method.

    Args:
        method: A method or its name.

    Returns:
        The title of the method, and that of AdamW if this is the name.

    Example:
        >>> from mukron.theory import method_title
        >>> method_title("adamw"), method_title("gn")
        ('AdamW', 'Gauss-Newton')
    """
    name = method.strip().lower() if isinstance(method, str) else ""
    return TITLES.get(name, get_method(method).title)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
