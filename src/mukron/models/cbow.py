"""The continuous bag of words (CBOW): predict a word from the mean embedding of its neighbours."""

from __future__ import annotations

import torch
from torch import nn


class CBOW(nn.Module):
    """Continuous bag of words: an embedding, the mean over the neighbours, and a linear layer without activation.

    Args:
        width: The dimension of the embedding.
        vocabulary: The number of words.
        embedding: A factor that multiplies the initial weights of the embedding.
        output: A factor that multiplies the initial weights of the linear layer.

    Example:
        >>> import torch
        >>> from mukron.models import CBOW
        >>> model = CBOW(64, vocabulary=100)
        >>> model(torch.randint(100, (2, 8))).shape
        torch.Size([2, 100])
    """

    def __init__(self, width: int, vocabulary: int = 2048, embedding: float = 1.0, output: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            self.embedding.weight.mul_(embedding)
            self.head.weight.mul_(output)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Predict the word in the middle of each context.

        Args:
            context: Word numbers [samples, neighbours].

        Returns:
            Logits [samples, vocabulary].
        """
        output: torch.Tensor = self.head(self.embedding(context).mean(dim=1))
        return output
