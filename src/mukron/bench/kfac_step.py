"""K-FAC and FOOF, everything refreshed at every step."""

from mukron.bench.methods import ADAMW, FOOF_, KFAC_EMPIRICAL, KFAC_EMPIRICAL_FUSED, KFAC_MC, KFAC_MC_FUSED, SGD
from mukron.bench.peers import KFAC_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp

OURS = (KFAC_MC_FUSED, KFAC_MC, KFAC_EMPIRICAL_FUSED, KFAC_EMPIRICAL, FOOF_)
KFAC_STEP = Bench("kfac-step", mlp(), (SGD, ADAMW, *OURS), KFAC_PEERS)
