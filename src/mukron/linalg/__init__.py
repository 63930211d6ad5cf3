"""Tensors in, tensors out: damped inverses, inverse roots, sample-space solves. Prepare once, apply often.

Names with an alias of their own are for the neighbouring rooms; they may change.
"""

from mukron.linalg.basis import BasisFactor as BasisFactor
from mukron.linalg.basis import PlainFactor as PlainFactor
from mukron.linalg.basis import carried as carried
from mukron.linalg.basis import turned as turned
from mukron.linalg.basis import turned_back as turned_back
from mukron.linalg.factors import Diagonal as Diagonal
from mukron.linalg.factors import DiagonalFactor as DiagonalFactor
from mukron.linalg.factors import Factor as Factor
from mukron.linalg.factors import Identity as Identity
from mukron.linalg.factors import LowRank as LowRank
from mukron.linalg.factors import Matrix as Matrix
from mukron.linalg.factors import MatrixFactor as MatrixFactor
from mukron.linalg.factors import Operator as Operator
from mukron.linalg.factors import RowsFactor as RowsFactor
from mukron.linalg.factors import SampleSpace as SampleSpace
from mukron.linalg.factors import State as State
from mukron.linalg.factors import total_count as total_count
from mukron.linalg.inverses import Factorization as Factorization
from mukron.linalg.inverses import FactorizationError
from mukron.linalg.inverses import Inverse as Inverse
from mukron.linalg.inverses import add_to_diagonal as add_to_diagonal
from mukron.linalg.inverses import at_least_rounding as at_least_rounding
from mukron.linalg.inverses import attempt as attempt
from mukron.linalg.inverses import factorize as factorize
from mukron.linalg.inverses import invert as invert
from mukron.linalg.inverses import prepare as prepare
from mukron.linalg.kernel import JacobianRows as JacobianRows
from mukron.linalg.kernel import KernelFactor as KernelFactor
from mukron.linalg.orthogonal import orthogonalized as orthogonalized
from mukron.linalg.precision import matmul_precision as matmul_precision
from mukron.linalg.precision import probe as probe
from mukron.linalg.precision import products_of as products_of
from mukron.linalg.precision import rounding as rounding
from mukron.linalg.roots import inverse_root_eigh, inverse_root_newton
from mukron.linalg.solvers import QR, Cholesky, Eigh, Newton, Solver, Tracked
from mukron.linalg.tracked import KeptFactor as KeptFactor
from mukron.linalg.tracked import Turned as Turned
from mukron.linalg.tracked import kept_factor as kept_factor
from mukron.linalg.tracked import turn as turn

__all__ = [
    "QR",
    "Cholesky",
    "Eigh",
    "FactorizationError",
    "Newton",
    "Solver",
    "Tracked",
    "inverse_root_eigh",
    "inverse_root_newton",
]
