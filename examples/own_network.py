"""Does a network of your own learn features at every width? One command says so:

    cd examples
    mukron check --factory own_network:make --method shampoo

``make`` builds the network for a width; its default is the width that settings are tuned at. The batch is of the
built-in digits; ``--data own_network:batch`` gives your own, as below. In a test of yours:

    pytest own_network.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mukron


class Block(nn.Module):
    """Normalize, widen, narrow, add."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Patches(nn.Module):
    """An 8x8 image as sixteen 2x2 patches, each through two blocks; their mean is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(patches)).mean(1))


def make(width: int = 32) -> nn.Module:
    return Patches(width)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 1, 8, 8, generator=generator), torch.randint(10, (32,), generator=generator)


def test_features_are_learned_at_every_width() -> None:
    from mukron.diagnose import coordinate_check

    result = coordinate_check(
        make, lambda model, plan: mukron.Shampoo(model, plan, lr=0.005), batch(), base_width=32, widths=(64, 128, 256)
    )
    result.assert_ok()


if __name__ == "__main__":
    test_features_are_learned_at_every_width()
    print("every layer learns alike at every width")
