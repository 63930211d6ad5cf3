"""Attention logits, seen in a forward pass however the attention is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mukron.params.inventory import clean_name
from mukron.train.quantities import first_tensor

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")
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
        self.collects = True
        self._names: list[str] = []
        self._inner = 0  # the dimension that the last batched product summed over
        self._layer_output: Tensor | None = None  # what the last layer with weights of its own returned
        self._thread = get_ident()

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
        if any(True for _ in module.parameters(recurse=False)):
            self._layer_output = first_tensor(output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, keywords = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == DOT_PRODUCT:
            return self._attention(func, *args, **keywords)
        if name == MULTIHEAD:  # a function of torch's, which calls others inside
            self._inner = args[3] // args[4]  # the embedding's size and the number of heads
            attention, softmax = F.scaled_dot_product_attention, F.softmax
            inside: dict[str, Any] = {
                DOT_PRODUCT: lambda *a, **k: self._attention(attention, *a, **k),
                SOFTMAX: lambda *a, **k: softmax(*self._seen(a, k), **k),
            }
            with patch.multiple(F, **inside):
                return func(*args, **keywords)
        if name in PRODUCTS:
            self._inner = _summed(name, args, keywords)
        if name == SOFTMAX:
            self._seen(args, keywords)
        return func(*args, **keywords)

    def _seen(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Look at the arguments of a softmax, and return them."""
        logits = args[0] if args else keywords.get("input")
        dim = args[1] if len(args) > 1 else keywords.get("dim")
        if isinstance(logits, Tensor) and logits.ndim >= 3 and isinstance(dim, int):
            if dim % logits.ndim == logits.ndim - 1 and logits is not self._layer_output:
                self._keep(logits, self._inner)
            self._inner = 0
        return args

    def _keep(self, logits: Tensor, head_dim: int) -> None:
        if self.collects and self._names and get_ident() == self._thread:
            self.logits.setdefault(self._names[-1], []).append(logits)
            if head_dim:
                self.head_dims[self._names[-1]] = head_dim

    def _attention(
        self,
        function: Callable[..., Tensor],
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
        """What torch's function computes, step by step: softmax(q k^T scale + mask) v."""
        plain = attn_mask is None or (type(attn_mask) in (Tensor, nn.Parameter) and not is_causal)
        if get_ident() != self._thread or not plain:
            options = {"scale": scale, **({"enable_gqa": True} if enable_gqa else {})}
            return function(query, key, value, attn_mask, dropout_p, is_causal, **options)
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


def _summed(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """Return the size of the dimension that a batched product of two tensors sums over; 0: not known."""
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    if len(tensors) < 2 or tensors[-1].ndim < 3:
        return 0
    if name != "einsum":
        return int(tensors[-1].shape[-2])
    terms, _, result = str(args[0]).replace(" ", "").partition("->")
    first = terms.split(",")[0]
    summed = [letter for letter in first if letter not in result and letter.isalpha()]
    return int(tensors[0].shape[first.index(summed[0])]) if len(summed) == 1 and "." not in first else 0
