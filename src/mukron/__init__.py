"""mukron: tune a network while it is narrow, train it while it is wide, with second-order optimizers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from mukron.commands import plan, transfer, tune
    from mukron.curvature import Empirical, Exact, MonteCarlo, RandomSigns
    from mukron.damping import Adaptive, Constant, Fixed, Heuristic, MaxEigenvalue, MeanEigenvalue, Rescaled
    from mukron.linalg import QR, Cholesky, Eigh, Newton, Tracked
    from mukron.memory import EMA, Auto, Batch, Sum, Window
    from mukron.optim import (
        FOOF,
        KFAC,
        RMS,
        SOAP,
        AdamStep,
        Communication,
        FOOFMirror,
        GaussNewton,
        GradientMomentum,
        Graft,
        HeavyBall,
        KLClip,
        Kronecker,
        Muon,
        SGDStep,
        Shampoo,
        Spectral,
    )
    from mukron.params import BaseShapes, Parametrization, ParametrizationError, base_shapes, parametrize

# Loaded when first used, so that ``import mukron.theory`` needs no torch.
_LAZY = {
    **dict.fromkeys(("Auto", "EMA", "Batch", "Sum", "Window"), "mukron.memory"),
    **dict.fromkeys(("Empirical", "Exact", "MonteCarlo", "RandomSigns"), "mukron.curvature"),
    **dict.fromkeys(("QR", "Cholesky", "Eigh", "Newton", "Tracked"), "mukron.linalg"),
    **dict.fromkeys(("AdamStep", "Communication", "GradientMomentum", "HeavyBall", "SGDStep"), "mukron.optim"),
    **dict.fromkeys(
        ("Adaptive", "Constant", "Fixed", "Heuristic", "MaxEigenvalue", "MeanEigenvalue", "Rescaled"), "mukron.damping"
    ),
    **dict.fromkeys(("RMS", "Graft", "KLClip", "Spectral"), "mukron.optim"),
    **dict.fromkeys(("FOOF", "KFAC", "SOAP", "GaussNewton", "Muon", "Shampoo"), "mukron.optim"),
    **dict.fromkeys(("FOOFMirror", "Kronecker"), "mukron.optim"),
    **dict.fromkeys(("BaseShapes", "Parametrization", "ParametrizationError"), "mukron.params"),
    **dict.fromkeys(("base_shapes", "parametrize"), "mukron.params"),
    **dict.fromkeys(("plan", "transfer", "tune"), "mukron.commands"),
}

__all__ = [
    "EMA",
    "FOOF",
    "KFAC",
    "QR",
    "RMS",
    "SOAP",
    "AdamStep",
    "Adaptive",
    "Auto",
    "BaseShapes",
    "Batch",
    "Cholesky",
    "Communication",
    "Constant",
    "Eigh",
    "Empirical",
    "Exact",
    "FOOFMirror",
    "Fixed",
    "GaussNewton",
    "GradientMomentum",
    "Graft",
    "HeavyBall",
    "Heuristic",
    "KLClip",
    "Kronecker",
    "MaxEigenvalue",
    "MeanEigenvalue",
    "MonteCarlo",
    "Muon",
    "Newton",
    "Parametrization",
    "ParametrizationError",
    "RandomSigns",
    "Rescaled",
    "SGDStep",
    "Shampoo",
    "Spectral",
    "Sum",
    "Tracked",
    "Window",
    "__version__",
    "base_shapes",
    "parametrize",
    "plan",
    "transfer",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mukron' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
