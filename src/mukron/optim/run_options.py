"""The options that methods share: how each is read from JSON or the command line, and what the optimizer gets.

A method's record lists its options (``mukron.optim.spec``). A setting whose type is the choice is written as text in a
run's configuration, NAME or NAME:NUMBER, and its option's ``parse`` makes the object: "ema:0.95" is ``EMA(0.95)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mukron import readers as read
from mukron.curvature import FORMS, LIKELIHOODS, Fisher
from mukron.memory import Auto, Batch, Memory, Window, parse_memory
from mukron.optim.communication import Communication
from mukron.optim.options import FALLBACKS, Spectral, Trust, read_split
from mukron.readers import Parser, Reader

INVERSE_SOLVERS = ("cholesky", "eigh", "newton")  # roots have others: ``mukron.optim.shampoo``


def as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Option:
    """An argument of an optimizer that a run's ``method_options`` may give.

    Attributes:
        name: The argument's name.
        read: Checks the value and brings it into its one spelling, as JSON.
        help: One line that says what it does and which values there are.
        parse: From the value that was read to the optimizer's argument.
        stacks: The parsed values with which runs can be stacked.

    Example:
        >>> option = Option.typed("memory", parse_memory, "what factors remember")
        >>> option.read("ema:0.9"), option.parse("ema:0.9")
        ('ema:0.9', EMA(decay=0.9))
    """

    name: str
    read: Reader
    help: str
    parse: Callable[[Any], Any] = as_it_is
    stacks: tuple[Any, ...] = ()

    @classmethod
    def typed(cls, name: str, parse: Parser, help: str, stacks: tuple[Any, ...] = ()) -> Option:
        """An option whose values are objects, written as text that ``parse`` reads."""
        return cls(name, read.parsed(parse), help, parse, stacks)


def memory_in_matrices(text: str) -> Memory:
    """A memory of matrices; a window holds rows."""
    memory = parse_memory(text)
    if isinstance(memory, Window):
        raise ValueError("Shampoo's factors are matrices: choose sum, ema:DECAY or batch")
    return memory


NESTEROV = Option("nesterov", read.flag, "Nesterov's momentum: look one step ahead along it", stacks=(False, True))
FUSED = Option(
    "fused",
    read.flag,
    "precondition wide layers from inputs and signals, without forming their gradients",
    stacks=(False, True),
)
EVERY_LAYER = (  # of all methods that work layer by layer
    NESTEROV,
    Option(
        "decoupled", read.flag, "apply weight decay to the weights, not to the gradient (default: true)", stacks=(True,)
    ),
    Option.typed(
        "trust",
        Trust.of,
        "how far a step may go: none, spectral:SIZE or spectral:SIZE:GROWTH, kl:KAPPA, graft:RULE, rms:SIZE",
        (None, Spectral()),
    ),
    Option(
        "fallback",
        read.optional(read.one_of(FALLBACKS)),
        "the rule of parameters that no layer owns or that are excluded: sgd or adamw",
        stacks=(None, "sgd", "adamw"),
    ),
    Option("fallback_lr", read.optional(read.number()), "the learning rate of the fallback rule", stacks=(None,)),
    Option(
        "exclude",
        read.optional(read.names(read.text)),
        "layers to leave to the fallback rule, by name or pattern",
        stacks=(None, ()),
    ),
)
INTERVALS = (
    Option("factor_every", read.whole(1), "steps from one update of the factors to the next", stacks=(1,)),
    Option(
        "inverse_every",
        read.optional(read.whole(1)),
        "steps from one inversion to the next, a multiple of factor_every",
        stacks=(None, 1),
    ),
    Option(
        "refresh_warmup",
        read.optional(read.whole(0)),
        "steps at the start, each of which makes factors and inverses",
        stacks=(None, 0),
    ),
    Option(
        "start",
        read.whole(0),
        "the step from which on gradients are preconditioned, and from which intervals count",
        stacks=(0,),
    ),
)
EXCHANGE = Option.typed(
    "communication",
    Communication.of,
    "how processes exchange curvature: rows, owner, factors, auto, auto:BYTES_PER_SECOND or auto:measured",
    (Communication(),),
)
KRONECKER = (  # of methods that divide by A and B
    Option.typed(
        "memory",
        parse_memory,
        "what factors remember: batch, sum, ema:DECAY, auto or window:BATCHES",
        (Batch(), Auto()),
    ),
    Option(
        "solver",
        read.one_of(INVERSE_SOLVERS),
        f"how factors are inverted: {', '.join(INVERSE_SOLVERS)}",
        stacks=("cholesky",),
    ),
    Option(
        "sharing",
        read.one_of(("expand", "reduce")),
        "how the positions of one sample share a weight: expand or reduce",
        stacks=("expand",),
    ),
    Option(
        "form",
        read.one_of(FORMS),
        "factors as rows of the batch, as matrices, or as is cheaper: rows, matrix, auto",
        stacks=("auto",),
    ),
    FUSED,
    EXCHANGE,
)
FISHER = (
    Option(
        "fisher",
        read.optional(read.parsed(Fisher.of)),
        "targets of the signals: signs (random signs times the root of the output's Fisher matrix), mc (drawn from the "
        "model), both once or as often as in mc:8, exact (every output), empirical (the data's own)",
        stacks=(None, "signs", "mc", "empirical"),
    ),
    Option(
        "class_dim",
        read.optional(read.whole()),
        "the output's dimension that holds the classes, if the output has positions",
        stacks=(None,),
    ),
    Option(
        "likelihood",
        read.one_of(LIKELIHOODS),
        "what the output means beside a loss of your own: categorical (logits) or gaussian (a mean)",
        stacks=LIKELIHOODS,
    ),
)


CUT = Option(
    "block",
    read.optional(read.whole(1)),
    "the largest side of a matrix with factors of its own; larger ones are cut into blocks",
)
SPLIT = Option(
    "split",
    read.optional(read_split),
    'how many matrices a layer\'s weight stacks along its outputs, by layer: {"qkv": 3}; "rows:64": the rows of each',
)


def without(options: tuple[Option, ...], *names: str) -> tuple[Option, ...]:
    """All but those of these names."""
    return tuple(option for option in options if option.name not in names)
