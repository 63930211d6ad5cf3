"""What surrounds a run: repeatable kernels, the precision of products, compilation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mukron.optim.guards import PATIENCE
from mukron.train.errors import RunError


@contextmanager
def repeatable() -> Iterator[None]:
    """cuDNN's repeatable kernels; and what the loop itself says of a diverged run is not said twice."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=f"{PATIENCE} steps in a row were skipped", category=RuntimeWarning
            )
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Of float32 products on a GPU: "tf32" computes them with ten bits of the mantissa, several times quicker."""
    before = torch.get_float32_matmul_precision()
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compiled_anew(model: nn.Module) -> Callable[[Tensor], Any]:
    """Anew for every run: torch would reuse what it compiled for another one of this class, without its hooks."""
    reset: Callable[[], None] = torch.compiler.reset
    reset()
    compiled: Callable[[Tensor], Any] = torch.compile(model, dynamic=False)

    def network(inputs: Tensor) -> Any:
        try:
            return compiled(inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise RunError(
                f"compile=True: torch could not compile the network ({str(error).splitlines()[0]}); it needs a C++ "
                "compiler, and Triton on a GPU. Install what is missing, or train with compile=False"
            ) from error

    return network
