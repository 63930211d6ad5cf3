"""Continuous bag of words: predict a word from the mean embedding of its neighbours."""

from __future__ import annotations

import torch
from torch import nn


class CBOW(nn.Module):
    """An embedding and a linear layer, no activation; ``width`` is the embedding's dimension.

    embedding, output: what the initial weights of the two are multiplied by.
    """

    def __init__(self, width: int, vocabulary: int = 2048, embedding: float = 1.0, output: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            self.embedding.weight.mul_(embedding)
            self.head.weight.mul_(output)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """context: [samples, neighbours] of word numbers."""
        output: torch.Tensor = self.head(self.embedding(context).mean(dim=1))
        return output
