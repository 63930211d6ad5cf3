"""Parametrizations: from base shapes to roles, initial scales, learning-rate and damping multipliers."""

from mukron.params.apply import parametrize
from mukron.params.building import build_without_memory, plain_width
from mukron.params.errors import ParametrizationError
from mukron.params.mup_file import mup_base_shapes
from mukron.params.parameter_plan import ParameterPlan
from mukron.params.parametrization import Parametrization, Scales
from mukron.params.shapes import BaseParameter, BaseShapes, base_shapes

__all__ = [
    "BaseParameter",
    "BaseShapes",
    "ParameterPlan",
    "Parametrization",
    "ParametrizationError",
    "Scales",
    "base_shapes",
    "build_without_memory",
    "mup_base_shapes",
    "parametrize",
    "plain_width",
]
