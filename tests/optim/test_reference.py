"""One step of every method equals the plain reference, in every form, Fisher and damping rule."""

from __future__ import annotations

import copy

import pytest
import reference as plain
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron import FOOF, KFAC, Constant, Fixed, GaussNewton, Heuristic, MaxEigenvalue, Rescaled, Shampoo

SAMPLES, CLASSES, LR = 6, 3, 0.7


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def mlp(width=9):
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES))


def cnn(width=3):
    return nn.Sequential(
        *(nn.Conv2d(2, width, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(width, 2 * width, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(2 * width * 4, CLASSES)),
    )


NETWORKS = {"mlp": (mlp, (SAMPLES, 5)), "cnn": (cnn, (SAMPLES, 2, 5, 5))}


def setup(network, likelihood="categorical"):
    make, shape = NETWORKS[network]
    torch.manual_seed(1)
    model, x = make(), torch.randn(shape)
    y = torch.randint(CLASSES, (SAMPLES,)) if likelihood == "categorical" else torch.randn(SAMPLES, CLASSES)
    return model, x, y


def loss_of(f, y):
    """Mean over samples; for the gaussian half the squared distance, so that its derivative is f - y."""
    return F.cross_entropy(f, y) if y.ndim == 1 else (f - y).square().sum(1).mean() / 2


def run(optimizer, model, x, y):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def dampings(rule, A, B):
    """(rho_A, rho_B) by hand; base sizes are the actual ones, as without a Parametrization."""
    mean_A, mean_B = float(A.trace()) / len(A), float(B.trace()) / len(B)
    pi = (mean_A / mean_B) ** 0.5
    return {
        Rescaled: lambda: (rule.rho * mean_A, rule.rho * mean_B),
        Heuristic: lambda: (rule.rho**0.5 * pi, rule.rho**0.5 / pi),
        Fixed: lambda: (rule.a, rule.b),
        Constant: lambda: (rule.rho, rule.rho),
        MaxEigenvalue: lambda: tuple(rule.rho * float(torch.linalg.eigvalsh(M)[-1]) for M in (A, B)),
    }[type(rule)]()


def check_kfac(network, rule, fisher="exact", likelihood="categorical", sharing="expand", **options):
    model, x, y = setup(network, likelihood)
    expected = copy.deepcopy(model)
    f, seen = plain.watch(expected, x)
    vectors = plain.fisher_vectors(f, fisher, likelihood, y, seed=5)
    layers = {name: plain.kfac_factors(*parts, f, vectors, sharing) for name, parts in seen.items()}
    loss_of(f, y).backward()
    with torch.no_grad():
        for name, (module, _, _) in seen.items():
            A, B, positions = layers[name]
            rho_A, rho_B = dampings(rule, A, B)
            step = plain.kronecker_step(module.weight.grad.flatten(1), A, B, rho_A, rho_B)
            module.weight -= LR * step.reshape(module.weight.shape)
            damped = B + rho_B * torch.eye(len(B))
            module.bias -= LR * torch.linalg.solve(damped, module.bias.grad) / positions
    optimizer = KFAC(
        *(model, None, LR),
        damping=rule,
        fisher=fisher,
        likelihood=likelihood,
        sharing=sharing,
        seed=5,
        **{"trust": None, **options},
    )
    run(optimizer, model, x, y)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("form", ["rows", "matrix", "auto"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
def test_kfac_by_fisher(network, fisher, likelihood, form):
    check_kfac(network, Rescaled(0.5), fisher, likelihood, form=form)


@pytest.mark.parametrize("form", ["rows", "matrix"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "rule", [Rescaled(0.1), Heuristic(0.01), Fixed(a=0.3, b=0.02), Constant(0.1), MaxEigenvalue(0.01)], ids=repr
)
def test_kfac_by_damping(network, rule, form):
    check_kfac(network, rule, form=form)


@pytest.mark.parametrize("network", NETWORKS)
def test_kfac_reduce(network):
    check_kfac(network, Rescaled(0.5), sharing="reduce")


@pytest.mark.parametrize("solver", ["eigh", "newton"])
def test_kfac_by_solver(solver):
    check_kfac("mlp", Rescaled(0.5), solver=solver)


@pytest.mark.parametrize("network", NETWORKS)
def test_foof(network):
    model, x, y = setup(network)
    expected = copy.deepcopy(model)
    f, seen = plain.watch(expected, x)
    loss_of(f, y).backward()
    with torch.no_grad():
        for module, h, u in seen.values():
            A, _, positions = plain.kfac_factors(module, h, u, f, [])
            G, rho = module.weight.grad.flatten(1), 0.5 * float(A.trace()) / len(A)
            module.weight -= LR * (G @ torch.linalg.inv(A + rho * torch.eye(len(A)))).reshape(module.weight.shape)
            module.bias -= LR * module.bias.grad / positions
    run(FOOF(model, None, LR, damping=0.5, trust=None), model, x, y)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
@pytest.mark.parametrize("e", ["1/2", "1", "1/4"])
@pytest.mark.parametrize("network", NETWORKS)
def test_shampoo(network, e, solver):
    model, x, y = setup(network)
    expected = copy.deepcopy(model)
    run(Shampoo(model, None, LR, damping=1e-2, e=e, solver=solver, trust=None), model, x, y)
    loss_of(expected(x), y).backward()
    half = float(mukron.theory.get_method(f"shampoo:{e}").e_A) / 2
    with torch.no_grad():
        for values in expected.parameters():
            G = values.grad.flatten(1) if values.ndim > 1 else values.grad[:, None]
            L, R = G @ G.T, G.T @ G
            rho_L, rho_R = (1e-2 * float(torch.linalg.eigvalsh(M)[-1]) for M in (L, R))
            if values.ndim > 1:
                step = plain.kronecker_step(G, R, L, rho_R, rho_L, half, half)
            else:  # a vector has one side, and its factor the whole exponent
                eigenvalues, Q = torch.linalg.eigh(L)
                step = Q @ (Q.T @ G / (eigenvalues.clamp_min(0) + rho_L)[:, None] ** (2 * half))
            values.sub_(LR * step.reshape(values.shape))
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_gauss_newton(network, likelihood):
    """(sum over samples and outputs of chi^2 J^T J / n + rho) is one dense matrix a parameter."""
    model, x, y = setup(network, likelihood)
    expected = copy.deepcopy(model)
    run(GaussNewton(model, None, LR, damping=0.3, trust=None), model, x, y)
    f = expected(x)
    chi = f.detach().softmax(-1) - F.one_hot(y, CLASSES) if likelihood == "categorical" else f.detach() - y
    rows = {name: [] for name, _ in expected.named_parameters()}
    for sample in range(SAMPLES):
        for c in range(CLASSES):
            gradients = torch.autograd.grad(f[sample, c], list(expected.parameters()), retain_graph=True)
            for name, gradient in zip(rows, gradients, strict=True):
                rows[name].append(chi[sample, c] * gradient.flatten())
    loss_of(f, y).backward()
    with torch.no_grad():
        for name, values in expected.named_parameters():
            J = torch.stack(rows[name])
            C = J.T @ J / SAMPLES
            rho = 0.3 * float(C.trace()) / len(J)
            step = torch.linalg.solve(C + rho * torch.eye(len(C)), values.grad.flatten())
            values.sub_(LR * step.reshape(values.shape))
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10), name


def test_gauss_newton_is_the_papers_formula():
    """For the batch's own gradient: delta diag(chi~) h^T with chi~ = (diag(chi)^2 K + n rho)^-1 chi, one output."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    x, y = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1)
    before = model[0].weight.detach().clone()
    f, seen = plain.watch(model, x)
    _, h, u = seen["0"]
    (delta,) = torch.autograd.grad(f.sum(), u, retain_graph=True)
    chi = (f - y).detach().squeeze(1)
    K = (delta @ delta.T) * (h @ h.T)
    rho = 0.3 * float((chi[:, None] * K * chi).trace()) / SAMPLES  # of the sum over samples, as in the paper
    chi_tilde = torch.linalg.solve(torch.diag(chi**2) @ K + rho * torch.eye(SAMPLES), chi)
    run(GaussNewton(model, None, 1.0, damping=0.3, trust=None), model, x, y)
    assert torch.allclose(before - model[0].weight, delta.T @ torch.diag(chi_tilde) @ h, rtol=1e-9)


def test_several_groups():
    """Each group's own learning rate and damping reach its own layers."""
    model, x, y = setup("mlp")
    alone = copy.deepcopy(model)
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "damping": 2.0},
        {"params": [*model[2].parameters(), *model[4].parameters()], "damping": Fixed(a=0.5, b=0.25)},
    ]
    run(KFAC(model, None, LR, params=groups, fisher="exact", trust=None), model, x, y)
    first, rest = copy.deepcopy(alone), copy.deepcopy(alone)
    run(KFAC(first, None, 0.1, damping=2.0, fisher="exact", trust=None), first, x, y)
    run(KFAC(rest, None, LR, damping=Fixed(a=0.5, b=0.25), fisher="exact", trust=None), rest, x, y)
    for index in (0, 2, 4):
        assert torch.allclose(model[index].weight, (first if index == 0 else rest)[index].weight, rtol=1e-9)


def test_embedding_and_sequence():
    """An embedding and linear layers over positions: A is diagonal, positions are expanded."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, tokens):
            return self.head(torch.tanh(self.mix(self.embedding(tokens))).mean(1))

    model = Bag()
    tokens, y = torch.randint(7, (SAMPLES, 5)), torch.randint(CLASSES, (SAMPLES,))
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    u = model.embedding(tokens)
    f = model.head(torch.tanh(model.mix(u)).mean(1))
    B = 0
    for v in plain.fisher_vectors(f, "exact", "categorical", y, 0):
        (delta,) = torch.autograd.grad(f, u, v, retain_graph=True)
        B = B + sum(torch.outer(d, d) for d in delta.reshape(-1, 4)) / (SAMPLES * 5)
    A = torch.diag(torch.bincount(tokens.flatten(), minlength=7).double()) / SAMPLES
    F.cross_entropy(f, y).backward()
    G = model.embedding.weight.grad.clone()
    model.zero_grad()
    run(KFAC(model, None, LR, damping=0.5, fisher="exact", trust=None), model, tokens, y)
    rho_A, rho_B = dampings(Rescaled(0.5), A, B)
    step = plain.kronecker_step(G.T, A, B, rho_A, rho_B).T
    assert torch.allclose(model.embedding.weight, before["embedding.weight"] - LR * step, rtol=1e-8)


def test_kfac_is_the_exact_fisher_of_a_deep_linear_network():
    """Gaussian likelihood, no activation, one position: A (x) B is the Fisher block that autograd gives."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False), nn.Linear(5, 2, bias=False))
    x, y = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 2)
    optimizer = KFAC(model, lr=0.0, fisher="exact", likelihood="gaussian", form="matrix", trust=None)
    f = model(x)
    loss_of(f, y).backward()
    for index in range(3):
        gathered = optimizer.capture.gather()[str(index)]
        ours = torch.kron(gathered.B.factor().M[0], gathered.A.factor().M[0])
        fisher = 0
        for sample in range(SAMPLES):
            for c in range(2):
                g = torch.autograd.grad(model(x)[sample, c], model[index].weight)[0].flatten()
                fisher = fisher + torch.outer(g, g) / SAMPLES
        assert torch.allclose(ours, fisher, rtol=1e-9, atol=1e-12)


def test_a_grouped_convolution_is_its_groups_side_by_side():
    """Each group has factors of its own: the step is that of separate convolutions."""

    class Split(nn.Module):
        def __init__(self, grouped):
            super().__init__()
            self.left, self.right = nn.Conv1d(2, 3, 3, padding=1), nn.Conv1d(2, 3, 3, padding=1)
            self.head = nn.Linear(6 * 5, CLASSES)
            with torch.no_grad():
                for index, part in enumerate((self.left, self.right)):
                    part.weight.copy_(grouped[0].weight[3 * index : 3 * index + 3])
                    part.bias.copy_(grouped[0].bias[3 * index : 3 * index + 3])
            self.head.load_state_dict(grouped[3].state_dict())

        def forward(self, x):
            return self.head(torch.tanh(torch.cat([self.left(x[:, :2]), self.right(x[:, 2:])], 1)).flatten(1))

    grouped = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(30, CLASSES))
    split = Split(grouped)
    x, y = torch.randn(SAMPLES, 4, 5), torch.randint(CLASSES, (SAMPLES,))
    for method in (
        lambda m: KFAC(m, None, LR, fisher="exact", trust=None),
        lambda m: Shampoo(m, None, LR, damping=1e-2, trust=None),
    ):
        one, two = copy.deepcopy(grouped), copy.deepcopy(split)
        run(method(one), one, x, y)
        run(method(two), two, x, y)
        assert torch.allclose(one[0].weight, torch.cat([two.left.weight, two.right.weight]), rtol=1e-8)
        assert torch.allclose(one[0].bias, torch.cat([two.left.bias, two.right.bias]), rtol=1e-8)


def test_gauss_newton_of_an_embedding_is_that_of_a_linear_layer():
    tokens, y = torch.randint(7, (10, 3)), torch.randint(5, (10,))
    embedding = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5))
    linear = nn.Sequential(nn.Linear(7, 4, bias=False), nn.Flatten(), nn.Linear(12, 5))
    with torch.no_grad():
        linear[0].weight.copy_(embedding[0].weight.T)
        linear[2].load_state_dict(embedding[2].state_dict())
    run(GaussNewton(embedding, lr=0.1, trust=None), embedding, tokens, y)
    run(GaussNewton(linear, lr=0.1, trust=None), linear, F.one_hot(tokens, 7).double(), y)
    assert torch.allclose(embedding[0].weight, linear[0].weight.T, rtol=1e-9)


def test_exact_fisher_of_one_number_a_sample():
    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 1)

        def forward(self, x):
            return self.fc(x).squeeze(1)

    model = Score()
    optimizer = KFAC(model, likelihood="gaussian", fisher="exact", form="matrix", trust=None)
    model(torch.randn(SAMPLES, 5)).square().mean().backward()
    assert float(optimizer.capture.gather()["fc"].B.factor().M) == pytest.approx(1.0)
    optimizer.step()
