"""Damping of several runs at once, each with a rule of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mukron.damping import Rule, Sides
from mukron.linalg import Factor


class EachOwn:
    """A rule for every group: numbers become tensors, one number a group, and each kind of rule is asked for its own.

    rules, sides: one a group. The damping of group g is what rule g says of it with sides g.
    """

    def __init__(self, rules: Sequence[Rule], sides: Sequence[Sides], device: torch.device) -> None:
        self.device = device
        self.members = [  # by kind: its groups, and one rule with all their numbers
            (self._tensor([type(rule) is kind for rule in rules], torch.bool), self._joined(kind, rules))
            for kind in dict.fromkeys(map(type, rules))
        ]
        self.sides = Sides(*(self._columns([getattr(each, name) for each in sides]) for name in ("growth", "scales")))

    def __call__(self, factors: Mapping[str, Factor], peaks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sides = replace(self.sides, peaks=peaks)
        damping: dict[str, Tensor] = {}
        for own, rule in self.members:
            for name, rho in rule(factors, sides).items():
                damping[name] = torch.where(own, rho, damping[name]) if name in damping else rho
        return {name: rho.to(factors[name].trace()) for name, rho in damping.items()}

    def _joined(self, kind: type[Rule], rules: Sequence[Rule]) -> Rule:
        joined = object.__new__(kind)  # every number was checked when its own rule was made
        for each in fields(kind):  # type: ignore[arg-type]
            numbers = [getattr(rule, each.name) if type(rule) is kind else 0.0 for rule in rules]
            object.__setattr__(joined, each.name, self._tensor(numbers))
        return joined

    def _columns(self, rows: Sequence[Mapping[str, float]]) -> Any:
        return {name: self._tensor([row.get(name, 1.0) for row in rows]) for row in rows for name in row}

    def _tensor(self, values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
