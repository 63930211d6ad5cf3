"""What a user is told: models, groups and gradients that an optimizer cannot serve, and numbers that are not finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mukron.arguments import check_flag, check_number
from mukron.curvature import (
    AS_A_SUM,
    OVER_POSITIONS,
    OVER_SAMPLES,
    Empirical,
    LossScale,
    Pass,
    PassRecord,
    local,
    reduction_in_use,
)
from mukron.damping import Adaptive, Heuristic, Rule
from mukron.layers import WEIGHT
from mukron.optim.gradients import probed
from mukron.optim.momentum import check_momentum
from mukron.optim.options import RMS, Graft, KLClip
from mukron.optim.transaction import FAR_BEYOND_TRUST, Transaction
from mukron.optim.unseen import exclusion
from mukron.params import BaseShapes, Parametrization
from mukron.params.inventory import note_optimizer
from mukron.params.parametrization import plan_of
from mukron.theory import SP

if TYPE_CHECKING:
    from mukron.optim.optimizer import SecondOrder

PATIENCE = 10  # skipped steps in a row before the user is told
LARGEST_POWER = -3.5  # of two, from which on a smaller gradient may be an unscaled one
NOT_ZERO = 0.1  # of the sum of sizes, from which on a sum is not zero
SUSPICIOUS = 0.05  # of a gradient that does not come from its layer's own pass


def check_arguments(name: str, model: Any, parametrization: Any, lr: Any) -> None:
    check_model(model, name)
    if parametrization is not None and not isinstance(parametrization, Parametrization):
        shapes = isinstance(parametrization, BaseShapes)
        found = "base shapes" if shapes else repr(parametrization)[:80]
        advice = "pass mukron.parametrize(model, shapes)" if shapes else f"pass lr by name: {name}(model, lr=...)"
        raise TypeError(f"{name}'s second argument is parametrization, from mukron.parametrize, got {found}; {advice}")
    if not isinstance(lr, Tensor):
        check_number(f"{name}: lr", lr)
    plan = plan_of(model) if parametrization is None else None
    if plan is not None and plan.scheme != SP:
        warnings.warn(
            f"this model was parametrized, but {name} was given no plan: learning rates and damping do not follow the "
            f"width. Pass what mukron.parametrize returned: {name}(model, plan, lr=...)",
            UserWarning,
            stacklevel=4,
        )


def check_model(model: Any, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"pass the model itself, {name}(model, plan, lr=...), since {name} works layer by layer; got a "
            f"{type(model).__name__}. To train some of its parameters only: {name}(model, params=[...]). In a Trainer "
            f"of transformers: optimizer_cls_and_kwargs=for_trainer(mukron.{name}, plan, lr=...) of mukron.integrations"
        )
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("DataParallel runs copies of the layers that the optimizer does not see; use one device")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to train")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"the model's parameters are on several devices, {sorted(map(str, devices))}; move it to one")


def check_dtypes(optimizer: SecondOrder) -> None:
    """Layers of several precisions have no Jacobian in one of them, and share no backward pass of one precision."""
    dtypes = {layer.anchor.dtype: name for name, layer in optimizer.layers.items()}
    if len(dtypes) > 1 and optimizer.capture_options.jacobian:
        found = ", ".join(f'"{name}" is {dtype}' for dtype, name in dtypes.items())
        raise ValueError(
            f"{type(optimizer).__name__} needs all layers in one dtype, but {found}; convert the model, or leave a "
            "layer to the fallback rule by exclude="
        )


def check_layers(optimizer: SecondOrder) -> None:
    if optimizer.parametrization is None:
        note_optimizer(optimizer.model, optimizer)
    if not optimizer.layers:
        exclude, inner = optimizer.options.exclude, optimizer.method.matrices_only
        kept = "Embeddings and output layers" if inner else "With a trust, embeddings"
        raise ValueError(
            "there is nothing to precondition: no Linear, Conv or Embedding layer among the parameters given"
            + (f" that is not in exclude={exclude}" if exclude else "")
            + (f". {kept} are left to the fallback rule; exclude=() includes them" * (exclude is None))
            + (". So are layers that use a tied parameter" * optimizer.options.leaves_tied)
        )


def damping_rule(optimizer: SecondOrder, damping: float | Rule | Adaptive | None) -> Rule | None:
    """The rule that a group's damping means; None for a method without damping."""
    if isinstance(damping, Adaptive):
        check_adaptive(optimizer)
        damping = damping.rule
    if damping is None or optimizer.spec.damping is None:
        if damping is not None:
            raise ValueError(f"{type(optimizer).__name__} has no damping, got damping={damping}")
        return optimizer.spec.damping
    if isinstance(damping, str):
        damping = Rule.parse(damping)
    if isinstance(damping, Heuristic) and {factor.name for factor in optimizer.method.damped} != {"A", "B"}:
        raise ValueError(f"Heuristic damping balances A against B, which {type(optimizer).__name__} does not have")
    if not isinstance(damping, Rule):
        check_number("damping", damping)
    return damping if isinstance(damping, Rule) else optimizer.rule(float(damping))  # type: ignore[call-arg]


def check_adaptive(optimizer: SecondOrder) -> None:
    """Damping adapts where a step is that of a quadratic model, and where the damping sets its length."""
    name, trust = type(optimizer).__name__, optimizer.options.trust
    if not optimizer.inverts:
        raise ValueError(
            f"{name} divides gradients by a root of its factors, which is no quadratic model of the loss whose "
            "predictions could be tested: damping adapts for KFAC, FOOF and GaussNewton alone"
        )
    if isinstance(trust, (Graft, RMS)):
        raise ValueError(
            f'damping does not change the length of a step with trust="{trust.text}", and so cannot adapt to it; use '
            '"spectral", "kl" or no trust with Adaptive'
        )


def check_group(group: Mapping[str, Any]) -> None:
    for name in ("decoupled", "maximize", "nesterov"):
        check_flag(name, group[name])
    for name in ("lr", "weight_decay", "fallback_lr"):
        if group[name] is None and name == "fallback_lr":
            continue
        check_number(name, float(group[name]) if isinstance(group[name], Tensor) else group[name])
        if not float(group[name]) >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}")
    if group["fallback_lr"] is not None and not group["reference_lr"] > 0:
        raise ValueError("fallback_lr needs lr above 0: schedulers that move lr move fallback_lr by the same factor")
    if group["adaptive"] and not float(group["lr"]) < 2:
        raise ValueError(
            f"adaptive damping needs lr below 2, got {group['lr']}: from there on the quadratic model of a step "
            "predicts that the loss rises"
        )
    check_momentum(group["momentum"], group["nesterov"])


def check_uses(optimizer: SecondOrder, step: Transaction) -> None:
    """Once: whether each weight's gradient is that of its layer's own forward pass, up to a factor.

    What is found is staged: a step that is skipped has found nothing.

    A weight that is also used behind its layer's back (``F.linear(h, embedding.weight)``) shows in this alone.
    """
    capture, first = optimizer.capture, optimizer.capture.checks_uses
    step.checks_uses = optimizer.capture_options.measures and not step.passes  # nothing to look at yet
    factors: dict[str, float] = {}
    looked_at = [layer for layer in step.moving if WEIGHT in layer.blocks] if step.passes else []
    does = probed(looked_at) if optimizer.exchange is None else optimizer.exchange.probed(looked_at)
    for layer in looked_at:
        entry, ours, actual = layer.blocks[WEIGHT], step.along(layer.name), does.get(layer.name)
        if actual is None:
            continue
        if not bool(actual.isfinite().all()):
            step.checks_uses = True  # nothing is seen by this; the next step will tell
            return
        if ours is None or not bool(actual.any()):
            continue
        factor, off = proportion(ours.to(actual.dtype), actual)
        if bool(off > SUSPICIOUS):
            remark = (
                f'the gradient of layer "{layer.name}" is not that of its own forward pass: its weight is used '
                "elsewhere too, or the gradient was changed before the step. Its curvature describes the layer's "
                f"own use alone; {exclusion(optimizer, [layer])} leaves it to the fallback rule"
            )
            step.remarks += [remark] * first
            continue
        factors[layer.name] = float(factor)
        statistics = step.statistics.get(layer.name)
        fused = [use.fused for one in capture.passes for use in one.layers.values() if use.name == layer.name]
        if (
            statistics is not None and statistics.halves and fused and all(fused)
        ):  # the gradient has served, and makes room
            statistics.halves = [half._replace(fused=True) for half in statistics.halves]
            statistics.join()
            entry.parameter.grad = None
    if first:
        _check_scaler(optimizer, step, list(factors.values()))
    if optimizer.capture_options.weighs_loss and step.found_reduction is None and step.passes:
        _find_reduction(optimizer, step, list(factors.values()))


def _check_scaler(optimizer: SecondOrder, step: Transaction, factors: Sequence[float]) -> None:
    """Signals that are read from the loss are those of the scaled one, unless the scaler is known."""
    fisher = optimizer.capture_options.fisher
    reads_loss = optimizer.capture_options.empirical or optimizer.capture_options.jacobian
    scaler = fisher.grad_scaler if isinstance(fisher, Empirical) else None
    power = _unscaled_by(factors)
    if reads_loss and scaler is None and power is not None:
        step.remarks.append(
            f"gradients are 2^{power} times those of the backward pass, as if a GradScaler had unscaled "
            f"them; the signals that {type(optimizer).__name__} reads from the loss are still scaled. Pass the scaler: "
            "grad_scaler=scaler"
        )


def _unscaled_by(factors: Sequence[float]) -> int | None:
    """Gradients that a GradScaler has unscaled are a power of two smaller than the signals of the same pass: which."""
    powers = [math.log2(factor) if factor > 0 else 0.0 for factor in factors]
    if powers and all(power < LARGEST_POWER and abs(power - round(powers[0])) < 1e-3 for power in powers):
        return round(powers[0])
    return None


NONE_OF_THEM = ""  # a reduction that was looked for
MEANT = {"mean": (OVER_SAMPLES, OVER_POSITIONS), "positions": (OVER_POSITIONS,), "sum": (AS_A_SUM,)}


def _find_reduction(optimizer: SecondOrder, step: Transaction, factors: Sequence[float]) -> None:
    """Find how the loss reduces over samples and positions; tell where that is not what the user says, or unclear.

    factors: by layer, the gradient beside that of the backward pass. Where it is much smaller and no power of two, it
    was clipped, or clipped and unscaled. Then a loss that is scaled cannot be told from a sum, which is left out.
    """
    options, power = optimizer.capture_options, _unscaled_by(factors)
    if any(group["maximize"] for group in optimizer.param_groups):
        return  # the target's entry is not the negative one
    if options.signals and not options.empirical and _is_no_cross_entropy(step.passes):
        step.remarks.append(
            f"{type(optimizer).__name__} takes the model's output for logits, but the derivative of the loss does not "
            "sum to zero over the classes: the loss is no cross-entropy. For squared errors pass "
            'likelihood="gaussian"; for any other loss fisher="empirical" uses its own derivatives'
        )
        return
    if places := [dim for one in step.passes if (dim := one.classes_elsewhere) is not None]:
        given = f"class_dim={options.class_dim} was given, but the derivative of the loss sums to zero over dimension "
        step.remarks.append(f"{given}{places[0]} of the output: the classes are there. Pass class_dim={places[0]}")
        return
    scale = LossScale.of(step.passes)
    if scale is None:
        return
    if scale.weight == 0:
        step.checks_uses = True  # nothing is seen by this; the next step will tell
        return
    if options.grad_scaler is not None:
        scale = scale._replace(weight=scale.weight / options.grad_scaler.get_scale())
    elif power is not None:
        scale = scale._replace(weight=scale.weight * 2.0**power)
    clipped = options.grad_scaler is None and power is None
    clipped = clipped and (not factors or math.log2(max(min(factors), 1e-300)) < LARGEST_POWER)
    found = scale.reduction((OVER_SAMPLES, OVER_POSITIONS)) if clipped else scale.reduction()
    step.asks_reduction = found is not None and _looks_alike(scale, found, step.passes)
    if step.asks_reduction:
        return  # what the user says counts until a batch decides; for this one it makes no difference
    step.found_reduction = found if clipped else found or NONE_OF_THEM
    if clipped:
        return
    name, said = type(optimizer).__name__, options.reduction
    if found is None and not options.signals:
        return  # without a likelihood it may be any loss
    if found is None:
        otherwise = reduction_in_use(None, said)
        usual = {OVER_SAMPLES: 1 / scale.samples, OVER_POSITIONS: 1 / scale.positions, AS_A_SUM: 1.0}[otherwise]
        step.remarks.append(
            f"the loss gives the log-likelihood of a position the weight {scale.weight:.3g}. There are "
            f"{scale.samples:.0f} samples with {scale.positions:.0f} positions, so it is no mean over either, and no "
            f"sum. {name}'s curvature is that of a {otherwise}, and its steps are "
            f"{scale.weight / usual:.3g} times those of such a loss. Take the factor out of the loss, divide the "
            "loss by the number of backward passes before a step, or pass the GradScaler that multiplies it: "
            "grad_scaler=scaler"
        )
    elif said is not None and found not in MEANT[said]:
        step.remarks.append(
            f'reduction="{said}" was given, but the derivative of the loss is that of a {found}, and {name} takes it '
            "for that. Leave reduction= out, or change the loss"
        )


def _is_no_cross_entropy(passes: Sequence[Pass | PassRecord]) -> bool:
    """Whether it is certain: a loss of softmax(f) does not change with a number that is added to all of f's entries."""
    sums = [one.unbalanced for one in passes if one.unbalanced is not None]
    if len(sums) < len(passes):  # an output with positions
        return False
    total, size = torch.stack(sums).sum(0).tolist() if sums else (0.0, 0.0)
    return total > NOT_ZERO * size


def _looks_alike(scale: LossScale, found: str, passes: Sequence[Pass | PassRecord]) -> bool:
    """Whether another reduction is the same for this batch: of one sample, or of samples with one position each."""
    counts = {OVER_SAMPLES: scale.samples, OVER_POSITIONS: scale.positions, AS_A_SUM: 1.0}
    if not any(one.positions for one in passes):
        counts.pop(OVER_POSITIONS)
    return any(name != found and count == counts.get(found) for name, count in counts.items())


def checked_params(model: nn.Module, params: Iterable[Any] | None) -> list[Any]:
    """Parameters or groups as torch takes them, with generators as lists; refuses none at all."""
    listed = list(model.parameters() if params is None else params)
    listed = [{**p, "params": _listed(p["params"])} if isinstance(p, dict) else p for p in listed]
    if not any(p["params"] if isinstance(p, dict) else True for p in listed):
        raise ValueError("params is empty: there is nothing to train; leave it out to train the whole model")
    return listed


def _listed(params: Any) -> Any:
    return params if isinstance(params, Tensor) else list(params)


def tell_skips(optimizer: SecondOrder, step: Transaction) -> None:
    """Tell, once in a row of skipped steps, what was not finite at the first of them, and what may help."""
    if optimizer._skipped_in_a_row == 1:
        optimizer._skip_cause = _not_finite(optimizer, step)
    optimizer.capture.forget()
    if optimizer._skipped_in_a_row == PATIENCE:
        warnings.warn(
            f"{PATIENCE} steps in a row were skipped. At the first of them {optimizer._skip_cause}",
            RuntimeWarning,
            stacklevel=4,
        )


def _not_finite(optimizer: SecondOrder, step: Transaction) -> str:
    """What was not finite in a step that is skipped, the earliest that is known, and what may help."""
    unstable = "the run has diverged: lower the learning rate or raise the damping"
    bad = [key for key, trace in step.traces.items() if not bool(trace.isfinite().all())]
    if bad and bad[0][2] == "A" and bad[0][0] == next(iter(step.traces))[0]:
        return f'the input of layer "{bad[0][0]}" was not finite, or too large to be squared: check the data'
    if any(one.errors is not None and not bool(one.errors.isfinite().all()) for one in optimizer.capture.passes):
        return f"the loss or the model's output was not finite: check the loss and the data, unless {unstable}"
    for name, entry in optimizer.entries.items():
        if (grad := entry.parameter.grad) is not None and not bool(local(grad).isfinite().all()):
            return f'the gradient of "{name}" was not finite: check the loss and the data, unless {unstable}'
    if bad:
        return f'factor {bad[0][2]} of layer "{bad[0][0]}" was not finite; {unstable}'
    return f"the move of a parameter was larger than its dtype can hold; {unstable}"


def tell(optimizer: SecondOrder, step: Transaction) -> None:
    """Call watchers; count rescued factorizations and tell of them once a layer; tell of sums that were too coarse.

    Also, once a layer, of moves that its trust had to shorten by a very large factor.
    """
    for watcher in optimizer.watchers:
        for (name, block), (factors, rho) in step.factors.items():
            watcher(name, block, factors, rho)
    for remark in step.remarks:
        warnings.warn(remark, UserWarning, stacklevel=5)
    for name, factor, how in step.rescues:
        if not any(key.startswith(f"{name} ") for key in optimizer.rescues):
            what = f", factor {factor}: factorized with" if factor else ": its factors could not be inverted,"
            warnings.warn(f'layer "{name}"{what} {how}', RuntimeWarning, stacklevel=5)
        optimizer.rescues[f"{name} {factor}: {how}"] += 1
    for name in step.imprecise:
        warnings.warn(
            f'layer "{name}": its damping is so small beside its factors that float32 sums of them may put this step '
            "off by more than 1 percent; raise the damping (later steps sum in float64)",
            RuntimeWarning,
            stacklevel=5,
        )
    _tell_shortened(optimizer, step)


def _tell_shortened(optimizer: SecondOrder, step: Transaction) -> None:
    """Tell, once a layer and in one warning a step, of moves that far exceed their trust."""
    names = [name for name in step.shortened if f"trust of {name}" not in optimizer.told]
    if not names or optimizer.steps <= optimizer.options.start:  # before the start a move is the gradient
        return
    optimizer.told.update(f"trust of {name}" for name in names)
    some, far = ", ".join(f'"{name}"' for name in names), f"{1 / FAR_BEYOND_TRUST:.0e}"
    trust = optimizer.options.trust
    did, then = f"was shortened by more than {far} to what trust allows", "It moves by what its trust allows"
    if isinstance(trust, KLClip):
        did = f"is more than {far} times the usual size of a weight"
        then = 'KLClip bounds all layers together, not each; trust="spectral" does'
    warnings.warn(
        f"the curvature of {some} is negligible beside the gradient: the move that it gives {did}. Signals vanish on "
        f"their way to such a layer (at a gate that is nearly zero), or its damping is tiny. {then}; exclude=(...) "
        "leaves it to the fallback rule instead",
        RuntimeWarning,
        stacklevel=6,
    )


def proportion(ours: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
    """The factor that takes ours to the actual one, and what is missing then; at any size, even where squares are 0."""
    tiny = torch.finfo(actual.dtype).tiny
    ours_size, actual_size = (x.abs().amax().clamp_min(tiny) for x in (ours, actual))
    a, b = ours / ours_size, actual / actual_size
    factor = (a * b).sum() / a.square().sum().clamp_min(tiny)
    return factor * actual_size / ours_size, (b - factor * a).norm() / b.norm().clamp_min(tiny)
