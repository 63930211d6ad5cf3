"""Layer types: for each, the fans that muP needs and the layout that curvature needs, in one class."""

from mukron.layers import attention, conv, embedding, linear, others
from mukron.layers.attention import Projection as Projection
from mukron.layers.base import BIAS, WEIGHT, Fans, Layer, MatrixLayer, Product, Shape, layer_of, register, vector
from mukron.layers.cuts import BlockedLayer as BlockedLayer
from mukron.layers.cuts import ParameterMatrix as ParameterMatrix
from mukron.layers.cuts import PartedLayer as PartedLayer
from mukron.layers.cuts import cuts_of as cuts_of

__all__ = [
    "BIAS",
    "WEIGHT",
    "Fans",
    "Layer",
    "MatrixLayer",
    "Product",
    "Shape",
    "attention",
    "conv",
    "embedding",
    "layer_of",
    "linear",
    "others",
    "register",
    "vector",
]
