"""From a gradient to the direction of a step: gradient -> (momentum before) -> precondition -> trust.

    G    the gradient of one block as matrices [groups, d_out, d_in], or as D^T H
    P    prepared operators, one a side: W <- W - eta P_out G P_in

Tensors may have a leading run dimension in place of groups: a stack of runs uses ``apply`` as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mukron.curvature import local
from mukron.layers import WEIGHT
from mukron.linalg import LowRank, Operator, probe, products_of
from mukron.optim.options import RMS, AdamStep, Graft, KLClip, Spectral, StepRule
from mukron.optim.table import LayerEntry, ParameterEntry
from mukron.optim.update import Move, times

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder
    from mukron.optim.transaction import Transaction

Place = tuple[LayerEntry, str]  # a layer and one of its blocks
NO_MOVE = 1e-20  # of its bound: what is no longer than that is a move of zeros
DIRECTIONS = 3  # random directions beside the one of the last step: a new large direction is seen at once
ROUNDS, FIRST_ROUNDS = 3, 6
STACKS_ON = ("cuda",)  # devices where each operation costs a launch
SMALL = 1 << 20  # entries of a move up to which a launch costs more than what it computes
OUT_SIDE, IN_SIDE = ("B", "L"), ("A", "R", "K")  # factors of the layer's output and of its input


def directions(optimizer: SecondOrder, step: Transaction) -> dict[str, Move]:
    """What to subtract from every parameter that has a gradient, by name, before its learning rate."""
    moves: dict[str, Move] = {}
    gains: list[Tensor] = []  # eta^2 s <move, gradient>, s the multiplier of the learning rate; a chosen part is eta's
    options, started = optimizer.options, optimizer.steps >= optimizer.options.start
    found: list[tuple[LayerEntry, str, Move, Move, Move]] = []
    for alike in _places(optimizer, step):
        with products_of(True) if alike[0][0].layer.tf32 else nullcontext():
            given = [(layer, block, *both) for layer, block in alike if (both := _gradient(step, layer, block))]
            made = _preconditioned(step, given) if started else [G for *_, G in given]
            found += [(*each, direction) for each, direction in zip(given, made, strict=True)]
    for (layer, block, raw, G, direction), move in zip(found, all_bounded(step, found), strict=True):
        entry = layer.blocks[block]
        if step.applied is not None and started:
            step.applied[layer.name, block] = raw, G, direction
        if isinstance(options.trust, KLClip):
            move = dense(move)  # noqa: PLW2901
            if optimizer.exchange is None or optimizer.exchange.counts(layer.name):
                gain = (move * dense(G)).sum().double()
                gains.append(base_rate(entry) ** 2 * entry.scale * entry.chosen * gain)
        if isinstance(move, LowRank) and not entry.group["nesterov"] and _takes_products(entry, move):
            moves[entry.name] = move
            continue
        with products_of(True) if layer.layer.tf32 else nullcontext():
            moves[entry.name] = layer.layer.values(block, dense(move))
    step.gain = torch.stack(gains).sum() if gains else torch.zeros((), dtype=torch.float64, device=step.gain.device)
    for entry in optimizer.entries.values():
        if not entry.preconditioned and (gradient := plain_gradient(step, entry)) is not None:
            announce(step, entry)
            averages = momentum_on_gradient(entry) and not isinstance(options.fallback, AdamStep)
            G = _averaged(step, entry, gradient) if averages else gradient
            moves[entry.name] = _by_rule(step, options.fallback, entry, gradient, G)
    return moves


def _takes_products(entry: ParameterEntry, move: LowRank) -> bool:
    """Whether D^T H can be added straight to the weight or its buffer."""
    return entry.parameter.is_contiguous() and entry.parameter.dtype == move.D.dtype


def _places(optimizer: SecondOrder, step: Transaction) -> Iterable[list[Place]]:
    """Layers and their blocks: one by one, or those of one shape, here and at the base width, together."""
    places = [(layer, block) for layer in step.ready for block in layer.blocks]
    if not optimizer.in_stacks:
        return [[place] for place in places]
    alike: dict[tuple[Any, ...], list[Place]] = {}
    for layer, block in places:
        known, weight, growth = layer.layer, layer.anchor, layer.sides[block].growth
        eps = layer.blocks[block].eps
        kind = (block, known.d_out, known.d_in, eps, *growth.items(), weight.dtype, weight.device, known.tf32)
        alike.setdefault(kind, []).append((layer, block))
    return alike.values()


def _preconditioned(step: Transaction, found: Sequence[tuple[LayerEntry, str, Move, Move]]) -> list[Move]:
    """The direction of each gradient; several of one shape are one stack, a layer's groups beside the next one's."""
    optimizer = step.optimizer
    if len(found) < 2:
        return [optimizer.precondition(layer, block, G, step) for layer, block, _, G in found]
    (layer, block, *_), matrices = found[0], [dense(G) for *_, G in found]
    moved = dense(optimizer.precondition(layer, block, torch.cat(matrices), step))
    return list(torch.split(moved, [len(matrix) for matrix in matrices]))


def _gradient(step: Transaction, layer: LayerEntry, block: str) -> tuple[Move, Move] | None:
    """The gradient of a block, and what is preconditioned of it; None: it has none, or there is no curvature yet."""
    entry, optimizer = layer.blocks[block], step.optimizer
    raw = whole_gradient(step, layer, block, entry)
    if raw is None or (optimizer.by_block and block not in step.value(layer, "operators")):
        return None
    announce(step, entry)
    return raw, block_gradient(step, layer, block, entry, raw)


def announce(step: Transaction, entry: ParameterEntry) -> None:
    """This step moves the parameter: its learning rate, and a buffer if it has none and momentum is on the update."""
    step.rates[entry.name] = base_rate(entry) * entry.scale
    weight, adam = entry.parameter, not entry.preconditioned and isinstance(step.optimizer.options.fallback, AdamStep)
    on_update = entry.group["momentum"] and entry.group["momentum_on"] == "update" and not adam
    if not on_update or "momentum_buffer" in step.state_of(weight):
        return
    dtype = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
    part = weight if step.optimizer.exchange is None else local(weight)
    buffer = torch.zeros_like(part, dtype=dtype, memory_format=torch.contiguous_format)
    step.stage(weight, momentum_buffer=buffer)


# Trust.


def all_bounded(step: Transaction, found: Sequence[tuple[LayerEntry, str, Move, Move, Move]]) -> list[Move]:
    """Every move within its trust; on a GPU small ones of one shape are one stack. found: what ``bounded`` takes."""
    trust, stacks = step.optimizer.options.trust, dict[Any, list[int]]()
    for place, (layer, block, _, _, move) in enumerate(found):
        alike = _kind_of_bound(step, layer, block, move) if isinstance(trust, Spectral) else None
        stacks.setdefault(place if alike is None else alike, []).append(place)
    moves = [move for *_, move in found]
    for places in stacks.values():
        with products_of(True) if found[places[0]][0].layer.tf32 else nullcontext():
            if len(places) == 1:
                moves[places[0]] = bounded(step, *found[places[0]])
                continue
            assert isinstance(trust, Spectral)
            of, stack = [found[place][:2] for place in places], torch.cat([dense(moves[place]) for place in places])
            shorter = dense(_within_spectral_norm(step, trust, of, stack))
            for place, part in zip(places, shorter.chunk(len(places)), strict=True):
                moves[place] = part
    return moves


def _kind_of_bound(step: Transaction, layer: LayerEntry, block: str, move: Move) -> tuple[Any, ...] | None:
    """What moves have in common that may be bounded as one stack; None: this one is bounded by itself."""
    by_token, cut = layer.layer.one_hot and block == WEIGHT, step.optimizer.options.block is not None
    if isinstance(move, LowRank) or move.device.type not in STACKS_ON or move[0].numel() > SMALL or by_token or cut:
        return None
    entry = layer.blocks[block]
    known = "power_vector" in step.state_of(entry.parameter), _first_excess(step, layer, block) is not None
    ranks = step.optimizer.exchange  # which have other moves beside those that all of them compute
    alike = *move.shape, move.dtype, move.device, entry.scale, layer.layer.tf32, *known
    return *alike, ranks is not None and ranks.everywhere(layer.name)


def bounded(step: Transaction, layer: LayerEntry, block: str, raw: Move, G: Move, move: Move) -> Move:
    """A layer's move within its trust. ``KLClip`` is of all layers together, and not for here.

    raw: the gradient; G: what was preconditioned, the gradient or its average.
    """
    trust, entry = step.optimizer.options.trust, layer.blocks[block]
    if isinstance(trust, Spectral):
        if step.optimizer.options.block is not None:  # the bound is on the whole matrix, whatever it was cut into
            whole = _within_spectral_norm(step, trust, [(layer, block)], layer.layer.whole(block, dense(move)))
            return layer.layer.cut(block, dense(whole))
        return _within_spectral_norm(step, trust, [(layer, block)], move)
    if isinstance(trust, RMS):
        return _of_length(step, layer, block, dense(move), trust.size * entry.parameter.numel() ** 0.5)
    if isinstance(trust, Graft):
        plain, averaged = (layer.layer.values(block, dense(gradient)) for gradient in (raw, G))
        own = _by_rule(step, trust.step_rule, entry, plain, averaged)
        if step.optimizer.steps < step.optimizer.options.start:
            return layer.layer.block(block, own)
        return _of_length(step, layer, block, dense(move), own.norm(dtype=torch.float64))
    return move


def _of_length(step: Transaction, layer: LayerEntry, block: str, move: Tensor, length: Tensor | float) -> Tensor:
    """The move, made as long as that. One that is so short that its entries have lost their digits becomes zero."""
    norm = torch.linalg.vector_norm(move, dtype=torch.float64)  # squares in float32 underflow, or overflow
    step.shortenings[layer.name, block] = (layer.blocks[block].natural / norm).flatten()
    root = (length / norm).where(norm >= torch.finfo(move.dtype).tiny, 0.0).sqrt().to(move.dtype)
    scaled: Tensor = move * root * root  # their product alone may exceed what the dtype can hold
    return scaled


def _within_spectral_norm(step: Transaction, trust: Spectral, places: Sequence[Place], move: Move) -> Move:
    """Moves of one shape and scale, shortened to size (d_out / d_in)^1/2 and to ``growth`` times their first ones."""
    (layer, block), entries = places[0], [layer.blocks[block] for layer, block in places]
    d_out, d_in = (move.D.shape[-1], move.H.shape[-1]) if isinstance(move, LowRank) else move.shape[-2:]
    if layer.layer.one_hot and block == WEIGHT:  # an input picks the row of one token
        move, d_in = dense(move), 1
        largest = torch.linalg.vector_norm(move, dim=-2, keepdim=True)
    else:
        last = [step.state_of(entry.parameter).get("power_vector") for entry in entries]
        largest, vectors = spectral_norm(move, _joined(last))
        for entry, vector in zip(entries, vectors.chunk(len(places)), strict=True):
            step.stage(entry.parameter, power_vector=vector)
    scale = entries[0].scale / entries[0].chosen  # what was chosen counts after the bound, as the learning rate does
    excess = (largest * (scale / (trust.size * (d_out / d_in) ** 0.5))).clamp_min(NO_MOVE)
    first = _joined([_first_excess(step, layer, block) for layer, block in places])
    if first is None:
        for entry, part in zip(entries, excess.amax((-1, -2)).chunk(len(places)), strict=True):
            step.stage(entry.parameter, first_excess=part)
    shortening = to_shorten(trust, excess, first)
    least = shortening.amin((-1, -2))  # over an embedding's tokens
    for (layer, block), part in zip(places, least.chunk(len(places)), strict=True):
        step.shortenings[layer.name, block] = part
    return times(move, shortening)


def _first_excess(step: Transaction, layer: LayerEntry, block: str) -> Tensor | None:
    """The excess of the first move with the same inverse, [groups]; None: this step has made the inverse."""
    operators_of = block if step.optimizer.by_block else WEIGHT
    first = step.state_of(layer.blocks[block].parameter).get("first_excess")
    return first if (layer.name, operators_of) in step.stale else None


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return known[0] if len(known) == 1 else torch.cat(known) if known else None


def to_shorten(trust: Spectral, excess: Tensor, first: Tensor | None) -> Tensor:
    """What a move is multiplied by that is ``excess`` times as long as the bound, [groups, 1, 1] or a number a token.

    first: that of the step which made the inverse, [groups], zero says nothing; None: this step has made it.
    """
    if first is None:
        return (1 / excess).clamp_max(1.0)
    allowed = (trust.growth * first).where(first > NO_MOVE, 1.0).clamp_max(1.0)
    return (allowed[:, None, None] / excess).clamp_max(1.0)


def spectral_norm(U: Move, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """The largest singular value of U [groups, d_out, d_in] as [groups, 1, 1], and its right vector.

    The value is that of the best of several directions, so never too large. It is some percent too small where many
    singular values are nearly as large.

    Args:
        U: A matrix, or D^T H.
        start: The vector [groups, d_in] of the last step, nearly the same matrix; None: there is none.
    """
    reference = U if isinstance(U, Tensor) else U.H
    groups, d_in = reference.shape[0], reference.shape[-1]
    V = _directions(d_in, reference.dtype, reference.device).expand(groups, -1, -1)
    if start is not None:
        V = torch.cat([start.to(reference.dtype).unsqueeze(-1), V], dim=-1)
    size = V.new_zeros(groups, V.shape[-1])
    for _ in range(FIRST_ROUNDS if start is None else ROUNDS):
        Y = U @ V if isinstance(U, Tensor) else U.D.mT @ (U.H @ V)
        Y = Y / _length(Y)
        V = U.mT @ Y if isinstance(U, Tensor) else U.H.mT @ (U.D @ Y)
        length = _length(V)
        V, size = V / length, length.squeeze(-2)
    best = size.argmax(-1, keepdim=True)
    vector = V.gather(-1, best.unsqueeze(-2).expand(-1, d_in, 1)).squeeze(-1)
    return size.gather(-1, best).unsqueeze(-1), vector


def _length(X: Tensor) -> Tensor:
    """Of each column, never zero; in float64, since squares of a move that blew up overflow float32."""
    return torch.clamp_min(torch.linalg.vector_norm(X, dim=-2, keepdim=True, dtype=torch.float64).to(X.dtype), 1e-30)


@lru_cache(maxsize=256)
def _directions(d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(d)
    return torch.randn(d, DIRECTIONS, generator=generator, dtype=torch.float64).to(device, dtype)


def base_rate(entry: ParameterEntry) -> float:
    """The learning rate that the group gives a parameter, before the parametrization's multiplier."""
    lr, fallback_lr = float(entry.group["lr"]), entry.group["fallback_lr"]
    if entry.preconditioned or fallback_lr is None:
        return lr
    return float(fallback_lr) * lr / float(entry.group["reference_lr"])  # schedulers move lr alone


# The gradient.


def plain_gradient(step: Transaction, entry: ParameterEntry) -> Tensor | None:
    """The gradient to descend, in the precision of the curvature; coupled weight decay is part of it."""
    G, group = step.gradients.get(entry.name, entry.parameter.grad), entry.group
    if G is None:
        return None
    if G.is_sparse:
        raise ValueError(f'parameter "{entry.name}" has a sparse gradient; build it with sparse=False')
    G = G.float() if G.dtype in (torch.float16, torch.bfloat16) else G
    if group["maximize"]:
        G = -G
    if group["weight_decay"] and not group["decoupled"]:
        G = G + group["weight_decay"] * entry.parameter.to(G.dtype)
    return G


def whole_gradient(step: Transaction, layer: LayerEntry, block: str, entry: ParameterEntry) -> Move | None:
    """The gradient of a block as matrices, or as D^T H where autograd did not form it; None: there is none."""
    G = None if (plain := plain_gradient(step, entry)) is None else layer.layer.block(block, plain)
    statistics = step.statistics.get(layer.name)
    own = statistics.unformed if statistics is not None and block == WEIGHT else None
    if own is None:
        return G
    if entry.group["maximize"]:
        own = LowRank(-own.D, own.H)
    if G is not None:  # a penalty in the loss reaches the weight beside its layer
        return G + own.matrix().to(G.dtype)
    if entry.group["weight_decay"] and not entry.group["decoupled"]:
        W = layer.layer.block(block, entry.parameter.to(own.D.dtype))
        return own.matrix().add(W, alpha=entry.group["weight_decay"])
    return own


def momentum_on_gradient(entry: ParameterEntry) -> bool:
    """Whether momentum is on the gradient, before it is preconditioned."""
    return bool(entry.group["momentum"]) and entry.group["momentum_on"] == "gradient"


def block_gradient(step: Transaction, layer: LayerEntry, block: str, entry: ParameterEntry, raw: Move) -> Move:
    """What is preconditioned: the gradient or its average, as D^T H where that is known and keeps more digits."""
    G = raw
    if isinstance(raw, Tensor) and block == WEIGHT and (layer.name in step.double or not momentum_on_gradient(entry)):
        G = _as_product(step, layer, raw)
    if momentum_on_gradient(entry):
        G = _averaged(step, entry, dense(G))
        step.applied_dense.add(layer.name)
    if layer.name in step.double and isinstance(G, Tensor):
        G = G.double()
    return G


def _as_product(step: Transaction, layer: LayerEntry, G: Tensor) -> Move:
    """G as D^T H from this batch's signals and inputs, as long as it still is that.

    Whoever changed the gradient since by a mere factor (clipping, unscaling) is followed. Any other change, down to
    rounding, is seen in what G does to a random vector, once the step reads its numbers; then G itself is used.
    """
    statistics = step.statistics.get(layer.name)
    own = statistics.product if statistics is not None and step.optimizer.uses_products else None
    group = layer.blocks[WEIGHT].group
    decays = group["weight_decay"] and not group["decoupled"]  # then the gradient is more than D^T H
    if own is None or decays or layer.name in step.altered:
        step.applied_dense.add(layer.name)
        return G
    v = probe(own.H.shape[2], own.H.dtype, G.device)
    ours, actual = ((own.D.mT @ (own.H @ v)).double().flatten(), (G.to(v.dtype) @ v).double().flatten())
    factor = torch.dot(ours, actual) / torch.dot(ours, ours).clamp_min(1e-300)
    step.offsets[layer.name] = (actual - factor * ours, actual, ours, own.D, own.H)
    return LowRank(factor * own.D, own.H)


def _averaged(step: Transaction, entry: ParameterEntry, G: Tensor) -> Tensor:
    """m <- beta m + (1 - beta) G, divided by 1 - beta^t; Nesterov's mixes the gradient in once more."""
    beta, state = entry.group["momentum"], step.state_of(entry.parameter)
    old = state.get("gradient_average")
    m: Tensor = G * (1 - beta) if old is None else old.to(G.dtype).lerp(G, 1 - beta)
    weight: float = (1 - beta) + beta * state.get("gradient_weight", 0.0)  # 1 - beta^t; schedulers may move beta
    step.stage(entry.parameter, gradient_average=m, gradient_weight=weight)
    if entry.group["nesterov"]:
        m, weight = m.lerp(G, 1 - beta), (1 - beta) + beta * weight
    return torch.div(m, weight)


def dense(G: Move) -> Tensor:
    return G.matrix() if isinstance(G, LowRank) else G


def _by_rule(step: Transaction, rule: StepRule, entry: ParameterEntry, G: Tensor, averaged: Tensor) -> Tensor:
    """The step of a fallback rule, or of the rule that sets a grafted step's length. Adam averages for itself."""
    if not isinstance(rule, AdamStep):
        return averaged
    direction, moments = rule.direction(step.state_of(entry.parameter), G, entry.adams_eps)
    step.stage(entry.parameter, **moments)
    return direction


# Preconditioning: operators are prepared once (``linalg.prepare``) and applied often.


def apply(operators: Mapping[str, Operator], G: Move, sides: Collection[str] = IN_SIDE + OUT_SIDE) -> Move:
    """P_out G P_in for G [groups, d_out, d_in], in the form in which G came; or one side alone.

    The precision is that of the operators, which may be those of an earlier step.
    """
    for name, operator in operators.items():
        if name not in sides:
            continue
        G = G if (dtype := operator.dtype) is None else G.to(dtype)
        if isinstance(G, LowRank):
            G = G.right(operator) if name in IN_SIDE else G.left(operator)
        else:
            G = operator.right(G) if name in IN_SIDE else operator.left(G)
    return G
