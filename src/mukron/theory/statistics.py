"""Statistics of a layer u = W h that methods divide gradients by, and the size of their eigenvalues.

    h      the layer's input, one column a sample           |h|^2     = Theta(M^[fan-in grows])
    delta  the derivative of the network's output by u      |delta|^2 = Theta(M^(1 - 2s)), or Theta(1) at the output
    s      a_L + b_L, the exponent of the output weights' size

With G = delta diag(chi) h^T the layer's gradient, the sizes in M follow from these two norms:

    A = E[h h^T]          B = E[delta delta^T]                          K-FAC, FOOF and its mirror
    L = E[G G^T]          R = E[G^T G]             both ~ |h|^2 |delta|^2  Shampoo
    K = (delta^T delta) o (h^T h)                       ~ |h|^2 |delta|^2  layer-wise Gauss-Newton (the layer's NTK)
    S = G G^T, of one step                             ~ |h|^2 |delta|^2  Muon
    V = E[G_ij^2]                                  ~ one entry's square    Adam, and Lion, whose step is a sign
    V_LR = E[(Q_L^T G Q_R)_ij^2], Q_L and Q_R the eigenbases of L and R   ~ |h|^2 |delta|^2  SOAP

Damping is added to a statistic, and so scales as the statistic does. Adam, Muon and SOAP have an eps instead, which
guards the division by a root: added to V^1/2 and V_LR^1/2, and the least norm S^1/2 in Muon. It scales as that root.

Inside of a residual block whose branch is multiplied by 1/L, delta is multiplied by 1/L too, and h is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mukron.theory.power import Power
from mukron.theory.roles import Role


@dataclass(frozen=True)
class Statistic:
    """A statistic of a layer that a method divides by, such as the curvature factor A of K-FAC.

    Attributes:
        name: The symbol: A, B, L, R, K, S, V or one in eigenbases, V_LR, V_L and V_R.
        h: 1 if the statistic contains |h|^2, else 0.
        delta: 1 if the statistic contains |delta|^2, else 0.
        damped: Whether damping is added to it.
        guarded: Whether an eps guards the division by a power of it.

    Example:
        >>> from mukron.theory import MUP, Role, get_method
        >>> A, B = get_method("kfac").damped
        >>> print(A.size(Role.HIDDEN, MUP.s))
        r_in
    """

    name: str
    h: int = 0
    delta: int = 0
    damped: bool = True
    guarded: bool = False

    def size(self, role: Role, s: Fraction) -> Power:
        """Return the power p such that the eigenvalues of the statistic are Theta(M^p).

        Args:
            role: The role of the layer's weight.
            s: The exponent of the output weights' size, ``scheme.s``.

        Returns:
            The power, by the two sides of the layer and the depth.
        """
        width_of_delta = self.delta * role.fan_out * (1 - 2 * s)
        return Power(Fraction(self.h * role.fan_in), width_of_delta, depth=Fraction(-2 * self.delta))


@dataclass(frozen=True)
class EntrySquare(Statistic):
    """The square of one entry of a parameter's gradient: entries of h are Theta(1), those of delta Theta(M^-s).

    In an eigenbasis of one side, ``h`` or ``delta`` = 1, the few directions that gradients have there are coordinates,
    and an entry holds all of |h|^2 or |delta|^2.
    """

    damped: bool = False
    guarded: bool = True

    def size(self, role: Role, s: Fraction) -> Power:
        return Power(Fraction(self.h * role.fan_in), (self.delta - 2 * s) * role.fan_out, depth=Fraction(-2))


A = Statistic("A", h=1)
B = Statistic("B", delta=1)
L = Statistic("L", h=1, delta=1)
R = Statistic("R", h=1, delta=1)
K = Statistic("K", h=1, delta=1)
S = Statistic("S", h=1, delta=1, damped=False, guarded=True)
V = EntrySquare("V")
V_LR, V_L, V_R = EntrySquare("V_LR", h=1, delta=1), EntrySquare("V_L", delta=1), EntrySquare("V_R", h=1)
