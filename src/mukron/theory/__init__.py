"""The theory in exact fractions: which exponents make the features change by the same amount at every width.

This package needs the standard library alone.

>>> from mukron.theory import Role, solve
>>> solve("shampoo", "mup")[Role.OUTPUT].c.total
Fraction(1, 2)
"""

from mukron.theory.gradients import gradient_norm, gradient_size
from mukron.theory.methods import FAMILIES, METHODS, Family, Method, get_method, kronecker, method_title, shampoo, soap
from mukron.theory.power import Power
from mukron.theory.roles import Role
from mukron.theory.schemes import MUP, NTK, SP, Scheme, get_scheme, uniform
from mukron.theory.solve import Exponents, feature_slopes, initial_exponent, residuals, solve, update_exponent
from mukron.theory.statistics import Statistic
from mukron.theory.tables import comparison_table, method_table

__all__ = [
    "FAMILIES",
    "METHODS",
    "MUP",
    "NTK",
    "SP",
    "Exponents",
    "Family",
    "Method",
    "Power",
    "Role",
    "Scheme",
    "Statistic",
    "comparison_table",
    "feature_slopes",
    "get_method",
    "get_scheme",
    "gradient_norm",
    "gradient_size",
    "initial_exponent",
    "kronecker",
    "method_table",
    "method_title",
    "residuals",
    "shampoo",
    "soap",
    "solve",
    "uniform",
    "update_exponent",
]
