"""K-FAC: a layer's gradient divided by the second moments of its inputs and of its output's derivatives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import (
    FORMS,
    LIKELIHOODS,
    OVER_SAMPLES,
    REDUCTIONS,
    CaptureOptions,
    Empirical,
    Fisher,
    LayerStatistics,
    MonteCarlo,
    RandomSigns,
    input_weight,
    inverse_weight,
    reduction_in_use,
)
from mukron.damping import Adaptive, Heuristic, Rescaled, Rule
from mukron.layers import BIAS, WEIGHT
from mukron.linalg import Cholesky, Eigh, Newton, Solver
from mukron.memory import Auto, Batch, Memory, Window
from mukron.optim import sizes
from mukron.optim.communication import Communication
from mukron.optim.direction import OUT_SIDE, apply
from mukron.optim.docs import describe
from mukron.optim.momentum import Momentum
from mukron.optim.optimizer import SecondOrder
from mukron.optim.options import StepOptions, StepRule, Trust, check_one_of
from mukron.optim.run_options import EVERY_LAYER, FISHER, INTERVALS, KRONECKER
from mukron.optim.spec import MethodSpec, register, with_fisher
from mukron.optim.table import LayerEntry
from mukron.optim.transaction import Blocks, Transaction
from mukron.optim.unseen import exclusion, not_seen
from mukron.optim.update import Move
from mukron.params import Parametrization
from mukron.params.excluded import Excluded
from mukron.theory import METHODS, Role

OF_THE_FISHER = ("fisher", "likelihood", "grad_scaler", "seed")  # arguments
NEARLY_ZERO = 1e-3  # of the size that muP gives output weights
LARGE_VOCABULARY = 8192  # from which on a matrix of its size, of 256 MiB in float32, is warned of


@register(
    MethodSpec(
        name="kfac",
        method=METHODS["kfac"],
        lr=0.01,
        lr_range=(-7, 1),
        plain_lr_range=(-11, -2),
        options=(*EVERY_LAYER, *INTERVALS, *KRONECKER, *FISHER),
        damping=Rescaled(1.0),
        sp_damping=Heuristic(1e-3),
        captures=("inputs", "signals"),
        arguments=with_fisher,
        state_size=sizes.both_factors,
        stacks=True,
    )
)
@describe
class KFAC(SecondOrder):
    """K-FAC: W <- W - lr (B + rho_B)^-1 G (A + rho_A)^-1 with A = E[h h^T], B = E[delta delta^T].

    h are a layer's inputs, delta the derivatives of the log-likelihood by its outputs. Biases are divided by B alone.

    Args:
        damping: A number means ``Rescaled(number)``, which muP needs; or any rule of ``mukron.damping``.

    Example:
        >>> import torch, mukron
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> optimizer = mukron.KFAC(model, lr=0.1)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
        >>> loss.backward()
        >>> optimizer.step()
    """

    uses_products = True
    inverts = True

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor | None = None,
        *,
        damping: float | Rule | Adaptive = 1.0,
        fisher: str | Fisher | None = None,
        likelihood: str = "categorical",
        class_dim: int | None = None,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        sharing: str = "expand",
        memory: str | Memory | None = None,
        form: str = "auto",
        fused: bool = False,
        solver: str | Solver = "cholesky",
        factor_every: int = 1,
        inverse_every: int | None = None,
        refresh_warmup: int | None = None,
        start: int = 0,
        trust: str | Trust | None = "spectral",
        fallback: str | StepRule | None = None,
        fallback_lr: float | None = None,
        momentum: float | Momentum | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        maximize: bool = False,
        exclude: tuple[Excluded, ...] | None = None,
        params: Iterable[Any] | None = None,
        process_group: Any = None,
        communication: str | Communication = "auto",
        seed: int = 0,
    ) -> None:
        check_one_of("likelihood", likelihood, LIKELIHOODS)
        check_one_of("reduction", reduction, (None, *REDUCTIONS))
        check_one_of("sharing", sharing, ("expand", "reduce"))
        check_one_of("form", form, FORMS)
        bound = Trust.of(trust)
        options = StepOptions.of(
            self.method,
            bound,
            memory=(Batch() if bound is None else Auto()) if memory is None else Memory.of(memory),
            factor_every=factor_every,
            inverse_every=inverse_every,
            solver=Solver.of(solver, (Cholesky, Eigh, Newton)),
            refresh_warmup=refresh_warmup,
            start=start,
            fallback=fallback,
            exclude=exclude,
            communication=Communication.of(communication),
            seed=seed,
        )
        targets = Fisher.of(usual_fisher(bound) if fisher is None else fisher, reduction, grad_scaler)
        if isinstance(targets, Empirical):
            reduction, grad_scaler = targets.reduction, targets.grad_scaler
        if fused and grad_scaler is not None:
            raise ValueError("fused=True leaves no gradients for a GradScaler to unscale; train in bfloat16 or float32")
        capture_options = CaptureOptions(
            signals=self.method.e_B > 0,
            fisher=targets,
            likelihood=likelihood,
            class_dim=class_dim,
            sharing=sharing,
            form=_form(options, form),
            output=output,
            fused=fused,
            reduction=reduction,
            grad_scaler=grad_scaler,
        )
        self.positions_power = float(self.method.e_A)
        super().__init__(
            model,
            parametrization,
            lr,
            damping=damping,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            decoupled=decoupled,
            maximize=maximize,
            fallback_lr=fallback_lr,
            params=params,
            process_group=process_group,
            options=options,
            capture_options=capture_options,
        )

    def measure(self, layer: LayerEntry, statistics: LayerStatistics | None, step: Transaction) -> Blocks:
        """Measure A and, if the method uses it, B of a layer.

        Args:
            layer: The layer and its blocks.
            statistics: What this batch's passes gave for the layer; None: nothing.
            step: The step that is being taken; it holds the state as it will be.
        """
        if statistics is not None and self.capture_options.signals and statistics.B is None:
            raise RuntimeError(
                f'layer "{layer.name}" has a gradient, but the model\'s output does not depend on it (an auxiliary '
                f"loss?); leave it to the fallback rule: {exclusion(self, [layer])}"
            )
        if statistics is None or statistics.A is None:
            raise not_seen(layer, step)
        # A (x) B is the curvature of the user's loss: its weight is part of A, where biases and FOOF find it too
        statistics.weight, signals = self._scales(step)
        factors = {"A": statistics.A.factor(statistics.weight)}
        if statistics.B is not None:
            factors["B"] = statistics.B.factor(signals**2)
        if layer.name in step.double:
            factors = {name: factor.double() for name, factor in factors.items()}
        return {WEIGHT: factors}

    def _scales(self, step: Transaction) -> tuple[float | Tensor, float | Tensor]:
        """What A is multiplied by, and B's signals; the same for all layers of a step."""
        if step.found_reduction == OVER_SAMPLES and not self.capture_options.empirical:
            return 1.0, 1.0
        if "scales" not in step.scratch:
            options, passes = self.capture_options, step.passes
            reduction = reduction_in_use(step.found_reduction, options.reduction)
            signals: float | Tensor = 1.0
            if options.empirical:
                scaler = options.grad_scaler
                signals = inverse_weight(passes, reduction) / (1.0 if scaler is None else scaler.get_scale())
            step.scratch["scales"] = input_weight(passes, reduction), signals
        scales: tuple[float | Tensor, float | Tensor] = step.scratch["scales"]
        return scales

    def precondition(self, layer: LayerEntry, block: str, G: Move, step: Transaction) -> Move:
        """Divide the gradient of a block by both factors, that of a bias by B alone.

        Args:
            layer: The layer and its blocks.
            block: The weight or the bias.
            G: The gradient of the block.
            step: The step that is being taken; it holds the state as it will be.
        """
        operators = step.value(layer, "operators")[WEIGHT]
        if block != BIAS:
            return apply(operators, G)
        # An input weight whose input is 1 at every position: A is their number where positions are expanded.
        positions = step.value(layer, "positions")
        moved = apply(operators, G, OUT_SIDE)
        assert isinstance(moved, Tensor)
        if isinstance(positions, Tensor):
            positions = positions.to(moved)  # of several maps it may be a number each, [groups, 1, 1]
        step_of_bias: Tensor = moved / positions**self.positions_power
        return step_of_bias

    def warn(self) -> None:
        """Name output layers near zero, and matrices over a large vocabulary.

        From an output layer at zero one step lands on kernel regression (Section 4.3).

        From one that is merely near zero, signals delta shrink like W and B like its square: B^-1 delta blows up.
        """
        for layer in self.layers.values():
            _warn_of_vocabulary(self, layer)
            entry = layer.blocks.get(WEIGHT)
            if entry is None or not self._is_output(layer.name, entry.name):
                continue
            weight = entry.parameter.detach()
            size = math.sqrt(float(weight.square().sum()) / weight.numel())
            if size * layer.layer.d_in >= NEARLY_ZERO:
                continue
            name = type(self).__name__
            if size == 0 or not self.capture_options.signals:
                trouble = (
                    f"at (nearly) zero: {name} then steps straight onto the kernel-regression solution of its first "
                    "features and, with large batches and small steps, stays near it"
                )
            else:
                trouble = (
                    f"near zero, but not at it: {name}'s first step in the layers below grows like one over that size"
                )
            warnings.warn(
                f'output layer "{layer.name}" starts {trouble}. Start it at its usual size (muP: std ~ 1 / fan-in), or '
                "use Shampoo or SGD, where zero is fine",
                UserWarning,
                stacklevel=4,
            )

    def _is_output(self, layer: str, weight: str) -> bool:
        if self.parametrization is not None:
            return self.parametrization.parameters[weight].role is Role.OUTPUT
        return layer == next(reversed(self.layers))


def _warn_of_vocabulary(optimizer: KFAC, layer: LayerEntry) -> None:
    """The factor A of an embedding is diagonal, but with the signals of a head that is tied to it a matrix."""
    V, heads = layer.layer.d_in, [name for name, other in layer.others.items() if not other.one_hot]
    if not (layer.layer.one_hot and heads and V > LARGE_VOCABULARY):
        return
    size = V * V * max(4, layer.anchor.element_size()) / 2**30  # statistics are float32 at least
    left = dict.fromkeys((*(optimizer.options.exclude or ()), layer.name, *layer.others))
    exclude = ", ".join(f'"{name}"' for name in left)
    named = ", ".join(f'"{name}"' for name in heads)
    warnings.warn(
        f'the weight of embedding "{layer.name}" is that of head {named} too: {type(optimizer).__name__} then forms '
        f"and inverts a {V} x {V} matrix over the vocabulary. One takes {size:.3g} GiB, and a step holds several. "
        f"exclude=({exclude}) leaves the weight to the fallback rule",
        UserWarning,
        stacklevel=5,
    )


def usual_fisher(trust: Trust | None) -> Fisher:
    """How targets are chosen where nothing is said: the paper's way for its plain step."""
    return MonteCarlo() if trust is None else RandomSigns()


def _form(options: StepOptions, form: str) -> str:
    """Averages over batches and other solvers hold matrices; a window holds batches of any size side by side: rows."""
    if options.memory.averages or not isinstance(options.solver, Cholesky):
        return "matrix"
    return "rows" if isinstance(options.memory, Window) else form
