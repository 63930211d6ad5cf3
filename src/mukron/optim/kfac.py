"""K-FAC: preconditioned by the second moments of inputs and of signals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mukron.curvature import FISHERS, LIKELIHOODS, Batch, Gathered, Listening, Memory, Window, needs_matrix, probe
from mukron.damping import Heuristic, Rescaled, Rule
from mukron.linalg import SOLVERS, LowRank, Operator
from mukron.optim import sizes
from mukron.optim.base import BIAS, WEIGHT, Blocks, Move, SecondOrder, Settings, joined, one_of
from mukron.optim.numbers import proportion
from mukron.optim.options import EVERY_LAYER, FISHER, INTERVALS, KRONECKER
from mukron.optim.slots import Slot
from mukron.optim.spec import MethodSpec, register, with_fisher
from mukron.params import Parametrization
from mukron.precond import apply, apply_out
from mukron.theory import METHODS, Role

NEARLY_ZERO = 1e-3  # of the size that muP gives output weights


@register(
    MethodSpec(
        name="kfac",
        method=METHODS["kfac"],
        lr=0.01,
        lr_range=(-11, -2),
        options=(*EVERY_LAYER, *INTERVALS, *KRONECKER, *FISHER),
        damping=Rescaled(1.0),
        sp_damping=Heuristic(1e-3),
        captures=("inputs", "signals"),
        arguments=with_fisher,
        state_size=sizes.both_factors,
        stacks=True,
    )
)
class KFAC(SecondOrder):
    """K-FAC: W <- W - lr (B + rho_B)^-1 G (A + rho_A)^-1 with A = E[h h^T], B = E[delta delta^T].

    model: any module; its Linear, Conv and Embedding layers are preconditioned, biases by B alone, the rest takes the
        ``fallback`` rule. Call the model itself in your loop: forward, ``loss.backward()``, ``step()``.
    parametrization: from ``mukron.parametrize``; learning rates and damping then follow the width. Without one, SP.
    damping: a number means ``Rescaled(number)``, which muP needs; or any rule of ``mukron.damping``.
    fisher: "mc" (targets drawn from the model, one a sample), "exact" (every output in turn) or "empirical" (the data's
        own targets, read from your loss, whose ``reduction`` must be said: "mean" or "sum").
    likelihood: "categorical" (the output is logits; ``class_dim`` says where, if it has positions) or "gaussian".
    sharing: how positions of one sample share a weight: "expand" or "reduce".
    memory: what factors remember: ``Batch()``, ``EMA(decay)``, ``Sum()`` or ``Window(batches)``.
    fused: do not form gradients of weights that are cheaper to precondition as they arise, from the batch's inputs and
        signals: their ``grad`` stays None. Faster where layers are wide; nothing may look at those gradients before
        the step (no clipping, no GradScaler, no activation checkpointing).
    """

    def __init__(
        self,
        model: nn.Module,
        parametrization: Parametrization | None = None,
        lr: float | Tensor = 0.1,
        *,
        damping: float | Rule = 1.0,
        fisher: str = "mc",
        likelihood: str = "categorical",
        class_dim: int | None = None,
        output: Callable[[Any], Tensor] | None = None,
        reduction: str = "mean",
        grad_scaler: torch.amp.GradScaler | None = None,
        sharing: str = "expand",
        memory: Memory | None = None,
        form: str = "auto",
        fused: bool = False,
        solver: str = "cholesky",
        factor_every: int = 1,
        inverse_every: int = 1,
        kl_clip: float | None = None,
        graft: str | None = None,
        fallback: str = "sgd",
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        **groups: Any,
    ) -> None:
        one_of("fisher", fisher, FISHERS)
        one_of("likelihood", likelihood, LIKELIHOODS)
        one_of("reduction", reduction, ("mean", "sum"))
        one_of("sharing", sharing, ("expand", "reduce"))
        one_of("form", form, ("auto", "rows", "matrix"))
        one_of("solver", solver, SOLVERS)
        memory = Batch() if memory is None else memory
        if fused and grad_scaler is not None:
            raise ValueError("fused=True leaves no gradients for a GradScaler to unscale; train in bfloat16 or float32")
        self.reduction, self.grad_scaler = reduction, grad_scaler
        listening = Listening(
            signals=self.method.e_B > 0,
            fisher=fisher,
            likelihood=likelihood,
            class_dim=class_dim,
            sharing=sharing,
            form="matrix" if needs_matrix(memory) or solver != "cholesky" else _form(memory, form),
            output=output,
            fused=fused,
        )
        settings = Settings(
            memory, factor_every, inverse_every, solver, kl_clip, graft, fallback, exclude=tuple(exclude), seed=seed
        )
        super().__init__(model, parametrization, lr, damping=damping, listening=listening, settings=settings, **groups)

    def measure(self, slot: Slot, gathered: Gathered | None, gradients: Mapping[str, Tensor]) -> Blocks:
        if gathered is not None and self.listening.signals and gathered.B is None:
            raise RuntimeError(
                f'layer "{slot.name}" has a gradient, but the model\'s output does not depend on it (an auxiliary '
                f'loss?); leave it to the fallback rule: exclude=("{slot.name}",)'
            )
        if gathered is None or gathered.A is None:
            raise RuntimeError(
                f'layer "{slot.name}" has a gradient, but no forward pass of the model was seen for it: run the model '
                "itself (not its parts) in training mode with gradients on and not paused; activation checkpointing "
                "needs use_reentrant=False"
            )
        factors = {"A": gathered.A.factor()}
        if gathered.B is not None:
            factors["B"] = gathered.B.factor(self._signal_scale())
        return {WEIGHT: factors}

    def _signal_scale(self) -> float:
        """What turns the captured derivatives into those of the summed log-likelihood."""
        if self.listening.fisher != "empirical":
            return 1.0
        scale = float(self.capture.samples) if self.reduction == "mean" else 1.0
        return scale if self.grad_scaler is None else scale / self.grad_scaler.get_scale()

    def precondition(self, slot: Slot, block: str, G: Move, operators: Mapping[str, Mapping[str, Operator]]) -> Move:
        if block == BIAS:
            assert isinstance(G, Tensor)
            # An input weight whose input is 1 at every position: A is their number where positions are expanded.
            positions = self.state[slot.anchor]["positions"] if self.listening.sharing == "expand" else 1
            step = apply_out(operators[WEIGHT], G.squeeze(-1)).unsqueeze(-1)
            return step / float(positions ** float(self.method.e_A))
        return apply(operators[WEIGHT], G if isinstance(G, LowRank) else self._as_it_arose(slot, G) or G)

    def _as_it_arose(self, slot: Slot, G: Tensor) -> LowRank | None:
        """G as D^T H from this batch's signals and inputs, where that is cheaper and where it still is the gradient.

        Whoever changed the gradient since (clipping, unscaling) by a mere factor is followed. Any other change, down to
        rounding, is seen in what G does to a random vector; then G itself is used.
        """
        gathered = self._gathered.get(slot.name)
        if gathered is None or not gathered.halves:
            return None
        D, H = joined([half.D for half in gathered.halves]), joined([half.H for half in gathered.halves])
        if D.shape[1] != H.shape[1] or not LowRank.is_cheaper(H.shape[1], D.shape[2], H.shape[2]):
            return None
        v = probe(H.shape[2], G.dtype, G.device)
        factor, off = proportion(D.mT @ (H @ v), G @ v)
        return LowRank(factor * D, H) if bool(off < 300 * torch.finfo(G.dtype).eps) else None

    def _warn_of_nngp(self) -> None:
        """From an output layer at zero one step lands on kernel regression (Section 4.3).

        From one that is merely near zero, signals delta shrink like W and B like its square: B^-1 delta blows up.
        """
        for slot in self.slots.values():
            weight = slot.parameters.get(WEIGHT)
            if weight is None or not self._is_output(slot):
                continue
            size = float(weight.detach().square().mean().sqrt())
            if size * slot.layout.d_in >= NEARLY_ZERO:
                continue
            name = type(self).__name__
            if size == 0 or not self.listening.signals:
                trouble = (
                    f"at (nearly) zero: {name} then steps straight onto the kernel-regression solution of its first "
                    "features and, with large batches and small steps, stays near it"
                )
            else:
                trouble = (
                    f"near zero, but not at it: {name}'s first step in the layers below grows like one over that size"
                )
            warnings.warn(
                f'output layer "{slot.name}" starts {trouble}. Start it at its usual size (muP: std ~ 1 / fan-in), or '
                "use Shampoo or SGD, where zero is fine",
                UserWarning,
                stacklevel=4,
            )

    def _is_output(self, slot: Slot) -> bool:
        if self.parametrization is not None:
            name = self._names[id(slot.parameters[WEIGHT])]
            return self.parametrization.parameters[name].role is Role.OUTPUT
        return slot.name == next(reversed(self.slots))


def _form(memory: Memory, form: str) -> str:
    """A window holds batches of any size side by side: rows, all of them."""
    return "rows" if isinstance(memory, Window) else form
