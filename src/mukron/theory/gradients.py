"""The size of raw gradients, before any method divides them, in exact powers of width and depth.

One backward pass gives G = delta diag(chi) h^T (``theory.statistics`` has the legend):

    an entry          G_ij ~ delta_i h_j         Theta(M^-s / L) where the fan-out grows, Theta(1) at the output
    a parameter's norm       |G| ~ |delta| |h|   an entry times (number of entries)^1/2
    that of all L blocks     (sum |G|^2)^1/2     times L^1/2

Under muP (s = 1), with both sides of the width M:

    input, embedding, bias, gain     M^-1 M^1/2 = M^-1/2
    hidden                           M^-1 M     = 1           L^-1 L^1/2 = L^-1/2 inside of blocks
    output                           1 M^1/2    = M^1/2
    output bias                      1

The norm of all gradients together is hence that of the output weights in wide networks, Theta(M^1/2), and a limit on
it shrinks the steps of methods that follow the gradient's size (SGD) by M^-1/2. The output weights' gradient is
err h^T: it is that large from the first step on, while steps of every layer are of one size under muP's learning rates.
"""

from __future__ import annotations

from fractions import Fraction

from mukron.theory.power import Power
from mukron.theory.roles import Role
from mukron.theory.schemes import MUP, Scheme, get_scheme
from mukron.theory.statistics import V


def gradient_size(role: Role, scheme: Scheme | str = MUP) -> Power:
    """Return the power p such that an entry of a parameter's gradient is Theta(M^p) in the first steps.

    Args:
        role: The role of the parameter.
        scheme: The parametrization, or its name.

    Returns:
        The power, by the two sides of the layer and the depth.

    Example:
        >>> from mukron.theory import Role, gradient_size
        >>> print(gradient_size(Role.HIDDEN), gradient_size(Role.OUTPUT), sep=", ")
        r_out^-1 L^-1, L^-1
    """
    return Fraction(1, 2) * V.size(role, get_scheme(scheme).s)


def gradient_norm(role: Role, scheme: Scheme | str = MUP) -> Power:
    """Return the power p such that the Euclidean norm of a parameter's gradient, over all blocks, is Theta(M^p).

    Args:
        role: The role of the parameter.
        scheme: The parametrization, or its name.

    Returns:
        The power, by the two sides of the layer and the depth.

    Example:
        >>> from mukron.theory import Role, gradient_norm
        >>> print(gradient_norm(Role.OUTPUT).of_width, gradient_norm(Role.INPUT).of_width)
        r_in^1/2 r_out^-1/2
    """
    half = Fraction(1, 2)
    return gradient_size(role, scheme) + Power(half * role.fan_in, half * role.fan_out, depth=half)
