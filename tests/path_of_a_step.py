"""The path of one K-FAC step through the library: which functions of which files it visits, in order of first visit.

    python tests/path_of_a_step.py

Printed are the functions, and three counts: files, functions, and changes of file from one function to the next. The
step is the second one (zero_grad, forward, loss, backward, step) of an MLP with three layers: the first one also checks
how weights are used. Comprehensions count as part of their function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import mukron

PACKAGE = Path(mukron.__file__).parent
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


class Visit(NamedTuple):
    """A function of the library, and its file as a path inside the package."""

    file: str
    function: str


class Counts(NamedTuple):
    files: int
    functions: int
    changes: int


def step_of_an_mlp(**options: Any) -> Callable[[], None]:
    """One training step as a function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = mukron.KFAC(model, lr=0.1, **options)
    x, y = torch.randn(32, 8), torch.randint(4, (32,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def followed(run: Callable[[], None]) -> list[Visit]:
    """The library's functions that a call runs, in order of first visit, in whatever thread."""
    seen: dict[CodeType, Visit] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen and code.co_name not in COMPREHENSIONS:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE):
                name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
                seen[code] = Visit(path.relative_to(PACKAGE).as_posix(), name)

    set_everywhere: Callable[[Any], None] = getattr(threading, "setprofile_all_threads", threading.setprofile)
    before = sys.getprofile()
    set_everywhere(hook)  # a backward pass may run in a thread of its own
    sys.setprofile(hook)
    try:
        run()
    finally:
        set_everywhere(None)
        sys.setprofile(before)
    return list(seen.values())


def path_of_a_step(**options: Any) -> list[Visit]:
    """The path of the second step."""
    step = step_of_an_mlp(**options)
    step()
    return followed(step)


def counts(path: list[Visit]) -> Counts:
    changes = sum(before.file != after.file for before, after in pairwise(path))
    return Counts(len({visit.file for visit in path}), len(path), changes)


def main() -> None:
    path = path_of_a_step()
    for visit in path:
        print(f"{visit.file}: {visit.function}")
    files, functions, changes = counts(path)
    print(f"{files} files, {functions} functions, {changes} changes of file")


if __name__ == "__main__":
    main()
