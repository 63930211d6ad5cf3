"""What is measured: layers as matrices, captured inputs and signals, and the factors they make."""

from mukron.curvature.accumulate import Accumulator, rows_are_cheaper
from mukron.curvature.capture import Capture, Listening
from mukron.curvature.fisher import FISHERS, LIKELIHOODS, drawn_targets, targets
from mukron.curvature.layers import Layout, layout
from mukron.curvature.precision import as_precise
from mukron.curvature.running import EMA, Batch, Memory, Sum, Window, needs_matrix, parse_memory
from mukron.curvature.statistics import Gathered, Halves, Jacobian, probe

__all__ = [
    "EMA",
    "FISHERS",
    "LIKELIHOODS",
    "Accumulator",
    "Batch",
    "Capture",
    "Gathered",
    "Halves",
    "Jacobian",
    "Layout",
    "Listening",
    "Memory",
    "Sum",
    "Window",
    "as_precise",
    "drawn_targets",
    "layout",
    "needs_matrix",
    "parse_memory",
    "probe",
    "rows_are_cheaper",
    "targets",
]
