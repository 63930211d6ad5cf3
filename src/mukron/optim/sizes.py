"""How many numbers a method's state holds for a layer, counted without building anything.

N rows (samples x positions) of d numbers make a factor: either the rows and their N x N Gram matrix, or a d x d matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mukron.curvature import Exact, Fisher, as_rows
from mukron.memory import EMA, LARGEST_AVERAGED, Auto, Batch, Memory, Sum, Window
from mukron.optim.options import Trust

if TYPE_CHECKING:
    from mukron.optim.spec import RunFields


@dataclass(frozen=True)
class LayerSize:
    """A layer as a matrix [groups, d_out, d_in], and the batch that reaches it."""

    d_in: int
    d_out: int
    groups: int = 1
    one_hot: bool = False  # its inputs are indices: A is diagonal
    ties_head: bool = False  # but its weight is a head's too: A is a matrix over the vocabulary
    samples: int = 1
    positions: int = 1  # of a sample that share the weight
    classes: int = 1  # outputs of the network


def nothing(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """No factors."""
    return 0


def input_factor(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """A and its inverse."""
    return layer.groups * _kronecker(layer.d_in, layer.d_out, _rows(layer, options), options, diagonal=layer.one_hot)


def both_factors(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """A, B and their inverses; of a weight that an embedding and a head use both are matrices, whatever the form."""
    if layer.ties_head:
        memory = _memory(options, Batch(), Auto())
        copies = memory.batches + 1 if isinstance(memory, Window) else _copies(memory, options["solver"])
        return copies * (layer.d_in**2 + layer.d_out**2)
    fisher = Fisher.of(options["fisher"] or "signs")
    draws = layer.classes if isinstance(fisher, Exact) else getattr(fisher, "draws", 1)
    B = _kronecker(layer.d_out, layer.d_in, draws * _rows(layer, options), options)
    return input_factor(layer, options) + layer.groups * B


def gradient_moments(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """Shampoo's L and R and their roots; over tokens R is a diagonal."""
    copies = _copies(_memory(options, Sum(), EMA()), options["solver"])
    tokens = layer.d_in if layer.one_hot and options.get("sides") != "output" else 0
    return layer.groups * copies * (tokens + sum(d * d for d in _whole_sides(layer, options)))


def bases(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """SOAP's L and R with their eigenbases; sides that are not turned have neither."""
    return layer.groups * 2 * sum(d * d for d in _whole_sides(layer, options))


def kernel_size(layer: LayerSize, options: Mapping[str, Any]) -> int:
    """Gauss-Newton's kernel over samples x outputs, and the rows it is made of."""
    rows = layer.samples * layer.classes
    return rows * rows + rows * layer.positions * (layer.d_in + layer.d_out)


def momentum_and_graft(run: RunFields) -> int:
    """One copy of the weights for momentum, two for a graft onto Adam."""
    return (run.momentum > 0) + 2 * (run.method_options.get("trust") == "graft:adam")


def momentum_and_squares(run: RunFields) -> int:
    """SOAP's average of squares beside."""
    return momentum_and_graft(run) + 1


def adams_moments(run: RunFields) -> int:
    return 2


def _kronecker(d: int, other: int, rows: int, options: Mapping[str, Any], diagonal: bool = False) -> int:
    memory = _memory(options, Batch(), Auto())
    copies = _copies(memory, options["solver"])
    form = "rows" if isinstance(memory, Window) else options["form"]
    form = "matrix" if memory.averages or options["solver"] != "cholesky" else form
    form = "matrix" if isinstance(memory, Auto) and d <= LARGEST_AVERAGED else form
    if diagonal:
        return copies * d
    if as_rows(rows, d, other, form):
        return rows * d + rows * rows
    return copies * d * d


def _memory(options: Mapping[str, Any], plain: Memory, bounded: Memory) -> Memory:
    """The memory that was given, or the usual one without and with a bound on steps."""
    if options["memory"] is not None:
        memory: Memory = options["memory"]
        return memory
    return plain if Trust.of(options["trust"]) is None else bounded


def _whole_sides(layer: LayerSize, options: Mapping[str, Any]) -> list[int]:
    """The lengths of the sides that have a factor: those that were chosen, are not too long, and not tokens."""
    chosen = options.get("sides", "both")
    lengths = {"output": layer.d_out, **({} if layer.one_hot else {"input": layer.d_in})}
    return [d for side, d in lengths.items() if chosen in ("both", side) and d <= options["max_size"]]


def _copies(memory: Memory, solver: str) -> int:
    """What is remembered and its inverse; "tracked" keeps the basis of both too."""
    if solver == "tracked":
        return 3
    return 2 if memory.averages or isinstance(memory, Auto) else 1


def _rows(layer: LayerSize, options: Mapping[str, Any]) -> int:
    memory = options["memory"]
    batches = memory.batches if isinstance(memory, Window) else 1
    return batches * layer.samples * (layer.positions if options["sharing"] == "expand" else 1)
