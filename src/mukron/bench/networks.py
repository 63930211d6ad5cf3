"""Networks of benchmarks that are not in ``mukron.models``: a small GPT and a ResNet with zero gates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INITIAL_STD = 0.02  # of every matrix of the GPT


class CausalAttention(nn.Module):
    """Causal self-attention with several heads, without biases.

    Args:
        width: The size of a token's vector, a multiple of the size of a head.
        head_size: The size of a head.

    Example:
        >>> CausalAttention(16, head_size=4)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, head_size: int) -> None:
        super().__init__()
        if width % head_size:
            raise ValueError(f"width {width} must be a multiple of the size of a head, {head_size}")
        self.head_size = head_size
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [samples, heads, positions, head_size]
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class CharGPT(nn.Module):
    """A GPT: pre-norm blocks of causal attention and an MLP, learned positions, an untied head, no biases.

    Args:
        width: The size of a token's vector.
        tokens: The size of the vocabulary.
        context: The longest sequence.
        layers: The number of blocks.
        head_size: The size of an attention head.
        multiplier: Of what each branch adds to the residual stream.

    Example:
        >>> CharGPT(16, tokens=30, head_size=8)(torch.zeros(2, 32, dtype=torch.long)).shape
        torch.Size([2, 32, 30])
    """

    def __init__(
        self,
        width: int,
        tokens: int,
        context: int = 32,
        layers: int = 2,
        head_size: int = 16,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.branches = nn.ModuleList()
        for _ in range(layers):
            attention = CausalAttention(width, head_size)
            mlp = nn.Sequential(
                nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
            )
            self.branches += [nn.Sequential(nn.LayerNorm(width), branch) for branch in (attention, mlp)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for branch in self.branches:
            x = x + (branch(x) if self.multiplier == 1 else branch(x) * self.multiplier)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ZeroGateBlock(nn.Module):
    """A residual block whose last norm starts at zero, so that the block starts as its shortcut.

    Args:
        channels: The channels of its input.
        out: The channels of its output.
        stride: The stride of the first convolution and of the shortcut.

    Example:
        >>> x = torch.rand(2, 8, 4, 4)
        >>> bool((ZeroGateBlock(8, 8)(x) == x).all())
        True
    """

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + branch)


class ZeroGateResNet(nn.Module):
    """A small ResNet with zero gates: a convolution, three residual blocks, mean pooling, a linear layer.

    Args:
        width: The channels of the first half; the second half has twice as many.
        channels: The channels of an image.
        classes: The number of outputs.

    Example:
        >>> ZeroGateResNet(8)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, width: int, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ZeroGateBlock(width, width),
            ZeroGateBlock(width, 2 * width, stride=2),
            ZeroGateBlock(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
