"""Fisher signals: which derivatives of the network's output the factor B is made of, and how they reach every layer.

For an output f with log-likelihood log p(y | f), one sample's Fisher matrix is E[v v^T] over v = d log p / d f:

    categorical, p = softmax(f)      mc: one-hot(y) - p, y drawn from p     exact: sqrt(p_c) (one-hot(c) - p), every c
                                     signs: sqrt(p) q, q random signs turned to be orthogonal to sqrt(p)
    gaussian, unit variance          mc: a standard normal vector           exact: one-hot(c), every c
                                     signs: s

All have the same mean of v v^T. Where a model is nearly sure of a class c, "mc" draws c nearly always, with a v that is
nearly zero, and once in 1 / (1 - p_c) samples another class, with a v as long as ever: B is far too small most of the
time. With signs every draw has a v of about the right length, with two classes exactly. (Random vectors in place of
drawn targets: curvature propagation, Martens, Sutskever and Swersky 2012.)

A backward pass from v gives every layer's delta. All are of the *summed* log-likelihood: one sample's delta does not
know how many samples there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor
from torch.autograd.graph import GradientEdge

from mukron.arguments import check_flag, check_whole
from mukron.curvature.exact import exact_targets

if TYPE_CHECKING:
    from mukron.curvature.passes import Pass
    from mukron.curvature.ranks import Ranks

LIKELIHOODS = ("categorical", "gaussian")
REDUCTIONS = ("mean", "positions", "sum")  # over samples, over samples and positions, or none


@dataclass(frozen=True)
class Fisher:
    """Base of the four ways to choose targets.

    Example:
        >>> Fisher.of("mc:4")
        MonteCarlo(draws=4)
    """

    name: ClassVar[str]
    kinds: ClassVar[dict[str, type[Fisher]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            Fisher.kinds[cls.name] = cls

    @staticmethod
    def of(
        fisher: Fisher | str, reduction: str | None = None, grad_scaler: torch.amp.GradScaler | None = None
    ) -> Fisher:
        """Make it from text: "signs", "mc", "signs:4", "mc:4", "exact" or "empirical".

        Args:
            fisher: The text, or a value, which is returned as it is.
            reduction: How the loss reduces, as ``Empirical`` has it; None: found from the loss. For "empirical".
            grad_scaler: The GradScaler that multiplies the loss; for "empirical".
        """
        if isinstance(fisher, Fisher):
            return fisher
        name, _, draws = str(fisher).strip().lower().partition(":")
        kind = Fisher.kinds.get(name)
        if kind is None or (draws and not issubclass(kind, Drawn)):
            raise ValueError(f"unknown fisher {fisher!r}; known: {', '.join(map(repr, Fisher.kinds))}")
        if draws and not draws.isdecimal():
            raise ValueError(f'expected a whole number of draws, as in "{name}:4", got fisher={fisher!r}')
        if issubclass(kind, Drawn):
            return kind(int(draws) if draws else 1)
        return Empirical(reduction, grad_scaler) if kind is Empirical else kind()


@dataclass(frozen=True)
class Drawn(Fisher):
    """What the two random ones share: vectors drawn for each sample (and position), of which B is the mean."""

    draws: int = 1

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}")


@dataclass(frozen=True)
class RandomSigns(Drawn):
    """The root of the output's own Fisher matrix times random signs: as cheap as drawn targets, with far less noise.

    A model that is sure of its predictions hardly ever draws another target, so that B is nearly always too small, and
    a hard sample meets an inverse that is far too large. Random signs have the same mean and no such rare events.

    Attributes:
        draws: Vectors of signs for each sample (and position); B is their mean.

    Example:
        >>> RandomSigns(draws=4)
        RandomSigns(draws=4)
    """

    name = "signs"


@dataclass(frozen=True)
class MonteCarlo(Drawn):
    """Targets are drawn from the model's own prediction.

    Attributes:
        draws: Targets drawn for each sample (and position); B is their mean.

    Example:
        >>> MonteCarlo(draws=4)
        MonteCarlo(draws=4)
    """

    name = "mc"


@dataclass(frozen=True)
class Exact(Fisher):
    """Every output in turn, weighted by its probability: one backward pass per output.

    Example:
        >>> Exact()
        Exact()
    """

    name = "exact"


@dataclass(frozen=True)
class Empirical(Fisher):
    """The targets of the data, read from the derivatives of your loss.

    Attributes:
        reduction: How your loss reduces: "mean" (over samples), "positions" (mean over samples and positions) or "sum".
            None: as a categorical loss shows it, or "mean".
        grad_scaler: The GradScaler that multiplies your loss, if there is one.

    Example:
        >>> Empirical(reduction="sum")
        Empirical(reduction='sum')
    """

    name = "empirical"
    reduction: str | None = None
    grad_scaler: torch.amp.GradScaler | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.reduction is not None and self.reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {self.reduction!r}; known: {', '.join(map(repr, REDUCTIONS))}")


@dataclass(frozen=True)
class CaptureOptions:
    """What is measured in a pass.

    Attributes:
        inputs: Layer inputs, for A.
        signals: Fisher signals, for B.
        jacobian: Every output's own derivative, and the loss's derivative by the output: Gauss-Newton.
        fisher: How targets are chosen.
        likelihood: "categorical" or "gaussian".
        class_dim: Where the classes are in the output; None: dimension 1 of a two-dimensional output.
        sharing: How positions of one sample share a weight, "expand" or "reduce".
        form: Whether factors are held as rows or as matrices.
        output: Picks the network's output out of what the model returns.
        fused: Weights whose gradient is cheaper as D^T H get none.
        reduction: How the user says that his loss reduces over samples; None: not said.
        grad_scaler: The GradScaler that multiplies the loss; None: there is none, or it is not known.
        empirical: Signals are the derivatives of the user's own loss.
        own_passes: A pass that is measured takes backward passes beside that of the loss.
        weighs_loss: How the loss reduces can be found from its derivative.

    Example:
        >>> CaptureOptions(fisher=Empirical()).empirical
        True
    """

    inputs: bool = True
    signals: bool = True
    jacobian: bool = False
    fisher: Fisher = MonteCarlo()
    likelihood: str = "categorical"
    class_dim: int | None = None
    sharing: str = "expand"
    form: str = "auto"
    output: Callable[[Any], Tensor] | None = None
    fused: bool = False
    reduction: str | None = None
    grad_scaler: torch.amp.GradScaler | None = field(default=None, compare=False, repr=False)
    empirical: bool = field(init=False)
    own_passes: bool = field(init=False)
    weighs_loss: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.class_dim is not None:
            check_whole("class_dim", self.class_dim)
        check_flag("fused", self.fused)
        if self.output is not None and not callable(self.output):
            raise TypeError(f"output must be a function of what the model returns, got {self.output!r:.80}")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {self.grad_scaler!r:.80}")
        object.__setattr__(self, "empirical", self.signals and isinstance(self.fisher, Empirical))
        object.__setattr__(self, "own_passes", self.jacobian or (self.signals and not self.empirical))
        object.__setattr__(self, "weighs_loss", self.measures and self.likelihood == "categorical")

    @property
    def measures(self) -> bool:
        """Whether curvature is measured in passes."""
        return self.inputs or self.signals or self.jacobian

    @property
    def draws(self) -> bool:
        """Whether signals are drawn at random."""
        return self.signals and isinstance(self.fisher, Drawn)


def targets(
    f: Tensor, fisher: Fisher, likelihood: str, class_dim: int, generator: Generator, ranks: Ranks | None = None
) -> Iterator[Tensor]:
    """The vectors v, each of f's shape. Exact ones come one a class and, beyond that, one a position of the output.

    ranks: other processes that draw for other parts of the same batch.
    """
    f = f.detach()
    if isinstance(fisher, Exact):
        yield from exact_targets(f, likelihood, class_dim)
        return
    assert isinstance(fisher, Drawn)
    share = None if ranks is None else ranks.share(f.numel())
    for _ in range(fisher.draws):
        if likelihood == "gaussian":
            v = drawn_targets(f.unsqueeze(0), fisher, likelihood, [generator], share).squeeze(0)
        else:
            classes_last = f.movedim(class_dim, -1)
            flat = classes_last.reshape(1, -1, classes_last.shape[-1])
            v = drawn_targets(flat, fisher, likelihood, [generator], share).reshape(classes_last.shape)
            v = v.movedim(-1, class_dim)
        yield v if fisher.draws == 1 else v / fisher.draws**0.5


def drawn_targets(
    f: Tensor,
    fisher: Fisher,
    likelihood: str,
    generators: Sequence[Generator],
    share: tuple[int, int] | None = None,
) -> Tensor:
    """The vectors of many networks' outputs f [networks, samples, classes], each drawn by its own generator.

    A class y is drawn as the largest of p / q with q exponential, as ``torch.multinomial`` does it, which would wait
    for the device. Outputs that are not finite give signals that are not: the step sees them and is skipped.

    share: of one network whose batch is split, where this part's numbers begin and how many all parts draw.
    """
    f = f.detach()
    signs = isinstance(fisher, RandomSigns)
    if likelihood == "gaussian":
        noise = torch.empty(f.shape, device=generators[0].device)
        return _fill(noise, generators, "signs" if signs else "normal", share).to(f)
    p = (f if f.dtype == torch.float64 else f.float()).softmax(-1)
    noise = torch.empty_like(p, device=generators[0].device)
    noise = _fill(noise, generators, "signs" if signs else "exponential", share).to(p.device)
    if signs:
        return _turned_signs(p, noise).to(f)
    y = (p.nan_to_num(1.0) / noise).argmax(-1)
    return (torch.nn.functional.one_hot(y, p.shape[-1]) - p).to(f)


def _turned_signs(p: Tensor, signs: Tensor) -> Tensor:
    """sqrt(p) H z, whose second moment is diag(p) - p p^T: H turns all axes but one to be orthogonal to sqrt(p).

    H is the Householder reflection that takes sqrt(p) to -e_k, k being the likeliest class, and z has signs at all
    other classes and zero at k. With signs at all classes the part along sqrt(p) would be lost, at random.
    """
    k = p.argmax(-1, keepdim=True)
    root = p.sqrt()
    largest, v = root.gather(-1, k), root * signs.scatter(-1, k, 0.0)
    along = v.sum(-1, keepdim=True)
    return (v - p * (along / (1 + largest))).scatter(-1, k, -largest * along)


def _fill(noise: Tensor, generators: Sequence[Generator], kind: str, share: tuple[int, int] | None = None) -> Tensor:
    """The tensor [networks, ...], filled with random numbers of a kind, each network's by its own generator.

    kind: "signs", "normal" or "exponential".
    share: those of all parts of a batch are drawn, in one call as one process does, and this part's are taken.
    """
    if share is not None:
        begin, total = share
        whole = _fill(noise.new_empty(1, total), generators, kind)
        return whole[0, begin : begin + noise.numel()].reshape(noise.shape)
    for part, generator in zip(noise, generators, strict=True):
        if generator.device.type == "cpu":
            _draw_in_order(part, generator, kind)
        elif kind == "signs":
            part.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        elif kind == "normal":
            part.normal_(generator=generator)
        else:
            part.exponential_(generator=generator)
    return noise


def _draw_in_order(part: Tensor, generator: Generator, kind: str) -> None:
    """From uniform numbers u, one for each entry: those of a call follow those of the last.

    ``bernoulli_`` and ``exponential_`` begin another stream in each call where torch was built with MKL, and
    ``normal_`` draws numbers in groups of 16.
    """
    u = torch.rand(part.shape, generator=generator, dtype=torch.float64)
    if kind == "signs":
        part.copy_(u < 0.5).mul_(2).sub_(1)
    elif kind == "normal":
        part.copy_(torch.special.ndtri(u.clamp_min_(2.0**-54)))
    else:
        part.copy_(-torch.log1p(-u))


# From the model's output to its layers, in backward passes of our own inside the user's.


def send_signals(
    this: Pass,
    f: Tensor,
    root: GradientEdge,
    edges: Mapping[str, GradientEdge],
    outputs: Sequence[str],
    class_dim: int,
    generator: Generator,
    ranks: Ranks | None,
) -> None:
    """Fisher signals for every layer, each used as it passes by: together they are as large as the graph.

    root: where the model's output f stands in the graph; edges: where the layers' outputs do, by name; outputs: layers
    whose output is f itself.
    """
    options = this.options
    for draw, target in enumerate(targets(f, options.fisher, options.likelihood, class_dim, generator, ranks)):
        v = target if this.ignored is None else this.ignored.signals(target, class_dim)
        waiting = dict(edges)

        def hear(name: str, delta: Tensor, draw: int = draw, waiting: dict[str, Any] = waiting) -> None:
            if waiting.pop(name, None) is not None:
                this.add_signals(name, delta, draw)

        with listening_at(waiting, hear):
            while waiting:  # the way to the earliest layer leads past most others, if not all
                name, edge = next(iter(waiting.items()))
                (delta,) = own_backward(root, [edge], v)
                for other in [other for other, place in waiting.items() if place[:2] == edge[:2]]:
                    if delta is not None:
                        hear(other, delta)
                    waiting.pop(other, None)
                waiting.pop(name, None)
        for name in outputs:
            this.add_signals(name, v, draw)


@contextmanager
def listening_at(edges: Mapping[str, GradientEdge], then: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call ``then`` with the derivatives that arrive at those edges in backward passes of our own."""
    handles = []
    for name, edge in edges.items():

        def arrived(gradients: tuple[Tensor | None, ...], name: str = name, number: int = edge.output_nr) -> None:
            gradient = gradients[number]
            if gradient is not None:
                then(name, gradient)

        handles.append(edge.node.register_prehook(arrived))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class OwnPasses:
    """How many backward passes of our own are running, in the whole process: they may run in threads of their own."""

    running: ClassVar[int] = 0


def own_backward(root: GradientEdge, edges: Iterable[GradientEdge], v: Tensor) -> tuple[Tensor | None, ...]:
    """A backward pass of our own, which nobody who waits for the user's may take for that."""
    OwnPasses.running += 1
    try:
        return torch.autograd.grad([root], list(edges), grad_outputs=[v], retain_graph=True, allow_unused=True)
    finally:
        OwnPasses.running -= 1
