"""The benchmark of K-FAC and FOOF on an MLP: plain steps, refreshed at every step, and K-FAC's defaults."""

from mukron.bench.methods import (
    FOOF_METHOD,
    KFAC_BOUNDED,
    KFAC_DEFAULTS,
    KFAC_EMPIRICAL,
    KFAC_EMPIRICAL_FUSED,
    KFAC_MC,
    KFAC_MC_FUSED,
    TORCH_ADAMW,
    TORCH_SGD,
)
from mukron.bench.peers import KFAC_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp_task

PLAIN_METHODS = (KFAC_MC_FUSED, KFAC_MC, KFAC_EMPIRICAL_FUSED, KFAC_EMPIRICAL, FOOF_METHOD)
KFAC_METHODS = (*PLAIN_METHODS, KFAC_DEFAULTS, KFAC_BOUNDED)
KFAC_STEP = Bench("kfac-step", mlp_task(), (TORCH_SGD, TORCH_ADAMW, *KFAC_METHODS), KFAC_PEERS)
