"""Shampoo with a factor on one side: steps of a float64 reference, the law of both sides, saving, refusals."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from reference import power
from torch import Tensor, nn
from torch.nn import functional as F

import mukron
from mukron.damping import MaxEigenvalue
from mukron.exponents import fit_exponent
from mukron.models import MLP
from mukron.optim.spec import spec_of
from mukron.theory import MUP, Role, get_method, shampoo, solve, uniform

LR, RHO, MAX_SIZE = 0.1, 1e-2, 6
EXACT = {"eigh": "eigh", "newton": "newton", "tracked": mukron.linalg.Tracked(1e-12)}
Slopes = dict[str, float]
MEMORIES = {"batch": mukron.Batch(), "sum": mukron.Sum(), "ema": mukron.EMA(0.8)}


def mlp() -> nn.Module:
    """The output side of the first layer is longer than ``MAX_SIZE``, the input side of the second, none of the last.

    The first bias is longer, too.
    """
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))


def cnn() -> nn.Module:
    """Kernels as matrices: [3, 18] and [8, 3]."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Flatten(), Head(72, 3))


class Head(nn.Module):
    """The mean over equal parts, which has no parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.parts = inputs // outputs, outputs

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, self.parts).mean(1)


NETWORKS = {"mlp": (mlp, (7, 5)), "cnn": (cnn, (7, 2, 5, 5))}


class Reference:
    """One parameter's steps, in float64; no part of it is the library's."""

    def __init__(self, memory: str, e: float = 0.5, sides: str = "LR") -> None:
        self.memory, self.e, self.sides, self.t = memory, e, sides, 0
        self.kept: dict[str, Tensor] = {}

    def step(self, gradient: Tensor) -> Tensor:
        G = gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
        self.t += 1
        sides = [side for side, d in zip("LR", G.shape, strict=True) if d <= MAX_SIZE and side in self.sides]
        sides = sides[:1] if gradient.ndim == 1 else sides
        roots = {side: power(self.damped(side, G), -self.e / len(sides)) for side in sides}
        left = roots["L"] @ G if "L" in roots else G
        return (left @ roots["R"] if "R" in roots else left).reshape(gradient.shape)

    def damped(self, side: str, G: Tensor) -> Tensor:
        M = G @ G.T if side == "L" else G.T @ G
        if self.memory == "sum":
            M = self.kept[side] = self.kept.get(side, 0) + M
        elif self.memory == "ema":
            self.kept[side] = 0.8 * self.kept.get(side, 0) + 0.2 * M
            M = self.kept[side] / (1 - 0.8**self.t)
        return M + RHO * float(torch.linalg.eigvalsh(M)[-1]) * torch.eye(len(M))


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.randint(3, shape[:1], generator=generator)


def differentiate(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("trust", [None, "rms:0.2", "spectral:1e6:inf"])
@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_the_references(network, memory, solver, trust):
    torch.manual_seed(0)
    make, shape = NETWORKS[network]
    ours = make()
    theirs = copy.deepcopy(ours)
    optimizer = mukron.Shampoo(
        *(ours, None, LR),
        **{"damping": MaxEigenvalue(RHO, floor=0.0), "memory": MEMORIES[memory], "solver": EXACT[solver]},
        **{"max_size": MAX_SIZE, "trust": trust, "momentum": 0.0, "inverse_every": 1},
    )
    references = [Reference(memory) for _ in theirs.parameters()]
    for number in range(4):
        for model in (ours, theirs):
            differentiate(model, *batch(shape, number))
        optimizer.step()
        with torch.no_grad():
            for parameter, reference in zip(theirs.parameters(), references, strict=True):
                step = reference.step(parameter.grad)
                step = step * (0.2 * step.numel() ** 0.5 / step.norm()) if trust == "rms:0.2" else step
                parameter.sub_(LR * step)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("e", ["1/2", "1/4", "1"])
@pytest.mark.parametrize("sides", ["input", "output"])
def test_one_side_by_choice(sides, e):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    theirs = copy.deepcopy(ours)
    options = {"damping": MaxEigenvalue(RHO, floor=0.0), "trust": None, "max_size": MAX_SIZE}
    optimizer = mukron.Shampoo(ours, None, LR, e=e, sides=sides, **options)
    assert optimizer.method == get_method(f"shampoo:{e},{sides}")
    side = {"input": "R", "output": "L"}[sides]
    references = [Reference("sum", float(shampoo(e).e_A), side) for _ in theirs.parameters()]
    for number in range(3):
        for model in (ours, theirs):
            differentiate(model, *batch((7, 5), number))
        optimizer.step()
        with torch.no_grad():
            for parameter, reference in zip(theirs.parameters(), references, strict=True):
                parameter.sub_(LR * reference.step(parameter.grad))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("e", ["1/2", "1/4"])
def test_of_one_batch_the_step_is_that_of_both_sides(e):
    """The reason that there is one law: L^-e G = L^-e/2 G R^-e/2 = G R^-e, with damping too."""
    made = []
    for options in ({}, {"sides": "input"}, {"sides": "output"}, {"max_size": 8}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
        optimizer = mukron.Shampoo(model, lr=LR, e=e, damping=1e-2, memory="batch", trust=None, **options)
        differentiate(model, *batch((7, 8), 0))
        optimizer.step()
        made.append([parameter.detach() for parameter in model.parameters()])
    for one_sided in made[1:]:
        for a, b in zip(made[0], one_sided, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("solver", ["eigh", "tracked"])
@pytest.mark.parametrize("options", [{"sides": "input"}, {"sides": "output"}, {"max_size": 32}])
def test_gradients_as_products_give_the_same_steps(options, solver):
    made = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 60, bias=False), nn.Tanh(), nn.Linear(60, 3))
        optimizer = mukron.Shampoo(model, None, LR, damping=1e-2, trust=None, solver=solver, fused=fused, **options)
        for number in range(3):
            optimizer.zero_grad()
            x, y = batch((4, 32), number)
            F.cross_entropy(model(x), y).backward()
            assert (model[0].weight.grad is None) == (fused and number > 0)  # the first pass is looked at
            optimizer.step()
        made.append([parameter.detach() for parameter in model.parameters()])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_float64")
def test_an_embedding_keeps_its_diagonal_over_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 9), nn.Linear(9, 3))
    optimizer = mukron.Shampoo(
        *(model, None, LR), damping=MaxEigenvalue(RHO, floor=0.0), exclude=(), trust=None, max_size=MAX_SIZE
    )
    before, tokens = model[0].weight.detach().clone(), torch.arange(7)
    F.cross_entropy(model(tokens), tokens % 3).backward()
    G = model[0].weight.grad.clone()
    optimizer.step()
    squares = G.square().sum(1, keepdim=True)
    torch.testing.assert_close(before - LR * G / (squares + RHO * squares.max()).sqrt(), model[0].weight.detach())


# The law.


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("scheme", [MUP, uniform("1/4")])
@pytest.mark.parametrize("e", ["1/2", "1/4", "1"])
@pytest.mark.parametrize("sides", ["input", "output"])
def test_the_law_is_that_of_both_sides(sides, e, scheme, role):
    """In width, depth and the number of blocks."""
    both, one = (solve(method, scheme)[role] for method in (shampoo(e), shampoo(e, sides)))
    name = {"input": "R", "output": "L"}[sides]
    assert (one.a, one.b, one.c, one.d) == (both.a, both.b, both.c, {name: both.d[name]})
    assert shampoo(e, sides).in_blocks(4, 2) == shampoo(e).in_blocks(4, 2)


def test_half_the_power_has_another_law():
    """L^(-e/2) G, the step that leaves out one root of two, is that of the exponent e/2."""
    half = solve(shampoo("1/4", "output"))[Role.INPUT]
    assert str(-half.c) == "r_out^3/4 L^1/2"
    assert str(-solve(shampoo(sides="output"))[Role.INPUT].c) == "r_out^1/2"


class Wide(nn.Module):
    """A layer to four times the width and back, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.up = nn.Linear(16, width), nn.Linear(width, 4 * width)
        self.down, self.head = nn.Linear(4 * width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.stem(x).relu()).relu()).relu())


def slopes_of(
    make, base, widths, steps, lr, kind=mukron.Shampoo, **options
) -> tuple[dict[str, float], dict[str, float]]:
    """Exponents of the change of each layer's output, and of what its own weight adds to it without multipliers."""
    changes: dict[str, list[tuple[int, float]]] = {}
    unscaled: dict[str, list[tuple[int, float]]] = {}
    x, y = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 5
    for width, seed in itertools.product(widths, (0, 1)):
        torch.manual_seed(seed)
        model = make(width)
        plan = mukron.parametrize(model, mukron.base_shapes(make, base))
        optimizer = kind(model, plan, lr=lr, **options)
        inputs, before = watched(model, x)
        weights = {name: model.get_submodule(name).weight.detach().clone() for name in before}
        for _ in range(steps):
            differentiate(model, x, y)
            optimizer.step()
        for name, after in watched(model, x)[1].items():
            change = (after - before[name]).square().mean().sqrt().item()
            own = (inputs[name] @ (model.get_submodule(name).weight - weights[name]).mT).square().mean().sqrt().item()
            changes.setdefault(name, []).append((width, change))
            unscaled.setdefault(name, []).append((width, own / optimizer.entries[f"{name}.weight"].scale))
    return tuple(
        {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in measured.items()}
        for measured in (changes, unscaled)
    )


def watched(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and outputs of linear layers, by name."""
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, x, out, name=name: seen.__setitem__(name, (x[0].detach(), out.detach())))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return {name: x for name, (x, _) in seen.items()}, {name: out for name, (_, out) in seen.items()}


@pytest.mark.parametrize("trust", [None, "spectral"])
@pytest.mark.parametrize("sides", ["input", "output"])
def test_features_move_alike_at_every_width(sides, trust):
    """One side at every width; the same steps without the law move like M^-1/2 in the first layer."""
    features, own = slopes_of(
        lambda width: MLP(width, inputs=16, classes=5), 64, (64, 128, 256, 512), 3, 0.01 if trust else 0.0005,
        sides=sides, trust=trust,
    )  # fmt: skip
    features.pop("fc3")  # its change has a part that falls with the width
    assert all(abs(slope) < 0.12 for slope in features.values()), features
    if trust is None:
        assert own["fc1"] == pytest.approx(-0.5, abs=0.12), own
        assert own["fc3"] == pytest.approx(0.5, abs=0.12), own


@pytest.mark.parametrize("trust", [None, "spectral"])
def test_features_move_alike_where_a_side_loses_its_factor_on_the_way(trust):
    """Sides of 4 x 64 and 4 x 128 have a factor, 4 x 256 and 4 x 512 have none; there is nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features, _ = slopes_of(Wide, 64, (64, 128, 256, 512), 3, 0.01 if trust else 0.0005, trust=trust, max_size=512)
    features.pop("head")
    assert all(abs(slope) < 0.12 for slope in features.values()), features


class HalfPower(mukron.Shampoo):
    """What is left of both sides if one of the two roots is left out."""

    def powers_of(self, number):
        return super().powers_of(2)


def test_with_half_the_power_they_do_not():
    features, _ = slopes_of(Wide, 32, (32, 64, 128, 256), 3, 0.001, HalfPower, trust=None, max_size=256)
    assert abs(features["down"]) > 0.3, features


def test_features_move_alike_in_blocks_with_one_side():
    """Blocks of 32 x 16, whose output side is too long: their number grows like the width, and the rates stay put."""

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 5))

    features, own = slopes_of(make, 64, (64, 128, 256, 512), 1, 0.0005, trust=None, block=32, max_size=16)
    assert abs(features["0"]) < 0.12, features
    assert own["0"] == pytest.approx(0.0, abs=0.12)  # unlike the -1/2 of a whole matrix
    assert own["2"] == pytest.approx(1.0, abs=0.12)


@pytest.mark.usefixtures("_float64")
def test_a_block_with_one_side_has_the_step_of_a_layer_that_is_this_block():
    torch.manual_seed(0)
    whole = nn.ModuleDict({"a": nn.Linear(30, 4, bias=False)})
    parts = nn.ModuleDict({str(j): nn.Linear(10, 4, bias=False) for j in range(3)})
    options = {"lr": LR, "trust": None, "max_size": MAX_SIZE}
    ours, theirs = mukron.Shampoo(whole, block=10, **options), mukron.Shampoo(parts, **options)
    for j in range(3):
        parts[str(j)].weight.data.copy_(whole["a"].weight[:, 10 * j : 10 * j + 10])
    for G in torch.randn(3, 4, 30):
        whole["a"].weight.grad = G.clone()
        for j in range(3):
            parts[str(j)].weight.grad = G[:, 10 * j : 10 * j + 10].clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(whole["a"].weight, torch.cat([parts[str(j)].weight for j in range(3)], dim=1))
    assert all(list(sides) == ["L"] for sides in ours.state[whole["a"].weight]["operators"].values())


# Saving, skipped steps, refusals, and what is said.


@pytest.mark.parametrize("trust", [None, "spectral"])
@pytest.mark.parametrize("solver", ["eigh", "newton", "tracked"])
@pytest.mark.parametrize("options", [{"max_size": MAX_SIZE}, {"sides": "input"}, {"max_size": MAX_SIZE, "block": 8}])
def test_it_skips_and_resumes_bit_for_bit(options, solver, trust):
    def make() -> tuple[nn.Module, mukron.Shampoo]:
        torch.manual_seed(0)
        model = mlp()
        return model, mukron.Shampoo(model, solver=solver, trust=trust, memory="ema:0.9", damping=1e-3, **options)

    def step(model, optimizer, seed, factor=1.0):
        x, y = batch((16, 5), seed)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()

    (model, optimizer), (twin, other), (plain, unharmed) = make(), make(), make()
    for seed in range(4):
        step(model, optimizer, seed)
        step(plain, unharmed, seed)
    step(model, optimizer, 9, float("nan"))
    assert optimizer.skipped == 1
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(4, 16):
        step(model, optimizer, seed)
        step(twin, other, seed)
        step(plain, unharmed, seed)
    for a, b, c in zip(model.parameters(), twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("solver", ["eigh", "tracked"])
def test_a_state_of_other_sides_can_be_continued(solver):
    """With the operators that were saved, until the next refresh."""
    choices = ({}, {"max_size": MAX_SIZE}, {"sides": "input"}, {"sides": "output"})
    for before, after in itertools.permutations(choices, 2):
        torch.manual_seed(0)
        model = mlp()
        optimizer, other = (mukron.Shampoo(model, solver=solver, **options) for options in (before, after))
        for number in range(26):
            if number == 13:
                other.load_state_dict(optimizer.state_dict())
                optimizer = other
            optimizer.zero_grad()
            differentiate(model, *batch((16, 5), number))
            optimizer.step()
        assert optimizer.skipped == 0
        held = optimizer.state[model[0].weight]["operators"]["weight"]
        assert tuple(held) == optimizer.factors_of(optimizer.layers["0"], "weight")


def test_a_matrix_without_any_factor_is_refused():
    model = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 3))
    match = r'"0" \[9, 8\]: no side that could have a factor is within max_size=6.*block=6'
    with pytest.raises(ValueError, match=match):
        mukron.Shampoo(model, max_size=6)
    with pytest.raises(ValueError, match=r"is within max_size=6\. Raise max_size$"):
        mukron.Shampoo(model, max_size=6, fused=True)
    with pytest.raises(ValueError, match=r'"1" \[3, 9\]: no side'):
        mukron.Shampoo(model, max_size=8, sides="input")
    mukron.Shampoo(model, max_size=6, block=6)
    mukron.Shampoo(model, max_size=6, exclude=("0",))
    optimizer = mukron.Shampoo(model, max_size=6, params=model[1].parameters())
    with pytest.raises(ValueError, match="no side"):
        optimizer.add_param_group({"params": model[0].parameters()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("sides", ["left", None])
def test_unknown_sides(sides):
    with pytest.raises(ValueError, match=r"unknown sides .* known: 'both', 'input', 'output'"):
        mukron.Shampoo(mlp(), sides=sides)


def test_what_is_said_of_it():
    model = mlp()
    optimizer = mukron.Shampoo(model, max_size=MAX_SIZE)
    text = str(optimizer.plan())
    assert "G R^-1/2, with the learning rates and damping of both sides: 0" in text
    assert "L^-1/2 G, with the learning rates and damping of both sides: 2" in text
    assert "one side" not in str(mukron.Shampoo(model).plan())
    wide = MLP(64, inputs=8)
    plan = mukron.parametrize(wide, mukron.base_shapes(lambda w: MLP(w, inputs=8), 16))
    table = plan.explain("shampoo:1/2,input", whole=True)
    assert "rho_R x" in table.columns
    assert "rho_L x" not in table.columns
    assert "Shampoo (input side)" in table.title
    one_sided = mukron.Shampoo(wide, plan, sides="input")
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        assert row["lr x"] == f"{one_sided.entries[row['parameter']].scale:.4g}", row
    assert spec_of("shampoo:1/2,input").name == "shampoo"
