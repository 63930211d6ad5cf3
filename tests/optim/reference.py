"""Second-order steps written out plainly in float64: every Kronecker product is formed, nothing is pushed through.

Independent of the library: layers are watched with their own hooks, patches come from torch's ``unfold``, and each
damped block  (B + rho_B) (x) (A + rho_A)  is one dense matrix that is inverted. At the end stands one step of
Distributed Shampoo.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def watch(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, tuple[nn.Module, Tensor, Tensor]]]:
    """The output, and every layer's module, input and output."""
    seen: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, (m, i[0].detach(), o)))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    ]
    f = model(x)
    for handle in handles:
        handle.remove()
    return f, seen


def rows_in(module: nn.Module, x: Tensor) -> Tensor:
    """[samples, positions, features]."""
    if isinstance(module, nn.Linear):
        return x.reshape(x.shape[0], -1, x.shape[-1])
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    return patches.transpose(1, 2)


def rows_out(module: nn.Module, u: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return u.reshape(u.shape[0], -1, u.shape[-1])
    return u.flatten(2).transpose(1, 2)


def fisher_vectors(f: Tensor, fisher: str, likelihood: str, y: Tensor, seed: int) -> list[Tensor]:
    """The derivatives of the summed log-likelihood by the output."""
    classes = f.shape[1]
    p = f.detach().softmax(-1)
    if fisher == "empirical":
        return [F.one_hot(y, classes) - p if likelihood == "categorical" else y - f.detach()]
    if fisher == "mc":
        u = torch.rand(f.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if likelihood == "gaussian":
            return [torch.special.ndtri(u).to(torch.get_default_dtype()).to(f)]
        drawn = (p / -torch.log1p(-u)).argmax(1)
        return [F.one_hot(drawn, classes) - p]
    vectors = []
    for c in range(classes):
        one = torch.zeros_like(p)
        one[:, c] = 1
        vectors.append(one if likelihood == "gaussian" else p[:, c : c + 1].sqrt() * (one - p))
    return vectors


def kfac_factors(module, x, u, f, vectors, sharing="expand") -> tuple[Tensor, Tensor, int]:
    """A and B of one layer by their definition, one outer product at a time."""
    samples = f.shape[0]
    H = rows_in(module, x)
    positions = H.shape[1]
    if sharing == "reduce":
        H = H.mean(1, keepdim=True)
    A = sum(torch.outer(h, h) for h in H.reshape(-1, H.shape[-1])) / samples
    B = 0
    for v in vectors:
        (delta,) = torch.autograd.grad(f, u, v, retain_graph=True)
        D = rows_out(module, delta)
        if sharing == "reduce":
            D = D.sum(1, keepdim=True)
        B = B + sum(torch.outer(d, d) for d in D.reshape(-1, D.shape[-1])) / (samples * D.shape[1])
    return A, B, positions if sharing == "expand" else 1


def kronecker_step(
    G: Tensor, A: Tensor, B: Tensor, rho_A: float, rho_B: float, e_A: float = 1, e_B: float = 1
) -> Tensor:
    """((B + rho_B)^e_B (x) (A + rho_A)^e_A)^-1 vec(G), through one dense matrix."""
    damped_A, damped_B = A + rho_A * torch.eye(len(A)), B + rho_B * torch.eye(len(B))
    block = torch.kron(power(damped_B, e_B), power(damped_A, e_A))
    return torch.linalg.solve(block, G.flatten()).reshape(G.shape)


def power(M: Tensor, e: float) -> Tensor:
    values, vectors = torch.linalg.eigh(M)
    return (vectors * values.clamp_min(0) ** e) @ vectors.T


def distributed_shampoo_step(
    W: Tensor,
    G: Tensor,
    state: dict,
    *,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    graft: str | None,
    graft_beta2: float,
    graft_epsilon: float,
    every: int,
    start: int,
    momentum: float = 0.0,
    nesterov: bool = False,
    decay: float = 0.0,
    l2: float = 0.0,
    e: float = 0.5,
) -> Tensor:
    """The weight after one step of Distributed Shampoo (Shi and others 2023, arXiv 2309.06497), as one block.

    betas[1] = 1 sums the factors. Steps are counted from 1: until ``start`` they are those of the graft, at ``start``
    and at each multiple of ``every`` after it roots are made.
    """
    beta1, beta2 = betas
    t = state["t"] = state.get("t", 0) + 1
    G = (G + l2 * W).reshape(len(W), -1)  # a bias is one column, a kernel has one row an output channel
    products = [G @ G.T] if W.ndim == 1 else [G @ G.T, G.T @ G]
    kept = state.get("factors", [torch.zeros_like(M) for M in products])
    new, weight = (1.0, 1.0) if beta2 == 1 else (1 - beta2, 1 - beta2**t)
    state["factors"] = [beta2 * K + new * M for K, M in zip(kept, products, strict=True)]
    if t == start or (t > start and t % every == 0):
        damped = [M / weight + epsilon * torch.eye(len(M)) for M in state["factors"]]
        state["roots"] = [power(M, -e / len(damped)) for M in damped]

    state["m"] = beta1 * state.get("m", torch.zeros_like(G)) + (1 - beta1) * G
    state["v"] = graft_beta2 * state.get("v", torch.zeros_like(G)) + (1 - graft_beta2) * G**2
    average = state["m"] / (1 - beta1**t)
    grafted = average
    if graft == "adam":
        grafted = average / ((state["v"] / (1 - graft_beta2**t)).sqrt() + graft_epsilon)
    P = grafted
    if t >= start:
        P = state["roots"][0] @ average
        P = P @ state["roots"][1] if W.ndim > 1 else P
        if graft is not None:
            P = P * grafted.norm() / P.norm()

    P = P.reshape(W.shape) + decay * W
    state["buffer"] = momentum * state.get("buffer", torch.zeros_like(W)) + P
    return W - lr * (P + momentum * state["buffer"] if nesterov else state["buffer"])
