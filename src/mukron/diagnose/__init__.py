"""Are features learned at every width? Coordinate checks, curvature spectra, distance from initialization, NNGP."""

from mukron.diagnose.check import Check, coordinate_check
from mukron.diagnose.nngp import (
    Approach,
    agreement,
    approach,
    feature_kernel,
    kernel_regression,
    mlp_kernel,
    one_step_rate,
    one_step_ridge,
    variances_of,
)
from mukron.diagnose.readings import Verdict
from mukron.diagnose.record import Record, Row, Started, run
from mukron.exponents import Exponent, fit_exponent

__all__ = [
    "Approach",
    "Check",
    "Exponent",
    "Record",
    "Row",
    "Started",
    "Verdict",
    "agreement",
    "approach",
    "coordinate_check",
    "feature_kernel",
    "fit_exponent",
    "kernel_regression",
    "mlp_kernel",
    "one_step_rate",
    "one_step_ridge",
    "run",
    "variances_of",
]
