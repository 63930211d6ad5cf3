"""Networks that users bring and the library does not ship."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INPUTS, CLASSES, VOCABULARY, LENGTH = 12, 5, 50, 6


class Net(nn.Module):
    """Input, hidden and output layer with biases and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.hidden(F.relu(self.first(x))))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token and position embeddings, two blocks, and a head tied to the token embedding; GPT-2's initial std 0.02."""

    def __init__(self, width: int, base_width: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(LENGTH, width))
        self.blocks = nn.Sequential(*[Block(width, heads=2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight
        self.divisor = width / base_width
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens) + self.position)
        return self.head(self.norm(x)) / self.divisor


GPT_ROLES = {"token.weight": "input", "position": "input"}


def features(model: nn.Sequential, x: Tensor) -> list[Tensor]:
    """The activations of every hidden layer, and the output."""
    kept = []
    with torch.no_grad():
        for layer in model:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                kept.append(x)
    return [*kept, x]
