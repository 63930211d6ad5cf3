"""Layer types: for each, the fans that muP needs and the layout that curvature needs, in one class."""

from mukron.layers import conv, embedding, linear, others
from mukron.layers.base import (
    BIAS,
    WEIGHT,
    Fans,
    Layer,
    MatrixLayer,
    ParameterMatrix,
    Shape,
    layer_of,
    register,
    vector,
)

__all__ = [
    "BIAS",
    "WEIGHT",
    "Fans",
    "Layer",
    "MatrixLayer",
    "ParameterMatrix",
    "Shape",
    "conv",
    "embedding",
    "layer_of",
    "linear",
    "others",
    "register",
    "vector",
]
