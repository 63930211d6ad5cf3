"""What is measured: hooks on layers, the passes they show, Fisher signals, and the form in which factors are held."""

from mukron.curvature.capture import Capture
from mukron.curvature.fisher import (
    LIKELIHOODS,
    CaptureOptions,
    Empirical,
    Exact,
    Fisher,
    MonteCarlo,
    drawn_targets,
    targets,
)
from mukron.curvature.forms import FORMS, as_rows, keeps_halves
from mukron.curvature.passes import Accumulator, Halves, Jacobian, LayerStatistics, gather
from mukron.curvature.precision import double, perturbed

__all__ = [
    "FORMS",
    "LIKELIHOODS",
    "Accumulator",
    "Capture",
    "CaptureOptions",
    "Empirical",
    "Exact",
    "Fisher",
    "Halves",
    "Jacobian",
    "LayerStatistics",
    "MonteCarlo",
    "as_rows",
    "double",
    "drawn_targets",
    "gather",
    "keeps_halves",
    "perturbed",
    "targets",
]
