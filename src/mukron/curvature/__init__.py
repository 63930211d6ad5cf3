"""What is measured: hooks on layers, the passes they show, Fisher signals, and the form in which factors are held.

Names with an alias of their own are for the neighbouring rooms; they may change.
"""

from mukron.curvature.ahead import Ahead as Ahead
from mukron.curvature.ahead import Lane as Lane
from mukron.curvature.capture import Capture as Capture
from mukron.curvature.fisher import (
    LIKELIHOODS,
    REDUCTIONS,
    CaptureOptions,
    Empirical,
    Exact,
    Fisher,
    MonteCarlo,
    RandomSigns,
)
from mukron.curvature.fisher import Drawn as Drawn
from mukron.curvature.fisher import drawn_targets as drawn_targets
from mukron.curvature.fisher import targets as targets
from mukron.curvature.forms import FORMS
from mukron.curvature.forms import MATRIX as MATRIX
from mukron.curvature.forms import ROWS as ROWS
from mukron.curvature.forms import as_rows as as_rows
from mukron.curvature.forms import keeps_halves as keeps_halves
from mukron.curvature.joined import Delivery as Delivery
from mukron.curvature.joined import Joint as Joint
from mukron.curvature.joined import joined as joined
from mukron.curvature.passes import Accumulator as Accumulator
from mukron.curvature.passes import Kinds as Kinds
from mukron.curvature.passes import LayerStatistics as LayerStatistics
from mukron.curvature.passes import Pass as Pass
from mukron.curvature.passes import Samples as Samples
from mukron.curvature.passes import by_kind as by_kind
from mukron.curvature.passes import gather as gather
from mukron.curvature.precision import double as double
from mukron.curvature.precision import perturbed as perturbed
from mukron.curvature.products import Host as Host
from mukron.curvature.products import Watch as Watch
from mukron.curvature.products import hosts as hosts
from mukron.curvature.ranks import IN_A_STATE as IN_A_STATE
from mukron.curvature.ranks import IN_A_STEP as IN_A_STEP
from mukron.curvature.ranks import Ranks as Ranks
from mukron.curvature.ranks import local as local
from mukron.curvature.ranks import said as said
from mukron.curvature.records import PassRecord as PassRecord
from mukron.curvature.scale import AS_A_SUM as AS_A_SUM
from mukron.curvature.scale import OVER_POSITIONS as OVER_POSITIONS
from mukron.curvature.scale import OVER_SAMPLES as OVER_SAMPLES
from mukron.curvature.scale import LossScale as LossScale
from mukron.curvature.scale import input_weight as input_weight
from mukron.curvature.scale import inverse_weight as inverse_weight
from mukron.curvature.scale import reduction_in_use as reduction_in_use
from mukron.curvature.sending import EVERY_RANK as EVERY_RANK
from mukron.curvature.stacking import Halves as Halves
from mukron.curvature.stacking import Jacobian as Jacobian
from mukron.curvature.uses import along as along

__all__ = [
    "FORMS",
    "LIKELIHOODS",
    "REDUCTIONS",
    "CaptureOptions",
    "Empirical",
    "Exact",
    "Fisher",
    "MonteCarlo",
    "RandomSigns",
]
