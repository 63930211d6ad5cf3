"""The arguments of optimizers: those that several share, described once, and what is said of one that is unknown."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TypeVar

from mukron.spelling import meant

Class = TypeVar("Class", bound=type)

ARGUMENTS = {
    "model": "Any module. Its Linear and Conv layers are preconditioned, all else takes the ``fallback`` "
    "rule. Call the model itself in your loop: forward, ``loss.backward()``, ``step()``.",
    "parametrization": "From ``mukron.parametrize``: learning rates and damping then follow the width. None: the "
    "standard parametrization.",
    "lr": "Learning rate; schedulers move it. None: one that suits the method and its ``trust``.",
    "fisher": 'Which targets the factor B is made of: "signs" or ``RandomSigns(draws)``, random signs times the root '
    'of the output\'s Fisher matrix; "mc" or ``MonteCarlo(draws)``, drawn from the model; "exact" or ``Exact()``, '
    'every output in turn; "empirical" or ``Empirical(reduction)``, the targets of the data. None: "signs" beside a '
    'trust, "mc" without one.',
    "likelihood": 'What the model\'s output means: "categorical" (logits) or "gaussian" (a mean).',
    "class_dim": "Where the classes are in an output that has positions: 1 (images) or -1 (language).",
    "output": "Picks the output out of what the model returns: ``lambda returned: returned.logits``.",
    "reduction": 'How your loss reduces: "mean" (over samples), "positions" (over samples and positions) or "sum". A '
    "categorical loss shows it by itself at the first step (see *The scale of your loss*). None: that, or a mean over "
    "samples.",
    "grad_scaler": "The GradScaler that multiplies your loss. Used where derivatives of your loss are read.",
    "sharing": 'How positions of one sample share a weight: "expand" (each counts as a sample) or "reduce" (their '
    "mean).",
    "form": 'How factors are held: "auto" (the cheaper form), "rows" (sample space) or "matrix".',
    "memory": "What factors remember: ``Batch()``, ``EMA(decay)``, ``Auto(decay)``, ``Sum()`` or ``Window(batches)``, "
    'or text such as "ema:0.95". None: ``Auto()`` with a ``trust``, else ``Batch()``.',
    "fused": "Do not form gradients of weights that are cheaper to precondition as D^T H, from the batch's signals and "
    "inputs: their ``grad`` stays None. Faster where layers are wide; nothing may look at those gradients before the "
    "step (no clipping, no GradScaler, no activation checkpointing).",
    "solver": 'How factors are inverted: "cholesky" or ``Cholesky()``, "eigh" or ``Eigh()``, "newton" or ``Newton()``.',
    "factor_every": "Steps from one measurement of the factors to the next, counted from ``start``.",
    "inverse_every": "Steps from one preparation of the inverses to the next, counted from ``start``; a multiple of "
    "``factor_every``. None: about 10 with a ``trust``, else 1.",
    "refresh_warmup": "Steps at the start, at each of which factors and inverses are made, whatever the intervals say. "
    "None: 10 with a ``trust``, else 0.",
    "start": "The step from which on gradients are preconditioned. Before it factors are measured, and a step is the "
    "gradient within ``trust``, or the step of the rule that is grafted.",
    "trust": "How far a layer may move in a step: ``Spectral(size, growth)``, ``KLClip(kappa)``, ``Graft(rule)`` or "
    '``RMS(size)``, or text such as "kl:1e-3". None: the paper\'s plain step, of any length, and with it the '
    "paper's choice of all that is not given: the batch's own curvature, no momentum, SGD as fallback.",
    "fallback": 'The rule for all other parameters: "sgd" or ``SGDStep()``, "adamw" or ``AdamStep(betas, eps)``. '
    'None: "adamw" with a ``trust``, else "sgd".',
    "fallback_lr": "Learning rate of the fallback rule at the start; it follows ``lr`` when a scheduler moves that. "
    "None: ``lr``; for AdamW's steps beside a ``trust`` 0.005 at the default ``lr``, and in proportion at others.",
    "exclude": "Layers that are left to the fallback rule: names of them or of modules around them, patterns such as "
    '``"layer.*.attention.{query,key}"``, and types of modules such as ``nn.Conv2d``. None: those that use a '
    "tied embedding, and with a ``trust`` all embeddings.",
    "block": "The largest side of a matrix with factors of its own. Larger ones are cut into equal blocks, each with "
    "factors of its own; learning rates follow the number of blocks. None: no matrix is cut.",
    "split": "How many matrices a layer's weight stacks along its outputs, by the layer's name or the end of it: "
    '``{"qkv": 3}`` takes queries, keys and values apart. A number is the same at every width; ``{"qkv": "rows:64"}`` '
    "makes parts of 64 outputs each, such as heads, whose number grows with the width.",
    "seed": "Of the generator that draws targets.",
    "momentum": "``GradientMomentum(beta)``: on the gradient, before it is preconditioned. ``HeavyBall(beta, "
    "nesterov)``: on the update. A number: the former with a ``trust``, the latter without. None: 0.9 with a "
    "``trust``, else 0.",
    "nesterov": "Look one step ahead along the momentum buffer; the same as ``HeavyBall(beta, nesterov=True)``.",
    "options": "What is the same for all parameter groups.",
    "capture_options": "What is measured in forward and backward passes. None: nothing.",
    "weight_decay": "A step shrinks each weight by the learning rate times this; at other widths than the base by the "
    "law that ``parametrize(decay=...)`` chose.",
    "decoupled": "False: weight decay is added to the gradient, and preconditioned with it.",
    "maximize": "Ascend instead of descend.",
    "process_group": "The processes that train a plain model together, each with its part of the batch: the step then "
    "averages their gradients. None: somebody else does, such as DistributedDataParallel or ``fully_shard``, or there "
    "is one process.",
    "communication": 'How processes exchange the curvature of a layer: "rows", "owner" or "factors"; "auto": for each '
    'layer the fastest of them, by the bandwidth that "auto:BYTES_PER_SECOND" says or "auto:measured" finds '
    "(docs/distributed.md).",
    "params": "Parameters or parameter groups to train, as torch's optimizers take them. None: all of the model's.",
}


MOVED = {"kl_clip": "trust=mukron.KLClip(kappa)", "graft": 'trust=mukron.Graft("adam")'}  # and what took their place


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


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class by name, with those of its base where it passes on ``**options``."""
    arguments: dict[str, inspect.Parameter] = {}
    for kind in cls.__mro__:
        if "__init__" not in vars(kind):
            continue
        _, *parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        arguments = {**{parameter.name: parameter for parameter in parameters}, **arguments}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return arguments


def refuse_unknown(cls: type, arguments: Iterable[str], useless: Mapping[str, str]) -> None:
    """A TypeError that names the class and the nearest argument it has, for keywords that it does not take.

    useless: arguments of related methods that this one has no use for, and why.
    """
    known = [name for name, parameter in arguments_of(cls).items() if parameter.kind is not parameter.VAR_KEYWORD]
    for name in arguments:
        if name in useless and name not in known:
            raise TypeError(f"{cls.__name__} {useless[name]}: {name} would have no effect")
        if name in MOVED and "trust" in known:
            raise TypeError(f"{cls.__name__} has no argument {name!r}; say {MOVED[name]}")
        if name not in known:
            nearest = meant(name, known, alike=0.75)
            hint = "." if nearest is None else f"; did you mean {nearest!r}?"
            raise TypeError(f"{cls.__name__} has no argument {name!r}{hint} Its arguments: {', '.join(known)}")
