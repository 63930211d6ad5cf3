"""Check whether a network learns features at every width.

Coordinate checks, spectra of the curvature, the distance from initialization, and the NNGP kernel.
"""

from mukron.diagnose.branches import BranchCheck, check_branches
from mukron.diagnose.check import Check
from mukron.diagnose.coordinate import coordinate_check
from mukron.diagnose.depth import DepthCheck, depth_check
from mukron.diagnose.nngp import (
    approach,
    feature_kernel,
    kernel_regression,
    mlp_kernel,
    one_step_rate,
    one_step_ridge,
    variances_of,
)
from mukron.diagnose.nngp_record import Agreement, Approach, ApproachStep, agreement
from mukron.diagnose.readings import Verdict
from mukron.diagnose.record import Measurement, Record, TrainingSetup
from mukron.diagnose.runs import record_runs
from mukron.exponents import Exponent, fit_exponent

__all__ = [
    "Agreement",
    "Approach",
    "ApproachStep",
    "BranchCheck",
    "Check",
    "DepthCheck",
    "Exponent",
    "Measurement",
    "Record",
    "TrainingSetup",
    "Verdict",
    "agreement",
    "approach",
    "check_branches",
    "coordinate_check",
    "depth_check",
    "feature_kernel",
    "fit_exponent",
    "kernel_regression",
    "mlp_kernel",
    "one_step_rate",
    "one_step_ridge",
    "record_runs",
    "variances_of",
]
