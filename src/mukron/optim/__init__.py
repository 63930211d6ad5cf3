"""Second-order optimizers as true torch optimizers: one step shared by all, one short file a method."""

from mukron.optim.foof import FOOF
from mukron.optim.gauss_newton import GaussNewton
from mukron.optim.kfac import KFAC
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import AdamStep, GradientMomentum, HeavyBall, SGDStep, StepOptions
from mukron.optim.shampoo import Shampoo

__all__ = [
    "FOOF",
    "KFAC",
    "AdamStep",
    "GaussNewton",
    "GradientMomentum",
    "HeavyBall",
    "SGDStep",
    "SecondOrder",
    "Shampoo",
    "StepOptions",
]
