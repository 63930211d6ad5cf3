"""Attention logits, seen in a forward pass however the attention is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mukron.params.inventory import clean_name
from mukron.train.quantities import first_tensor

SOFTMAX, DOT_PRODUCT, MULTIHEAD = "softmax", "scaled_dot_product_attention", "multi_head_attention_forward"


class AttentionWatch(TorchFunctionMode):
    """Collects attention logits, by the innermost module that is being called.

    They are what a softmax over keys is taken of: in torch's ``scaled_dot_product_attention`` and
    ``nn.MultiheadAttention``, and in any code that calls torch's softmax. A softmax of a layer's own output, such as
    that of a mixture's router, is no attention.

    Attributes:
        logits: The logits of each module's calls.
        head_dims: The sizes of heads, by module.

    Example:
        >>> attention = nn.MultiheadAttention(8, num_heads=2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with AttentionWatch.over(attention) as watch:
        ...     _ = attention(x, x, x)
        >>> watch.logits[""][0].shape, watch.head_dims
        (torch.Size([2, 3, 3]), {'': 4})
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, list[Tensor]] = {}
        self.head_dims: dict[str, int] = {}
        self._names: list[str] = []
        self._inner = 0  # the dimension that the last batched product summed over
        self._layer_output: Tensor | None = None  # what the last module returned

    @classmethod
    @contextmanager
    def over(cls, model: nn.Module) -> Iterator[AttentionWatch]:
        """Watch the forward passes of a network.

        Args:
            model: The network.

        Yields:
            The watch, which holds the logits afterwards.
        """
        watch, hooks = cls(), []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(watch._enter(clean_name(name)), prepend=True))
            hooks.append(module.register_forward_hook(watch._leave))
        try:
            with watch:
                yield watch
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._names.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._names.pop()
        self._layer_output = first_tensor(output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, keywords = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == DOT_PRODUCT:
            return self._attention(*args, **keywords)
        if name == MULTIHEAD:  # a function of torch's, which calls others inside
            softmax, size, heads = F.softmax, args[3], args[4]
            self._inner = size // heads
            inside: dict[str, Any] = {
                DOT_PRODUCT: self._attention,
                SOFTMAX: lambda *a, **k: softmax(self._seen(*a, **k), *a[1:], **k),
            }
            with patch.multiple(F, **inside):
                return func(*args, **keywords)
        if name in ("matmul", "__matmul__", "bmm", "baddbmm"):
            self._inner = int(args[-1].shape[-2]) if args[-1].ndim > 2 else self._inner
        if name == SOFTMAX:
            self._seen(*args, **keywords)
        return func(*args, **keywords)

    def _seen(self, logits: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Tensor:
        over_keys = logits.ndim >= 3 and dim is not None and dim % logits.ndim == logits.ndim - 1
        if over_keys and self._names and logits is not self._layer_output:
            self._keep(logits, self._inner)
        return logits

    def _keep(self, logits: Tensor, head_dim: int) -> None:
        self.logits.setdefault(self._names[-1], []).append(logits)
        if head_dim:
            self.head_dims[self._names[-1]] = head_dim

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """torch's function of this name, step by step: softmax(q k^T scale + mask) v."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        head_dim = query.shape[-1]
        logits = query @ key.mT * (1 / math.sqrt(head_dim) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        self._keep(logits, head_dim)
        unmasked = logits.isfinite().any(-1, keepdim=True)  # what attends to nothing gets zeros
        weights = logits.masked_fill(~unmasked, 0.0).softmax(-1) * unmasked
        return F.dropout(weights, dropout_p) @ value
