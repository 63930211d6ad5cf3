"""Second-order optimizers as true torch optimizers: one step shared by all, one short file a method."""

from mukron.optim.base import SecondOrder, Settings
from mukron.optim.gauss_newton import GaussNewton
from mukron.optim.kfac import FOOF, KFAC
from mukron.optim.shampoo import Shampoo

__all__ = ["FOOF", "KFAC", "GaussNewton", "SecondOrder", "Settings", "Shampoo"]
