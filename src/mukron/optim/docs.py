"""Arguments that several optimizers share, described once; each optimizer's docstring takes those that it has."""

from __future__ import annotations

import inspect
from typing import TypeVar

Class = TypeVar("Class", bound=type)

ARGUMENTS = {
    "model": "Any module. Its Linear, Conv and Embedding layers are preconditioned, all else takes the ``fallback`` "
    "rule. Call the model itself in your loop: forward, ``loss.backward()``, ``step()``.",
    "parametrization": "From ``mukron.parametrize``: learning rates and damping then follow the width. None: the "
    "standard parametrization.",
    "lr": "Learning rate; schedulers move it.",
    "fisher": 'Which targets the factor B is made of: "mc" or ``MonteCarlo(draws)``, drawn from the model; "exact" or '
    '``Exact()``, every output in turn; "empirical" or ``Empirical(reduction)``, the targets of the data.',
    "likelihood": 'What the model\'s output means: "categorical" (logits) or "gaussian" (a mean).',
    "class_dim": "Where the classes are in an output that has positions: 1 (images) or -1 (language).",
    "output": "Picks the output out of what the model returns: ``lambda returned: returned.logits``.",
    "reduction": 'How your loss reduces over samples, "mean" or "sum". A categorical loss shows it by itself at the '
    "first step (see *The scale of your loss*). None: that, or a mean.",
    "grad_scaler": "The GradScaler that multiplies your loss. Used where derivatives of your loss are read.",
    "sharing": 'How positions of one sample share a weight: "expand" (each counts as a sample) or "reduce" (their '
    "mean).",
    "form": 'How factors are held: "auto" (the cheaper form), "rows" (sample space) or "matrix".',
    "memory": "What factors remember: ``Batch()``, ``EMA(decay)``, ``Sum()`` or ``Window(batches)``, or text such as "
    '"ema:0.95".',
    "fused": "Do not form gradients of weights that are cheaper to precondition as D^T H, from the batch's signals and "
    "inputs: their ``grad`` stays None. Faster where layers are wide; nothing may look at those gradients before the "
    "step (no clipping, no GradScaler, no activation checkpointing).",
    "solver": 'How factors are inverted: "cholesky" or ``Cholesky()``, "eigh" or ``Eigh()``, "newton" or ``Newton()``.',
    "factor_every": "Steps from one measurement of the factors to the next.",
    "inverse_every": "Steps from one preparation of the inverses to the next; a multiple of ``factor_every``.",
    "refresh_warmup": "Steps at the start, at each of which factors and inverses are made, whatever the intervals say.",
    "start": "The step from which on gradients are preconditioned. Before it factors are measured, and a step is the "
    "gradient within ``trust``, or the step of the rule that is grafted.",
    "trust": "How far a layer may move in a step: ``Spectral(size)``, ``KLClip(kappa)``, ``Graft(rule)`` or "
    '``RMS(size)``, or text such as "kl:1e-3". None: the plain step, of any length.',
    "fallback": 'The rule for all other parameters: "sgd" or ``SGDStep()``, "adamw" or ``AdamStep(betas, eps)``.',
    "fallback_lr": "Learning rate of the fallback rule at the start; it follows ``lr`` when a scheduler moves that. "
    "None: ``lr``.",
    "exclude": "Names of layers, or of modules around them, that are left to the fallback rule.",
    "seed": "Of the generator that draws targets.",
    "momentum": "A number or ``HeavyBall(beta, nesterov)``: on the update. ``GradientMomentum(beta)``: on the "
    "gradient, before it is preconditioned.",
    "nesterov": "Look one step ahead along the momentum buffer; the same as ``HeavyBall(beta, nesterov=True)``.",
    "options": "What is the same for all parameter groups.",
    "capture_options": "What is measured in forward and backward passes. None: nothing.",
    "weight_decay": "A step shrinks each weight by the learning rate times this.",
    "decoupled": "False: weight decay is added to the gradient, and preconditioned with it.",
    "maximize": "Ascend instead of descend.",
    "params": "Parameters or parameter groups to train, as torch's optimizers take them. None: all of the model's.",
}


def describe(cls: Class) -> Class:
    """A class decorator: complete the ``Args:`` of the docstring with the shared arguments of the signature."""
    text = inspect.cleandoc(cls.__doc__ or "")
    head, _, rest = text.partition("Args:\n")
    own, _, tail = rest.partition("\n\n")
    lines = own.split("\n") if own else []
    written = {line.split(":")[0].strip() for line in lines if line.startswith("    ") and line[4] != " "}
    for name in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
        if name in ARGUMENTS and name not in written:
            lines.append(f"    {name}: {ARGUMENTS[name]}")
    cls.__doc__ = f"{head}Args:\n" + "\n".join(lines) + (f"\n\n{tail}" if tail else "")
    return cls
