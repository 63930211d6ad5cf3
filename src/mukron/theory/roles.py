"""What a parameter does in the network, as far as its width is concerned."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """A parameter's role: which of its two sides grows with the width."""

    INPUT = "input"  # finite -> infinite: the first layer, an embedding
    HIDDEN = "hidden"  # infinite -> infinite
    OUTPUT = "output"  # infinite -> finite: the head
    VECTOR = "vector"  # a bias or gain of an infinite layer: an input weight whose input is the constant 1
    SCALAR = "scalar"  # neither side grows: not scaled (an output bias, a temperature)

    @property
    def fan_in(self) -> int:
        """1 if the fan-in grows with the width, else 0."""
        return int(self in (Role.HIDDEN, Role.OUTPUT))

    @property
    def fan_out(self) -> int:
        """1 if the fan-out grows with the width, else 0."""
        return int(self in (Role.INPUT, Role.HIDDEN, Role.VECTOR))

    @classmethod
    def of(cls, *, fan_in_grows: bool, fan_out_grows: bool, vector: bool = False) -> Role:
        if fan_in_grows:
            return cls.HIDDEN if fan_out_grows else cls.OUTPUT
        if fan_out_grows:
            return cls.VECTOR if vector else cls.INPUT
        return cls.SCALAR

    def __str__(self) -> str:
        return self.value
