"""SOAP: a float64 reference, Adam where nothing is turned, muP's laws, and what is left to the fallback rule."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix_methods import batch, flat, network, outputs_of, train
from torch import Tensor, nn
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.linalg import carried
from mukron.linalg.basis import Basis
from mukron.models import CNN, GPT, MLP, ResidualMLP


class Reference:
    """SOAP as one would write it down, for one matrix, in float64; no part of it is the library's.

    G' = Q_L^T G Q_R, and V_ij is the mean square of G'_ij. In new bases V_ij is sum_kl c_ki^2 s_lj^2 V_kl, with the
    cosines c and s between old and new directions.
    """

    def __init__(self, every, beta1, beta2, memory, solver, sides, nesterov):
        self.every, self.beta1, self.beta2, self.memory = every, beta1, beta2, memory
        self.solver, self.sides, self.nesterov = solver, sides, nesterov
        self.t = 0
        self.m = self.V = None
        self.S, self.Q = {}, {"L": None, "R": None}

    def step(self, G: Tensor) -> Tensor:
        self.t += 1
        for side, square in (("L", G @ G.T), ("R", G.T @ G)):
            if self.memory == "sum":
                self.S[side] = self.S.get(side, 0) + square
            else:
                self.S[side] = self.memory * self.S.get(side, 0) + (1 - self.memory) * square
        if (self.t - 1) % self.every == 0:
            self.renew()
        self.m = (0 if self.m is None else self.beta1 * self.m) + (1 - self.beta1) * G
        turned = self.turn(G)
        self.V = (0 if self.V is None else self.beta2 * self.V) + (1 - self.beta2) * turned**2
        mean = self.m / (1 - self.beta1**self.t)
        if self.nesterov:
            mean = (self.beta1 * self.m + (1 - self.beta1) * G) / (1 - self.beta1 ** (self.t + 1))
        root = (self.V / (1 - self.beta2**self.t)).sqrt()
        D = self.turn(mean) / (root + 4 * torch.finfo(root.dtype).eps ** 0.5 * root.max() + 1e-8)
        left = D if self.Q["L"] is None else self.Q["L"] @ D
        return left if self.Q["R"] is None else left @ self.Q["R"].T

    def turn(self, G: Tensor) -> Tensor:
        G = G if self.Q["L"] is None else self.Q["L"].T @ G
        return G if self.Q["R"] is None else G @ self.Q["R"]

    def renew(self) -> None:
        for side, S in self.S.items():
            if self.sides not in ("both", {"L": "output", "R": "input"}[side]):
                continue
            last = self.Q[side]
            if last is None or self.solver == "eigh":
                Q = torch.linalg.eigh(S)[1].flip(-1)
            else:
                Q = torch.linalg.qr(S @ last)[0]
            if last is not None:
                cosines = (last.T @ Q) ** 2
                self.V = cosines.T @ self.V if side == "L" else self.V @ cosines
            self.Q[side] = Q


@pytest.mark.parametrize("sides", ["both", "input", "output"])
@pytest.mark.parametrize(
    ("every", "beta1", "beta2", "memory", "solver", "nesterov"),
    [
        (1, 0.9, 0.95, 0.95, "qr", False),
        (3, 0.9, 0.95, 0.95, "qr", False),
        (4, 0.95, 0.99, 0.9, "eigh", True),
        (2, 0.0, 0.9, "sum", "qr", False),
        (5, 0.5, 0.5, 0.8, "eigh", False),
    ],
)
def test_steps_are_the_references(every, beta1, beta2, memory, solver, nesterov, sides):
    """Gradients have all directions: of those that L and R have not seen, rounding decides the basis."""
    ours, theirs = (network(sizes=(16, 16, 16, 16)).double() for _ in range(2))
    optimizer = mukron.SOAP(
        ours,
        lr=0.01,
        momentum=beta1,
        nesterov=nesterov,
        beta2=beta2,
        memory=mukron.Sum() if memory == "sum" else mukron.EMA(memory),
        solver=solver,
        sides=sides,
        inverse_every=every,
        trust=None,
        weight_decay=0.1,
        exclude=(),
    )
    references = [Reference(every, beta1, beta2, memory, solver, sides, nesterov) for _ in theirs.parameters()]
    for number in range(13):
        x, y = batch(number, inputs=16)
        for model in (ours, theirs):
            model.zero_grad()
            F.cross_entropy(model(x.double()), (y + number) % 16).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, reference in zip(theirs.parameters(), references, strict=True):
                parameter.mul_(1 - 0.01 * 0.1).sub_(0.01 * reference.step(parameter.grad))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # logits sum to zero: one direction is rounding alone


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_where_no_side_is_turned_it_is_adam(decay):
    ours, theirs = network().double(), network().double()
    options = {"lr": 0.01, "weight_decay": decay, "eps": 1e-8}
    soap = mukron.SOAP(ours, momentum=0.9, beta2=0.99, max_size=1, trust=None, exclude=(), **options)
    train(ours, soap, 12, torch.float64)
    train(theirs, torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.99), **options), 12, torch.float64)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_mean_squares_are_carried_into_new_bases():
    """Of many matrices with uncorrelated entries, whose mean squares in the new bases can be measured."""
    torch.manual_seed(0)
    V = torch.rand(5, 4, dtype=torch.float64) + 0.1
    before, now = (
        tuple(Basis(torch.linalg.qr(torch.randn(1, d, d, dtype=torch.float64))[0]) for d in (5, 4)) for _ in range(2)
    )
    entries = torch.randn(200_000, 5, 4, dtype=torch.float64) * V.sqrt()
    G = before[0].Q @ entries @ before[1].Q.mT
    measured = (now[0].Q.mT @ G @ now[1].Q).square().mean(0)
    made = carried(V[None], before, now)[0]
    torch.testing.assert_close(made, measured, rtol=0.02, atol=0)
    torch.testing.assert_close(made.sum(), V.sum())
    assert carried(V[None], before, before)[0] is not None
    torch.testing.assert_close(carried(V[None], before, before)[0], V)


def test_steps_do_not_depend_on_the_solver_much():
    """One round of orthogonal iteration a step stays near the eigenbasis."""
    moved = {}
    for solver in ("qr", "eigh"):
        model = network().double()
        start = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, mukron.SOAP(model, lr=0.02, solver=solver, inverse_every=1), 30, torch.float64)
        moved[solver] = [parameter - before for parameter, before in zip(model.parameters(), start, strict=True)]
    for a, b in zip(moved["qr"], moved["eigh"], strict=True):
        cosine = (a * b).sum() / (a.norm() * b.norm())
        assert cosine > 0.9


@pytest.mark.parametrize("sides", ["both", "input", "output"])
@pytest.mark.parametrize("trust", [None, "spectral"])
def test_features_move_alike_at_every_width(sides, trust):
    """The change of every layer's output by three steps on a few samples, over widths 64 to 512."""
    widths, changes = (64, 128, 256, 512), {}
    x, y = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10
    for width in widths:
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = MLP(width, inputs=32)
            plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=32), 64))
            optimizer = mukron.SOAP(model, plan, lr=0.0005 if trust is None else 0.01, sides=sides, trust=trust)
            before = outputs_of(model, x)
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            for name, after in outputs_of(model, x).items():
                change = (after - before[name]).square().mean().sqrt().item()
                changes.setdefault(name, []).append((width, change))
    slopes = {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in changes.items()}
    slopes.pop("fc3")  # its change has a part that falls with the width
    assert all(abs(slope) < 0.12 for slope in slopes.values()), slopes


def test_null_directions_do_not_move():
    """Gradients of few samples have few directions; what rounding shows in the others is no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 4))
    optimizer = mukron.SOAP(model, lr=1.0, trust=None, momentum=0.0)
    before = model[0].weight.detach().clone()
    x, y = torch.randn(4, 256), torch.arange(4)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    values = torch.linalg.svdvals(before - model[0].weight.detach())
    assert values[0] > 0.9
    assert values[4:].norm() < 0.1 * values[:4].norm()


@pytest.mark.parametrize("width", [64, 256])
def test_the_first_move_is_orthogonal_whatever_the_conditioning(width):
    """Singular values of a gradient of 32 samples differ by 10^4: L and R have lost the small ones in float32."""
    torch.manual_seed(0)
    model = ResidualMLP(width, inputs=10, classes=4, depth=16, base_depth=2)
    optimizer = mukron.SOAP(model, lr=1.0, trust=None, momentum=0.0)
    before = model.blocks[15].out.weight.detach().clone()
    F.cross_entropy(model(torch.randn(32, 10)), torch.randint(4, (32,))).backward()
    optimizer.step()
    assert 0.95 < torch.linalg.matrix_norm(before - model.blocks[15].out.weight.detach(), 2) < 1.05


@pytest.mark.parametrize("trust", ["spectral", None])
def test_a_change_of_precision_between_renewals(trust):
    model = network()
    optimizer = mukron.SOAP(model, trust=trust, inverse_every=10)
    train(model, optimizer, 12)
    model.double()
    train(model, optimizer, 3, torch.float64)
    assert optimizer.skipped == 0


@pytest.mark.parametrize("trust", ["rms", "graft:adam", "graft:sgd", "kl", "spectral", None])
@pytest.mark.parametrize("method", ["soap", "soap:input"])
def test_explain_has_the_multipliers_of_the_optimizer(method, trust):
    model = MLP(64, inputs=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=8), 16))
    optimizer = mukron.SOAP(model, plan, trust=trust, sides=method.partition(":")[2] or "both")
    table = plan.explain(method, trust=trust, whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        assert row["lr x"] == f"{optimizer.entries[row['parameter']].scale:.4g}", row


def test_what_is_left_to_adam():
    model = GPT(32, depth=2, vocabulary=20, context=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda w: GPT(w, depth=2, vocabulary=20, context=8), 16))
    optimizer = mukron.SOAP(model, plan)
    assert {name.split(".")[0] for name in optimizer.layers} == {"blocks"}
    assert optimizer.param_groups[0]["fallback_lr"] == pytest.approx(0.005)
    assert mukron.SOAP(model, plan, trust=None).param_groups[0]["fallback_lr"] is None  # both count in Adam's units
    table = plan.explain("soap", whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"
    assert "eigenbases" in str(plan.explain("soap", trust=None))
    assert "after the first step" in str(optimizer.plan())


def test_a_convolution_is_a_matrix_of_its_channels():
    torch.manual_seed(0)
    model = CNN(8).double()
    optimizer = mukron.SOAP(model, lr=0.1, momentum=0.0, trust=None)
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    before = convolution.weight.detach().clone()
    model(torch.randn(8, convolution.in_channels, 28, 28).double()).square().mean().backward()
    U, _, Vh = torch.linalg.svd(convolution.weight.grad.flatten(1), full_matrices=False)
    optimizer.step()
    # at the first step G' is diagonal, and its entries over their own roots are signs: U V^T
    torch.testing.assert_close(((before - convolution.weight) / 0.1).flatten(1), U @ Vh, rtol=1e-2, atol=2e-3)


def test_it_resumes_bit_for_bit():
    whole, half = network(), network()
    optimizer, first = mukron.SOAP(whole, inverse_every=4), mukron.SOAP(half, inverse_every=4)
    train(whole, optimizer, 13)
    train(half, first, 13)
    resumed = network(1)
    resumed.load_state_dict(half.state_dict())
    second = mukron.SOAP(resumed, inverse_every=4)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(whole, optimizer, 6)
    train(resumed, second, 6)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(flat(optimizer.state_dict()["state"]), flat(second.state_dict()["state"]), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_trains(dtype):
    torch.manual_seed(0)
    model = MLP(64, inputs=16).to(dtype)
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    y = (x @ torch.randn(16, 10, generator=torch.Generator().manual_seed(2))).argmax(-1)
    optimizer = mukron.SOAP(model)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert max(losses) < 1.2 * losses[0]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beta2": 1.0}, ValueError, r"beta2 must lie in \[0, 1\)"),
        ({"eps": 0.0}, ValueError, "eps must be above 0"),
        ({"max_size": 0}, ValueError, "max_size at least 1"),
        ({"sides": "left"}, ValueError, "unknown sides 'left'; known: 'both', 'input', 'output'"),
        ({"solver": "newton"}, ValueError, "unknown solver 'newton'; known: 'qr', 'eigh'"),
        ({"memory": "window:2"}, ValueError, "SOAP's factors are matrices"),
        ({"damping": 1.0}, TypeError, "damping would have no effect"),
        ({"momentum": mukron.HeavyBall(0.9)}, TypeError, "momentum is on the gradient here"),
        ({"precondition_frequency": 10}, TypeError, "no argument 'precondition_frequency'"),
    ],
)
def test_misuse(options, error, message):
    with pytest.raises(error, match=message):
        mukron.SOAP(network(), **options)


def test_a_gradient_of_zeros_is_a_gradient():
    model = network()
    optimizer = mukron.SOAP(model, weight_decay=0.1, exclude=())
    train(model, optimizer, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert (parameter - old).norm() > 0.001
    assert optimizer.skipped == 0


def test_a_network_whose_gradient_is_zero_from_the_start_stays():
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = mukron.SOAP(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert optimizer.skipped == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
