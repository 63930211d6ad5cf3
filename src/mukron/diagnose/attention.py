"""Attention logits, seen in a forward pass however the attention is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mukron.params.inventory import clean_name
from mukron.train.quantities import first_tensor

PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum", "sum")
MULTIPLICATIONS = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
DIVISIONS = ("div", "__truediv__", "true_divide", "div_", "__itruediv__", "divide")
RESHAPES = ("view", "reshape", "transpose", "permute", "movedim", "unflatten", "flatten", "squeeze", "unsqueeze")
CASTS = ("to", "contiguous", "float", "double", "half", "bfloat16", "type_as")
CARRIED = (*MULTIPLICATIONS, *DIVISIONS, *RESHAPES, *CASTS)
SUMS = ("add", "__add__", "__radd__", "sub", "__sub__", "add_", "__iadd__")
ROOT = "network"  # the name of the network itself, where that calls the attention
PARTS = (
    "cat",
    "concat",
    "concatenate",
    "pad",
    "__getitem__",
    "narrow",
)  # keep entries as they are, more or fewer of them
SCALED_SUMS = ("addcmul", "addcdiv")  # input + value * (a * b) or value * (a / b)
SOFTMAX, DOT_PRODUCT, MULTIHEAD = "softmax", "scaled_dot_product_attention", "multi_head_attention_forward"
BY_HAND = ("exp", "exp_", "log_softmax", "_softmax")  # softmax in parts: attention only if of a product


class AttentionWatch(TorchFunctionMode):
    """Collects attention logits, by the innermost module that is being called.

    They are what a softmax over keys is taken of: in torch's ``scaled_dot_product_attention`` and
    ``nn.MultiheadAttention``, in code that calls torch's softmax, and in code that takes the exponential of a batched
    product. A softmax of a layer's own output, such as that of a mixture's router, is no attention.

    Attributes:
        logits: The logits of each module's calls.
        products: The same before anything is added to them: products of queries and keys, scaled. Where the product
            is not seen, the logits themselves.
        head_dims: The sizes of heads, by module.
        sources: By module, the layers and parameters that logits come from (queries, keys, learned position biases);
            known where derivatives are.
        fed: By module, the layers that its attention's output goes into.

    Example:
        >>> attention = nn.MultiheadAttention(8, num_heads=2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with AttentionWatch.over(attention) as watch:
        ...     _ = attention(x, x, x)
        >>> watch.logits["network"][0].shape, watch.head_dims, watch.sources
        (torch.Size([2, 3, 3]), {'network': 4}, {'network': {'network'}})
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, list[Tensor]] = {}
        self.products: dict[str, list[Tensor]] = {}
        self.head_dims: dict[str, int] = {}
        self.sources: dict[str, set[str]] = {}
        self.fed: dict[str, set[str]] = {}
        self.collects = True
        self._names: list[str] = []
        self._inner = 0  # the dimension that the last batched product summed over
        self._chains: dict[int, Chain] = {}  # what has become of such products since, by the identity of a tensor
        self._layer_output: Tensor | None = None  # what the last layer with weights of its own returned
        self._origins = Origins()
        self._embeddings = set[str]()  # the names of their weights
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
        watch._origins.name_parameters(model)
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                watch._embeddings.add(clean_name(f"{name}.weight" if name else "weight"))
            hooks.append(module.register_forward_pre_hook(watch._enter(clean_name(name) or ROOT), prepend=True))
            hooks.append(module.register_forward_hook(watch._leave))
        try:
            with torch.compiler.set_stance("force_eager"), watch:  # a compiler would trace the watch
                yield watch
        finally:
            for hook in hooks:
                hook.remove()

    def embeddings_behind(self, outputs: Iterable[Tensor]) -> set[str]:
        """Return the weights of embeddings that outputs are products with, without a layer between.

        Args:
            outputs: Tensors that the network returned.
        """
        return {name for output in outputs for name in self._origins.of("", output) if name in self._embeddings}

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._names.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.pop()
        own = list(module.parameters(recurse=False))
        if own:
            self._layer_output = first_tensor(output)
            is_matrix = any(parameter.ndim > 1 for parameter in own)
            for attention in self._origins.attentions(first_tensor(args)) if is_matrix and self.collects else ():
                self.fed.setdefault(attention, set()).add(name)
            self._origins.note(name, self._layer_output, is_matrix)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, keywords = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == DOT_PRODUCT:
            return self._attention(func, *args, **keywords)
        if name == MULTIHEAD:  # a function of torch's, which calls others inside
            self._inner, self._chains = args[3] // args[4], {}  # the embedding's size and the number of heads
            attention, softmax = F.scaled_dot_product_attention, F.softmax
            inside: dict[str, Any] = {
                DOT_PRODUCT: lambda *a, **k: self._attention(attention, *a, **k),
                SOFTMAX: lambda *a, **k: softmax(*self._seen(a, k), **k),
            }
            self._origins.fused = True  # its projections are parameters of the module itself
            try:
                with patch.multiple(F, **inside):
                    return func(*args, **keywords)
            finally:
                self._origins.fused = False
        given = [part for x in (*args, *keywords.values()) for part in (x if isinstance(x, (list, tuple)) else (x,))]
        chain = next((self._chains[id(x)] for x in given if self._is_chained(x)), None)
        if name == SOFTMAX:
            self._seen(args, keywords)
        elif name in BY_HAND and chain is not None and chain.tensor is given[0]:
            self._seen((chain.tensor, -1), {})
            return func(*args, **keywords)
        if chain is not None and _writes_over(name) and chain.product is chain.tensor:
            chain = chain._replace(product=chain.product.clone())
        result = func(*args, **keywords)
        if name in PRODUCTS and (inner := _summed(name, args, keywords)):
            self._inner = inner
            self._follow(Chain(result, _without_addend(name, args, keywords, result), inner))
        elif chain is not None:
            made = result if isinstance(result, Tensor) else chain.tensor  # written over by an index
            if name in PARTS:
                self._follow(Chain(made, chain.product, chain.inner))
            elif made.numel() == chain.tensor.numel():
                self._follow(Chain(made, chain.after(func, name, args, keywords, made), chain.inner))
        return result

    def _is_chained(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._chains and self._chains[id(value)].tensor is value

    def _follow(self, chain: Chain) -> None:
        if self.collects and get_ident() == self._thread:
            self._chains[id(chain.tensor)] = chain

    def _seen(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """Look at the arguments of a softmax, and return them."""
        logits = args[0] if args else keywords.get("input")
        dim = args[1] if len(args) > 1 else keywords.get("dim")
        if isinstance(logits, Tensor) and logits.ndim >= 3 and isinstance(dim, int):
            over_keys = dim % logits.ndim == logits.ndim - 1 or self._is_chained(logits)
            if over_keys and logits is not self._layer_output:
                chain = self._chains[id(logits)] if self._is_chained(logits) else Chain(logits, logits, self._inner)
                self._keep(logits, chain.product, chain.inner)
            self._inner, self._chains = 0, {}
        return args

    def _keep(self, logits: Tensor, product: Tensor, head_dim: int) -> None:
        if self.collects and self._names and get_ident() == self._thread:
            name = self._names[-1]
            self.logits.setdefault(name, []).append(logits)
            self.products.setdefault(name, []).append(product)
            self.sources.setdefault(name, set()).update(self._origins.of(name, logits))
            self._origins.note_logits(name, logits)
            if head_dim:
                self.head_dims[name] = head_dim

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
        logits = product = query @ key.mT * (1 / math.sqrt(head_dim) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        self._keep(logits, product, head_dim)
        unmasked = logits.isfinite().any(-1, keepdim=True)  # what attends to nothing gets zeros
        weights = logits.masked_fill(~unmasked, 0.0).softmax(-1) * unmasked
        return F.dropout(weights, dropout_p) @ value


class Origins:
    """Which layers and parameters a tensor comes from: the nearest ones in the graph of its derivatives."""

    def __init__(self) -> None:
        self.fused = False
        self._layers: dict[Any, tuple[str, bool]] = {}  # by node: the layer, and whether it has a matrix
        self._logits: dict[Any, str] = {}  # by node: the module whose attention logits they are
        self._parameters: dict[int, str] = {}

    def name_parameters(self, model: nn.Module) -> None:
        """Learn the names of a network's matrices."""
        named = model.named_parameters()
        self._parameters = {id(parameter): clean_name(name) for name, parameter in named if parameter.ndim > 1}

    def note(self, name: str, output: Tensor | None, is_matrix: bool) -> None:
        """Learn what a layer returned."""
        if output is not None and output.grad_fn is not None:
            self._layers[output.grad_fn] = (name, is_matrix)

    def note_logits(self, module: str, logits: Tensor) -> None:
        """Learn where a module's attention logits are."""
        if logits.grad_fn is not None:
            self._logits[logits.grad_fn] = module

    def attentions(self, tensor: Tensor | None) -> set[str]:
        """Return the modules whose attention a layer's input comes from, without another layer's matrix between."""
        return set() if tensor is None or not self._logits else self._walk(tensor, through_norms=True)[2]

    def of(self, module: str, tensor: Tensor) -> set[str]:
        """Return the origins of a module's tensor. The way there leads through norms, unless a bare matrix is on it."""
        if self.fused:
            return {module}
        found, bare, _ = self._walk(tensor, through_norms=True)
        return self._walk(tensor, through_norms=False)[0] if bare else found

    def _walk(self, tensor: Tensor, through_norms: bool) -> tuple[set[str], bool, set[str]]:
        """Return layers and parameters, whether there are bare matrices among them, and attentions on the way."""
        found, bare, attentions, seen = set[str](), False, set[str](), set[Any]()
        waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._logits:
                attentions.add(self._logits[node])
            name, is_matrix = self._layers.get(node, ("", False))
            if name:
                found.add(name)
            if is_matrix or (name and not through_norms):
                continue
            parameter = self._parameters.get(id(getattr(node, "variable", None)))
            if parameter is not None and not name:
                found.add(parameter)
                bare = True
            waiting += [following for following, _ in node.next_functions if following is not None]
        return found, bare, attentions


class Chain(NamedTuple):
    """What has become of a product of queries and keys.

    Attributes:
        tensor: What it is now, with all that was added to it.
        product: The product itself, with the scales and shapes that ``tensor`` got since.
        inner: The size of the dimension that it summed over.
    """

    tensor: Tensor
    product: Tensor
    inner: int

    def after(
        self, function: Any, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Tensor
    ) -> Tensor:
        """Return the product after an operation on the tensor: scaled and shaped alike, without what is added."""
        if self.product is self.tensor and (name in CARRIED or result is self.tensor):
            return result if name in CARRIED else self.product
        if name in CARRIED:
            product = self.product.clone() if _writes_over(name) else self.product
            changed: Tensor = function(
                *(product if x is self.tensor else x for x in args),
                **{key: product if x is self.tensor else x for key, x in keywords.items()},
            )
            return changed
        if name in SCALED_SUMS and len(args) > 2 and args[1] is self.tensor:
            factor = args[2] if name == "addcmul" else 1 / args[2]
            scaled: Tensor = self.product * factor * keywords.get("value", 1)
            return scaled
        factor = keywords.get("alpha", 1) if name in SUMS and args and args[0] is not self.tensor else 1
        return self.product if factor == 1 else self.product * factor


def _writes_over(name: str) -> bool:
    """Whether an operation changes its tensor in place."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _without_addend(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Tensor) -> Tensor:
    """A product without what ``baddbmm`` adds to it; with beta = 0 that is nothing, whatever numbers it has."""
    beta = keywords.get("beta", 1) if name == "baddbmm" else 0
    return result - beta * (args[0] if args else keywords["input"]) if beta else result


def _summed(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """Return the size of the dimension that a batched product of two tensors sums over; 0: not known."""
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    if name == "sum":  # of products of entries, over the last dimension
        dim = args[1] if len(args) > 1 else keywords.get("dim")
        if not isinstance(dim, int) or not tensors or tensors[0].ndim < 4:
            return 0
        return int(tensors[0].shape[-1]) if dim % tensors[0].ndim == tensors[0].ndim - 1 else 0
    if len(tensors) < 2 or tensors[-1].ndim < 3:
        return 0
    if name != "einsum":
        return int(tensors[-1].shape[-2])
    terms, _, result = str(args[0]).replace(" ", "").partition("->")
    first = terms.split(",")[0]
    summed = [letter for letter in first if letter not in result and letter.isalpha()]
    if len(summed) != 1:
        return 0
    place = first.index(summed[0])
    return int(tensors[0].shape[place - len(first) if "." in first[:place] else place])
