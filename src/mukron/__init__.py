"""mukron: tune a network while it is narrow, train it while it is wide, with second-order optimizers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from mukron.params import BaseShapes, Parametrization, ParametrizationError, base_shapes, parametrize

# Loaded when first used, so that ``import mukron.theory`` needs no torch.
_LAZY = {
    "BaseShapes": "mukron.params",
    "Parametrization": "mukron.params",
    "ParametrizationError": "mukron.params",
    "base_shapes": "mukron.params",
    "parametrize": "mukron.params",
}

__all__ = ["BaseShapes", "Parametrization", "ParametrizationError", "__version__", "base_shapes", "parametrize"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mukron' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
