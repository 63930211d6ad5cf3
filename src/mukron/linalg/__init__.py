"""Tensors in, tensors out: damped inverses, inverse roots, sample-space solves. Prepare once, apply often."""

from mukron.linalg.factors import (
    Diagonal,
    DiagonalFactor,
    Factor,
    Identity,
    LowRank,
    Matrix,
    MatrixFactor,
    Operator,
    RowsFactor,
    SampleSpace,
    State,
)
from mukron.linalg.inverses import (
    Factorization,
    FactorizationError,
    Inverse,
    add_to_diagonal,
    attempt,
    factorize,
    invert,
)
from mukron.linalg.kernel import JacobianRows, KernelFactor
from mukron.linalg.precision import matmul_precision, probe, products_of, rounding
from mukron.linalg.roots import inverse_root_eigh, inverse_root_newton
from mukron.linalg.solvers import Cholesky, Eigh, Newton, Solver, Tracked
from mukron.linalg.tracked import KeptFactor, Turned, kept_factor, turn

__all__ = [
    "Cholesky",
    "Diagonal",
    "DiagonalFactor",
    "Eigh",
    "Factor",
    "Factorization",
    "FactorizationError",
    "Identity",
    "Inverse",
    "JacobianRows",
    "KeptFactor",
    "KernelFactor",
    "LowRank",
    "Matrix",
    "MatrixFactor",
    "Newton",
    "Operator",
    "RowsFactor",
    "SampleSpace",
    "Solver",
    "State",
    "Tracked",
    "Turned",
    "add_to_diagonal",
    "attempt",
    "factorize",
    "inverse_root_eigh",
    "inverse_root_newton",
    "invert",
    "kept_factor",
    "matmul_precision",
    "probe",
    "products_of",
    "rounding",
    "turn",
]
