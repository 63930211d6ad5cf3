"""Second-order optimizers as true torch optimizers: one step shared by all, one record and one short file a method."""

import mukron.optim.first_order  # noqa: F401  (adds the records of SGD and AdamW)
from mukron.optim.communication import Communication
from mukron.optim.foof import FOOF
from mukron.optim.gauss_newton import GaussNewton
from mukron.optim.kfac import KFAC
from mukron.optim.kronecker import FOOFMirror, Kronecker
from mukron.optim.momentum import GradientMomentum, HeavyBall
from mukron.optim.muon import Muon
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import RMS, AdamStep, Graft, KLClip, SGDStep, Spectral, StepOptions, Trust
from mukron.optim.shampoo import Shampoo
from mukron.optim.soap import SOAP
from mukron.optim.spec import SPECS, MethodSpec, register, spec_of

__all__ = [
    "FOOF",
    "KFAC",
    "RMS",
    "SOAP",
    "SPECS",
    "AdamStep",
    "Communication",
    "FOOFMirror",
    "GaussNewton",
    "GradientMomentum",
    "Graft",
    "HeavyBall",
    "KLClip",
    "Kronecker",
    "MethodSpec",
    "Muon",
    "SGDStep",
    "SecondOrder",
    "Shampoo",
    "Spectral",
    "StepOptions",
    "Trust",
    "register",
    "spec_of",
]
