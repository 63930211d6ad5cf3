"""(M + rho I)^-1 of many matrices at once, by damped Cholesky factorizations that do not give up at the first failure.

Alone, a factorization of a thousand rows leaves most of a GPU idle, and launching it takes longer than its work. So on
a GPU small matrices of one size are stacked, larger ones have a stream each, the largest share two, and kernels that
are not too large in all are recorded once for given sizes as a CUDA graph, which replays with a single launch.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mukron.linalg.precision import matmul_precision

if TYPE_CHECKING:
    from mukron.linalg.factors import Factor, Operator
    from mukron.linalg.solvers import Solver

    Factors = tuple[Mapping[str, Factor], Mapping[str, Tensor]]  # of one block, and the damping of each
    Prepared = tuple[dict[str, Operator], dict[str, str]]  # operators, and by factor how it was rescued

STREAMS = 8
STACKED = 512  # matrices up to this size are stacked
ASIDE = 1024  # matrices up to this size have a stream each; of larger ones two fill a GPU
LEAF = 1024  # up to this size a triangular matrix is inverted as such
RECORDED_LEAF = 64  # the same inside a recording, where launches cost nothing
RECORDED = 2**23  # numbers in all, up to which kernels are recorded: a recording holds about five times its matrices
RECORDINGS = 4  # kept at a time
Damped = tuple[Tensor, Tensor]  # M [groups, d, d] and rho [groups]


class FactorizationError(RuntimeError):
    """No attempt gave a factorization: the matrix is not finite, or far from positive semi-definite."""


@dataclass(frozen=True)
class Factorization:
    """The lower factor L of M + rho I, the damping it took, and how it was rescued ("" if the first attempt held)."""

    lower: Tensor
    rho: Tensor
    rescue: str = ""


@dataclass(frozen=True)
class Inverse:
    """(M + rho I)^-1, the damping it took, and how it was rescued ("" if the first attempt held)."""

    matrix: Tensor
    rho: Tensor
    rescue: str = ""


# What is tried, in order, when the plain factorization fails. Each entry: name, damping times, dtype, device.
RESCUES: tuple[tuple[str, float, torch.dtype | None, str | None], ...] = (
    ("", 1.0, None, None),
    ("10 x damping", 10.0, None, None),
    ("100 x damping", 100.0, None, None),
    ("float64", 1.0, torch.float64, None),
    ("float64 on the CPU", 1.0, torch.float64, "cpu"),
    ("float64 on the CPU, 10 x damping", 10.0, torch.float64, "cpu"),
)


def factorize(M: Tensor, rho: Tensor) -> Factorization:
    """Cholesky of M + rho I for positive semi-definite M [..., d, d] and damping rho [...]; tries ``RESCUES``."""
    for rescue, times, dtype, device in RESCUES:
        damped = add_to_diagonal(M.to(dtype=dtype or M.dtype, device=device or M.device), times * rho)
        lower, info = torch.linalg.cholesky_ex(damped)
        # an entry that is not finite makes the diagonal of its row so
        if not bool(info.any()) and bool(lower.diagonal(dim1=-2, dim2=-1).isfinite().all()):
            return Factorization(lower.to(M), times * rho, rescue)
    raise FactorizationError(f"a {list(M.shape)} matrix could not be factorized at damping {rho.tolist()}")


def add_to_diagonal(M: Tensor, rho: Tensor) -> Tensor:
    """M + rho I as a new tensor: damping never adds up on a running statistic."""
    damped = M.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(rho.to(damped).unsqueeze(-1))
    return damped


def attempt(damped: Sequence[Damped]) -> tuple[list[Tensor], list[Tensor]]:
    """The inverses, and numbers [groups] for each that are finite if it came out well.

    Nothing is read from the device: whoever uses the inverses has to look at the numbers.
    """
    if not damped:
        return [], []
    if not damped[0][0].is_cuda:
        found = [_inverse(*each, *_room(*each), LEAF) for each in damped]
        return [inverse for inverse, _ in found], [number for _, number in found]
    by_size: dict[tuple[int, torch.dtype, int], list[int]] = defaultdict(list)
    for place, (M, _) in enumerate(damped):
        d = M.shape[-1]
        by_size[d, M.dtype, 0 if d <= STACKED else place + 1].append(place)
    stacks = [_stacked([damped[place] for place in places]) for places in by_size.values()]
    recordable = sum(M.numel() for M, _ in stacks) <= RECORDED  # the same operations, recorded yet or not
    found = (_recorded(stacks) or _side_by_side(stacks, RECORDED_LEAF)) if recordable else _side_by_side(stacks, LEAF)
    inverses: list[Tensor] = [damped[0][0]] * len(damped)
    numbers: list[Tensor] = list(inverses)
    for places, (inverse, number) in zip(by_size.values(), found, strict=True):
        if len(places) == 1:
            inverses[places[0]], numbers[places[0]] = inverse, number
            continue
        groups = [len(damped[place][0]) for place in places]
        for place, part, own in zip(places, torch.split(inverse, groups), torch.split(number, groups), strict=True):
            inverses[place], numbers[place] = part, own
    return inverses, numbers


def invert(damped: Sequence[Damped]) -> list[Inverse | FactorizationError]:
    """The same, with a look at each inverse; those that failed are rescued one by one."""
    inverses, numbers = attempt(damped)
    good = [bool(number.isfinite().all()) for number in numbers]
    return [
        Inverse(matrix, rho) if fine else _rescued(M, rho)
        for fine, matrix, (M, rho) in zip(good, inverses, damped, strict=True)
    ]


def _rescued(M: Tensor, rho: Tensor) -> Inverse | FactorizationError:
    try:
        found = factorize(M, rho)
    except FactorizationError as error:
        return error
    return Inverse(_from_lower(found.lower, LEAF), found.rho, found.rescue)


def _stacked(damped: Sequence[Damped]) -> Damped:
    if len(damped) == 1:
        return damped[0]
    return torch.cat([M for M, _ in damped]), torch.cat([rho for _, rho in damped])


def _room(M: Tensor, rho: Tensor) -> Damped:
    return torch.empty_like(M, memory_format=torch.contiguous_format), torch.empty_like(rho)


def _inverse(M: Tensor, rho: Tensor, out: Tensor, number: Tensor, leaf: int) -> Damped:
    lower, info = torch.linalg.cholesky_ex(add_to_diagonal(M, rho))
    failed = info != 0
    if not M.is_cuda:
        lower.diagonal(dim1=-2, dim2=-1).masked_fill_(failed.unsqueeze(-1), 1.0)  # a zero there would be an error
    _from_lower(lower, leaf, out)
    torch.sum(out.diagonal(dim1=-2, dim2=-1), -1, out=number).masked_fill_(failed, torch.nan)
    return out, number


def _from_lower(lower: Tensor, leaf: int, out: Tensor | None = None) -> Tensor:
    """L^-T L^-1. On a GPU the inverse of L and a product take about half the time of torch's ``cholesky_inverse``."""
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower, out=out)
    half = inverse_of_lower(lower, leaf)
    return torch.matmul(half.mT, half, out=out)


def inverse_of_lower(L: Tensor, leaf: int) -> Tensor:
    """L^-1 of a lower triangular L [groups, d, d], by products: both diagonal blocks at once, then what is below them.

    [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]
    """
    groups, d = L.shape[0], L.shape[-1]
    if d <= leaf:
        identity = torch.eye(d, dtype=L.dtype, device=L.device).expand_as(L)
        solved: Tensor = torch.linalg.solve_triangular(L, identity, upper=False)
        return solved
    if d % 2:  # one more row, of the identity
        wider = torch.eye(d + 1, dtype=L.dtype, device=L.device).repeat(groups, 1, 1)
        wider[:, :d, :d] = L
        return inverse_of_lower(wider, leaf)[:, :d, :d]
    h = d // 2
    blocks = inverse_of_lower(torch.cat([L[:, :h, :h], L[:, h:, h:]]), leaf)
    A, D = blocks[:groups], blocks[groups:]
    found = torch.zeros_like(L)
    found[:, :h, :h], found[:, h:, h:] = A, D
    found[:, h:, :h].baddbmm_(torch.bmm(D, L[:, h:, :h]), A, alpha=-1)
    return found


# On a GPU.


@lru_cache(maxsize=8)
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _side_by_side(stacks: Sequence[Damped], leaf: int) -> list[Damped]:
    """Large ones two at a time, for one's products fill the gaps of the other's factorization; small ones beside them.

    Results are made on the stream that will use them: what a side stream allocates stays its own.
    """
    found = [_room(*stack) for stack in stacks]
    jobs = sorted(zip(stacks, found, strict=True), key=lambda job: -job[0][0].shape[-1])
    large = sum(stack[0].shape[-1] > ASIDE for stack, _ in jobs)
    device = stacks[0][0].device
    here, (beside, *others) = torch.cuda.current_stream(device), _streams(device)
    lanes = [(here, beside)[place % 2] for place in range(large)]
    lanes += [others[place % len(others)] for place in range(len(jobs) - large)]
    for stream in set(lanes) - {here}:
        stream.wait_stream(here)
    for stream, (stack, room) in zip(lanes, jobs, strict=True):
        with torch.cuda.stream(stream):
            _inverse(*stack, *room, leaf)
    for stream in set(lanes) - {here}:
        here.wait_stream(stream)
    return found


class Recording:
    """The kernels for matrices of given sizes, recorded once. Replaying them costs one launch."""

    def __init__(self, stacks: Sequence[Damped]) -> None:
        self.given = [tensor.clone() for stack in stacks for tensor in stack]
        own = list(zip(self.given[::2], self.given[1::2], strict=True))
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up outside of a recording
            for _ in range(2):
                _side_by_side(own, RECORDED_LEAF)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            found = _side_by_side(own, RECORDED_LEAF)
            self.found, self.numbers = [inverse for inverse, _ in found], torch.cat([number for _, number in found])
        self.sizes = [len(number) for _, number in found]

    def __call__(self, stacks: Sequence[Damped]) -> list[Damped]:
        torch._foreach_copy_(self.given, [tensor for stack in stacks for tensor in stack])
        self.graph.replay()
        found = [torch.empty_like(tensor) for tensor in self.found]
        torch._foreach_copy_(found, self.found)
        return list(zip(found, torch.split(self.numbers.clone(), self.sizes), strict=True))


_recordings: OrderedDict[object, Recording | None] = OrderedDict()  # None: these sizes cannot be recorded


def _recorded(stacks: Sequence[Damped]) -> list[Damped] | None:
    """By a recording, which is made when sizes come a second time; None: there is none."""
    if torch.cuda.is_current_stream_capturing():
        return None
    key = (stacks[0][0].device, matmul_precision(), *((M.shape, M.dtype) for M, _ in stacks))
    if key not in _recordings:
        _recordings[key] = None
        _seen.add(key)
        while len(_recordings) > RECORDINGS:
            _seen.discard(_recordings.popitem(last=False)[0])
        return None
    if key in _seen:
        _seen.discard(key)
        try:
            _recordings[key] = Recording(stacks)
        except RuntimeError:  # a library that cannot be recorded: it is slower without, and no less right
            torch.cuda.synchronize()
    _recordings.move_to_end(key)
    recording = _recordings[key]
    return None if recording is None else recording(stacks)


_seen: set[object] = set()  # sizes that came once


def prepare(
    blocks: Sequence[Factors], powers: Sequence[Mapping[str, Fraction]], solver: Solver, rescue: bool = True
) -> tuple[list[Prepared | FactorizationError], list[Tensor]]:
    """(X + rho_X I)^-e for every factor X of many blocks. Inverses are made for all blocks at once.

    rescue: look at how the inverses came out, and rescue those that failed. Without it nothing is read from the device,
    and the caller has to see that the numbers returned are finite.
    """
    wanted = {
        (number, name): damped
        for number, (factors, rho) in enumerate(blocks)
        for name, factor in factors.items()
        if (damped := factor.damped(rho[name], powers[number][name], solver)) is not None
    }
    numbers: list[Tensor] = []
    if rescue:
        made: Sequence[Inverse | FactorizationError] = invert(list(wanted.values()))
    else:
        matrices, numbers = attempt(list(wanted.values()))
        made = [Inverse(matrix, rho) for matrix, (_, rho) in zip(matrices, wanted.values(), strict=True)]
    inverses = dict(zip(wanted, made, strict=True))
    prepared: list[Prepared | FactorizationError] = []
    for number, (factors, rho) in enumerate(blocks):
        operators, rescues = {}, {}
        try:
            for name, factor in factors.items():
                inverse = inverses.get((number, name))
                if isinstance(inverse, FactorizationError):
                    raise inverse
                if inverse is None:
                    operators[name], how = factor.prepare(rho[name], powers[number][name], solver)
                else:
                    operators[name], how = factor.operator(inverse), inverse.rescue
                if how:
                    rescues[name] = how
        except FactorizationError as error:
            prepared.append(error)
        else:
            prepared.append((operators, rescues))
    return prepared, numbers


def at_least_rounding(blocks: Sequence[Factors]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The damping of each factor, at least its own rounding, and 1 for a factor of zeros (no signal yet).

    Damping that is no normal number (signals vanish) counts as zero: its inverse would overflow.

    Returned with it is trace / damping, a bound of the condition number. All factors are handled as one vector: on a
    GPU each small operation costs a launch.
    """
    places = [(number, name) for number, (factors, _) in enumerate(blocks) for name in factors]
    damping: list[dict[str, Tensor]] = [{} for _ in blocks]
    conditions: list[dict[str, Tensor]] = [{} for _ in blocks]
    for dtype in {blocks[number][1][name].dtype for number, name in places}:
        some = [(number, name) for number, name in places if blocks[number][1][name].dtype == dtype]
        factors = [blocks[number][0][name] for number, name in some]
        traces = [factor.trace() for factor in factors]
        sizes = [len(trace) for trace in traces]
        trace = torch.cat(traces)
        rounding = trace * _rounding(dtype, trace.device, *zip(sizes, [factor.d for factor in factors], strict=True))
        rho = torch.maximum(torch.cat([blocks[number][1][name] for number, name in some]), rounding)
        rho = rho.where(~(rho < torch.finfo(dtype).tiny), 1.0)
        parts = zip(some, torch.split(rho, sizes), torch.split(trace / rho, sizes), strict=True)
        for (number, name), own_rho, condition in parts:
            damping[number][name], conditions[number][name] = own_rho, condition
    return damping, conditions


@lru_cache(maxsize=64)
def _rounding(dtype: torch.dtype, device: torch.device, *sizes: tuple[int, int]) -> Tensor:
    """eps / d for every group of factors with so many groups and d rows."""
    numbers = [torch.finfo(dtype).eps / d for groups, d in sizes for _ in range(groups)]
    return torch.tensor(numbers, dtype=dtype, device=device)
