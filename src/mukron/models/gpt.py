"""A GPT: tokens to the logits of the next token, by pre-norm blocks of causal attention and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mukron.models.initial import branch_multiplier

EMBEDDING_STD = 1.0
TIED_STD = 0.1  # of an embedding that is the head too: with 1 its first logits would be large
HEAD_SCALE = 1 / 8
USUAL_WIDTH = 64  # at which a tied head has the multiplier 1
BASE_HEAD_DIM = 16  # at which "1/d" and "1/sqrt(d)" give the same logits
HEAD_DIM = 16

NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class CausalSelfAttention(nn.Module):
    """Causal self-attention with several heads, without biases.

    Args:
        width: The size of a token's vector.
        heads: The number of heads, a divisor of the width.
        scale: What the products of queries and keys are multiplied by.

    Example:
        >>> CausalSelfAttention(16, heads=2, scale=0.25)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, heads: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of each sequence with those before them.

        Args:
            x: Vectors [samples, positions, width].

        Returns:
            Vectors of the same shape.
        """
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)  # [samples, heads, ...]
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class GELU(nn.Module):
    """The MLP of a block: to four times the width, GELU, and back.

    Args:
        width: The size of a token's vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(F.gelu(self.up(x)))
        return output


class SwiGLU(nn.Module):
    """The MLP of a block: to three times the width, twice, one half gating the other by SiLU, and back.

    Args:
        width: The size of a token's vector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.out = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return output


MLPS: dict[str, Callable[[int], nn.Module]] = {"gelu": GELU, "swiglu": SwiGLU}


class GPTBlock(nn.Module):
    """Attention, then an MLP, each behind a norm, times the multiplier, and added to its input."""

    def __init__(self, width: int, heads: int, scale: float, norm: str, mlp: str, multiplier: float = 1.0) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.norm1, self.attention = NORMS[norm](width), CausalSelfAttention(width, heads, scale)
        self.norm2, self.mlp = NORMS[norm](width), MLPS[mlp](width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._scaled(self.attention(self.norm1(x)))
        output: Tensor = x + self._scaled(self.mlp(self.norm2(x)))
        return output

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1 else branch * self.multiplier


class GPT(nn.Module):
    """A GPT: token and position embeddings, pre-norm blocks, a last norm and a linear head; no biases.

    Matrices start normal with standard deviation fan-in^-1/2, those that end a branch divided by (2 depth)^1/2, the
    head by 8 (``head_scale``), so that the first logits are small. Embeddings start with 1, or with 0.1 if the head is
    tied to them.

    What grows with the width is the number of heads, each of ``head_dim`` numbers. With ``heads`` given, their number
    is fixed and their size grows instead; muP then needs attention logits divided by the head dimension d, not by its
    root, which is the default there.

    Args:
        width: The size of a token's vector.
        depth: The number of blocks.
        heads: A fixed number of heads, instead of ``head_dim``.
        head_dim: The size of a head; by default 16, of which the width is then a multiple, or the width if that is
            less.
        vocabulary: The number of tokens.
        context: The longest sequence.
        tied: Whether the head's weight is that of the token embedding. muP then needs logits that are divided by the
            growth of the width, which is the default there.
        norm: ``"layer"`` (LayerNorm) or ``"rms"`` (RMSNorm).
        mlp: ``"gelu"`` or ``"swiglu"``.
        attention: What attention logits are divided by: ``"sqrt(d)"``, or ``"d"``, which is d / 4, the same at d = 16.
            By default the first, and the second with ``heads``.
        multiplier: What logits are multiplied by; by default 1, and 64 / width for a tied head.
        head_scale: What the initial weights of the head are multiplied by, 1/8 by default. A tied head has none.
        base_depth: What each branch adds to the residual stream is multiplied by base_depth / depth, as the laws of
            depth need it, and the matrices that end a branch start at every depth as at this one. By default branches
            are not multiplied.

    Raises:
        ValueError: An option is unknown, there is no block, the width is not a multiple of the heads or of their size,
            both ``heads`` and ``head_dim`` are given, or ``head_scale`` for a tied head.

    Example:
        >>> import torch
        >>> from mukron.models import GPT
        >>> model = GPT(64, depth=2, vocabulary=100)
        >>> model(torch.randint(100, (2, 32))).shape
        torch.Size([2, 32, 100])
        >>> model.blocks[0].attention.heads
        4
    """

    def __init__(
        self,
        width: int,
        depth: int = 4,
        heads: int | None = None,
        head_dim: int | None = None,
        vocabulary: int = 256,
        context: int = 64,
        tied: bool = False,
        norm: str = "layer",
        mlp: str = "gelu",
        attention: str | None = None,
        multiplier: float | None = None,
        head_scale: float | None = None,
        base_depth: int | None = None,
    ) -> None:
        super().__init__()
        _known("norm", norm, NORMS)
        _known("mlp", mlp, MLPS)
        divisor = attention or ("d" if heads else "sqrt(d)")
        _known("attention", divisor, ("sqrt(d)", "d"))
        branches = branch_multiplier(depth, base_depth)
        for name, number in {"heads": heads, "head_dim": head_dim}.items():
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise ValueError(f"{name}={number!r}: expected a whole number")
        for name, number in {"vocabulary": vocabulary, "context": context}.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}={number!r}: expected a whole number of at least 1")
        for name, factor in {"multiplier": multiplier, "head_scale": head_scale}.items():
            if factor is not None and not (isinstance(factor, (int, float)) and isfinite(factor)):
                raise ValueError(f"{name}={factor!r}: expected a number")
        if not isinstance(tied, bool):
            raise ValueError(f"tied={tied!r}: expected True or False")
        if tied and head_scale is not None:
            raise ValueError(f"head_scale={head_scale!r}: a tied head starts as the embedding does; leave it out")
        number = _heads(width, heads, head_dim)
        d = width // number
        scale = 1 / sqrt(d) if divisor == "sqrt(d)" else sqrt(BASE_HEAD_DIM) / d
        self.context = context
        self.multiplier = multiplier if multiplier is not None else USUAL_WIDTH / width if tied else 1.0
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, number, scale, norm, mlp, branches) for _ in range(depth))
        self.norm = NORMS[norm](width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._draw(
            base_depth or depth, TIED_STD if tied else EMBEDDING_STD, HEAD_SCALE if head_scale is None else head_scale
        )
        if tied:
            self.head.weight = self.tokens.weight
            self.mukron_roles = {"tokens.weight": "input"}

    def _draw(self, depth: int, embedding: float, head: float) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith(("tokens.", "positions.")):
                nn.init.normal_(parameter, std=embedding)
            elif parameter.ndim == 2:
                scale = head if name == "head.weight" else (2 * depth) ** -0.5 if ".out." in name else 1
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each position, from it and those before it.

        Args:
            tokens: Token numbers [samples, positions].

        Returns:
            Logits [samples, positions, vocabulary].

        Raises:
            ValueError: There are more positions than the context.
        """
        if tokens.shape[1] > self.context:
            raise ValueError(f"{tokens.shape[1]} positions, but the context is {self.context}")
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if self.multiplier == 1 else logits * self.multiplier


def _heads(width: int, heads: int | None, head_dim: int | None) -> int:
    """The number of heads, all of one size."""
    if heads is not None and head_dim is not None:
        raise ValueError("give heads, their number, or head_dim, their size, not both")
    if heads is not None:
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} cannot be divided into {heads} heads")
        return heads
    size = min(HEAD_DIM, width) if head_dim is None else head_dim
    if size < 1 or width % size:
        raise ValueError(
            f"width {width} cannot be divided into heads of {size}; choose a multiple of {size}, another head_dim, or "
            "a fixed number of heads"
        )
    return width // size


def _known(name: str, value: str, known: object) -> None:
    if value not in known:  # type: ignore[operator]
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")  # type: ignore[arg-type]
