"""K-FAC and FOOF, everything refreshed at every step."""

from mukron.bench.methods import ADAMW, FOOF_, KFAC_EMPIRICAL, KFAC_MC, SGD
from mukron.bench.peers import KFAC_PEERS
from mukron.bench.steps import Bench
from mukron.bench.tasks import mlp

KFAC_STEP = Bench("kfac-step", mlp(), (SGD, ADAMW, KFAC_MC, KFAC_EMPIRICAL, FOOF_), KFAC_PEERS)
