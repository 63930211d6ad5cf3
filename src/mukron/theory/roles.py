"""The role of a parameter: which of its sides grow with the width."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """The role of a parameter, which says which of its two sides grow with the width.

    A side that grows with the width is called infinite, one that does not is called finite.

    Attributes:
        INPUT: From a finite to an infinite side: the first layer, an embedding.
        HIDDEN: From an infinite to an infinite side.
        OUTPUT: From an infinite to a finite side: the head.
        VECTOR: A bias or gain of an infinite layer. It scales as an input weight whose input is the constant 1.
        SCALAR: Neither side grows, and nothing is scaled: an output bias, a temperature.

    Example:
        >>> from mukron.theory import Role
        >>> Role.of(fan_in_grows=True, fan_out_grows=False)
        <Role.OUTPUT: 'output'>
        >>> Role("hidden").fan_in
        1
    """

    INPUT = "input"
    HIDDEN = "hidden"
    OUTPUT = "output"
    VECTOR = "vector"
    SCALAR = "scalar"

    @property
    def fan_in(self) -> int:
        """The exponent of the fan-in: 1 if it grows with the width, else 0."""
        return int(self in (Role.HIDDEN, Role.OUTPUT))

    @property
    def fan_out(self) -> int:
        """The exponent of the fan-out: 1 if it grows with the width, else 0."""
        return int(self in (Role.INPUT, Role.HIDDEN, Role.VECTOR))

    @classmethod
    def of(cls, *, fan_in_grows: bool, fan_out_grows: bool, vector: bool = False) -> Role:
        """Find the role of a parameter from what is known of its sides.

        Args:
            fan_in_grows: Whether the fan-in grows with the width.
            fan_out_grows: Whether the fan-out grows with the width.
            vector: Whether the parameter is a bias or a gain, not a weight.

        Returns:
            The role.
        """
        if fan_in_grows:
            return cls.HIDDEN if fan_out_grows else cls.OUTPUT
        if fan_out_grows:
            return cls.VECTOR if vector else cls.INPUT
        return cls.SCALAR

    def __str__(self) -> str:
        return self.value
