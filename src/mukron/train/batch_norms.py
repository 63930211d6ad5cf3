"""Batch normalization over the joined batch of several processes, on every device (torch's SyncBatchNorm needs GPUs).

    mu = sum x / n       over samples and positions of all ranks, by channel
    v  = sum (x - mu)^2 / n
    y  = (x - mu) (v + eps)^-1/2 gain + bias

A sum over ranks has every rank's loss behind it, so its derivative is the sum of all ranks' derivatives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm


def join_batch_norms(model: nn.Module) -> None:
    """Let a network's batch norms take their averages over the batches of all processes.

    Args:
        model: The network. Its modules stay the same, so plans and optimizers need not know.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            module.forward = partial(_forward, module, type(module).forward)  # type: ignore[method-assign]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        total = own.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *derivatives: Tensor) -> Any:
        return sum_over_ranks(derivatives[0].contiguous())


def sum_over_ranks(own: Tensor) -> Tensor:
    """The sum of a tensor over processes, through which derivatives go.

    Args:
        own: This process's tensor.
    """
    total: Tensor = _SumOverRanks.apply(own)  # type: ignore[no-untyped-call]
    return total


def _forward(module: _BatchNorm, plain: Any, x: Tensor) -> Tensor:
    if not module.training and module.running_mean is not None:
        output: Tensor = plain(module, x)
        return output
    precise = x if x.dtype == torch.float64 else x.float()
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    count = precise.new_tensor([x.numel() / x.shape[1]])
    sums = sum_over_ranks(torch.cat([precise.sum(axes), count]))
    n = sums[-1]
    mu = sums[:-1] / n
    centred = precise - mu.reshape(shape)
    v = sum_over_ranks(centred.square().sum(axes)) / n
    _remember(module, mu.detach(), v.detach(), n.detach())
    y: Tensor = centred * (v + module.eps).rsqrt().reshape(shape)
    if module.affine:
        y = y * module.weight.reshape(shape) + module.bias.reshape(shape)
    return y.to(x.dtype)


@torch.no_grad()
def _remember(module: _BatchNorm, mu: Tensor, v: Tensor, n: Tensor) -> None:
    """The running averages, as torch's own batch norms keep them: of the unbiased variance."""
    if not module.training or module.running_mean is None or module.running_var is None:
        return
    momentum: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        momentum = 1 / module.num_batches_tracked if momentum is None else momentum
    module.running_mean.lerp_(mu.to(module.running_mean.dtype), float(momentum))
    module.running_var.lerp_((v * n / (n - 1)).to(module.running_var.dtype), float(momentum))
