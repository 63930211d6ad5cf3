"""Lightning with K-FAC in muP.

python examples/with_lightning.py
torchrun --nproc-per-node 2 examples/with_lightning.py
"""

import os

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mukron
from mukron.integrations import for_lightning


def network(width):
    layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)]
    return nn.Sequential(*layers)


class Classifier(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.network = network(width)
        self.plan = mukron.parametrize(self.network, mukron.base_shapes(network, width=16))

    def training_step(self, batch, number):
        x, y = batch
        loss = cross_entropy(self.network(x), y)
        if self.global_rank == 0 and number == 0:
            print(f"epoch {self.current_epoch}  loss {loss:.3f}")
        return loss

    def configure_optimizers(self):
        def schedule(optimizer):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

        return for_lightning(self.network, mukron.KFAC, self.plan, lr=0.05, schedule=schedule)


torch.manual_seed(0)
x = torch.randn(256, 16)
data = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
processes = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    max_epochs=10,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=processes,
    strategy="ddp" if processes > 1 else "auto",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(width=128), DataLoader(data, batch_size=64))
