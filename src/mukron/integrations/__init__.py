"""What training frameworks expect of an optimizer: the Trainer of transformers, Lightning, timm.

None of them is imported here, and nothing else of mukron imports this room.
"""

from mukron.integrations.building import build_optimizer, logits_of
from mukron.integrations.lightning import for_lightning
from mukron.integrations.timm import for_timm
from mukron.integrations.trainer import for_trainer

__all__ = ["build_optimizer", "for_lightning", "for_timm", "for_trainer", "logits_of"]
