"""What the GPT benchmark is to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

from mukron.bench.gpt.references import REFERENCE_METHODS
from mukron.bench.gpt.task import LAYERS, GPTRun, check_method, load_text
from mukron.bench.measure import check_device
from mukron.damping import Rule
from mukron.optim.spec import spec_of

GPT_SCHEMES = ("mup", "sp")


@dataclass(frozen=True)
class GPTOptions:
    """What to run.

    Attributes:
        methods: Names of methods.
        widths: The sizes of a token's vector; the narrowest is the base of the parametrization.
        rates: Learning rates.
        steps: The number of steps.
        seeds: The number of seeds.
        file: The text. None: a synthetic one.
        device: "cpu" or "cuda".
        precision: Of float32 products on a GPU: "float32" or "tf32".
        workers: The number of processes; each trains one run at a time.
        depths: The numbers of blocks; the smallest is the base of the parametrization.
        schemes: "mup" and "sp".
        weight_decay: Decoupled, of all methods of this library.
        dampings: Damping rules as text, such as "rescaled:0.25"; an empty text is the method's own.

    Raises:
        ValueError: A name is not known, or the text cannot be read.

    Example:
        >>> len([*GPTOptions(methods=("kfac",), widths=(64, 128), rates=(0.05, 0.1), seeds=2).runs()])
        8
    """

    methods: tuple[str, ...] = ("kfac", "shampoo")
    widths: tuple[int, ...] = (256,)
    rates: tuple[float, ...] = (0.1,)
    steps: int = 500
    seeds: int = 1
    file: Path | None = None
    device: str = "cpu"
    precision: str = "float32"
    workers: int = 1
    depths: tuple[int, ...] = (LAYERS,)
    schemes: tuple[str, ...] = ("mup",)
    weight_decay: float = 0.0
    dampings: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("--methods: name at least one")
        for method in self.methods:
            check_method(method)
        for width in self.widths:
            if width < 1 or (width > 64 and width % 64):
                raise ValueError(f"--widths {width}: beyond 64 expected multiples of 64, the size of a head")
        if any(not 0 < rate < inf for rate in self.rates):
            raise ValueError(f"--rates: expected positive numbers, got {', '.join(map(str, self.rates))}")
        if any(depth < 1 for depth in self.depths):
            raise ValueError(f"--depths: expected numbers of blocks, got {', '.join(map(str, self.depths))}")
        references = [method for method in self.methods if method in REFERENCE_METHODS]
        if references and len(set(self.depths)) > 1:
            raise ValueError(f"--methods {references[0]} has no laws of depth: give one of --depths")
        for scheme in self.schemes:
            if scheme not in GPT_SCHEMES:
                raise ValueError(f"--schemes {scheme!r}; known: {', '.join(GPT_SCHEMES)}")
        for damping in filter(None, self.dampings):
            Rule.parse(damping)
            for method in self.methods:
                if method in REFERENCE_METHODS or spec_of(method).damping is None:
                    raise ValueError(f"--dampings {damping}: {title_of(method)} has no damping")
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"--weight-decay: expected a number not below 0, got {self.weight_decay}")
        check_device(self.device, self.precision)
        load_text(self.file, "cpu")

    def runs(self) -> Iterable[GPTRun]:
        """All runs, the largest first: they take longest. References have no muP, and are run once."""
        base, base_depth = min(self.widths), min(self.depths)
        sizes = sorted(product(self.widths, self.depths), key=lambda size: -(size[0] ** 2) * size[1])
        for (width, depth), method, scheme, damping, lr, seed in product(
            sizes, self.methods, self.schemes, self.dampings, dict.fromkeys(self.rates), range(self.seeds)
        ):
            if method in REFERENCE_METHODS:
                if scheme == self.schemes[0] or REFERENCE_METHODS[method].with_plan:
                    yield GPTRun(method, width, base, lr, seed, self.steps, depth, depth, scheme)
                continue
            rule = Rule.parse(damping).text() if damping else ""
            laws = (depth, base_depth, scheme, self.weight_decay, rule)
            yield GPTRun(method, width, base, lr, seed, self.steps, *laws)


def title_of(method: str) -> str:
    """The name of a method for people."""
    return REFERENCE_METHODS[method].title if method in REFERENCE_METHODS else spec_of(method).title
