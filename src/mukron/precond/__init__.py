"""Factors, damping and a solver make a preconditioner: prepared once, applied often."""

from mukron.precond.gauss_newton import JacobianRows, KernelFactor
from mukron.precond.kronecker import Layer, Preparation, Prepared, apply, apply_out, prepare

__all__ = ["JacobianRows", "KernelFactor", "Layer", "Preparation", "Prepared", "apply", "apply_out", "prepare"]
