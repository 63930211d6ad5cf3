"""One file a layer type. A new one registers itself with ``@layout.register``."""

from mukron.curvature.layers import conv, embedding, linear
from mukron.curvature.layers.base import Layout, layout

__all__ = ["Layout", "conv", "embedding", "layout", "linear"]
