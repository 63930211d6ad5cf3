"""Tensors in, tensors out: damped inverses, inverse roots, sample-space solves. Prepare once, apply often."""

from mukron.linalg.cholesky import Factorization, FactorizationError, add_to_diagonal, factorize
from mukron.linalg.factors import SOLVERS, DiagonalFactor, Factor, MatrixFactor, RowsFactor
from mukron.linalg.inverses import Inverse, attempt, invert
from mukron.linalg.operators import Diagonal, Identity, LowRank, Matrix, Operator, SampleSpace
from mukron.linalg.precision import matmul_precision
from mukron.linalg.roots import inverse_root_eigh, inverse_root_newton
from mukron.linalg.tracked import KeptFactor, Turned, kept_factor, turn

__all__ = [
    "SOLVERS",
    "Diagonal",
    "DiagonalFactor",
    "Factor",
    "Factorization",
    "FactorizationError",
    "Identity",
    "Inverse",
    "KeptFactor",
    "LowRank",
    "Matrix",
    "MatrixFactor",
    "Operator",
    "RowsFactor",
    "SampleSpace",
    "Turned",
    "add_to_diagonal",
    "attempt",
    "factorize",
    "inverse_root_eigh",
    "inverse_root_newton",
    "invert",
    "kept_factor",
    "matmul_precision",
    "turn",
]
