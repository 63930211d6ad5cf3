"""Muon: torch's own steps, a float64 reference, muP's law, and what is left to the fallback rule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from matrix_methods import batch, flat, network, outputs_of, train
from states import contents
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.linalg import orthogonalized
from mukron.models import CNN, GPT, MLP

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def reference(G: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """The Newton-Schulz iteration on singular values, by a decomposition in float64."""
    U, s, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(rounds):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag_embed(s) @ Vh


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 40, 16), (2, 16, 40), (1, 1, 8)])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_orthogonalized_is_the_iteration_on_singular_values(shape, scale):
    torch.manual_seed(0)
    G = torch.randn(shape)
    made = orthogonalized(G * scale, eps=1e-30, dtype=None)
    torch.testing.assert_close(made.double(), reference(G), rtol=1e-4, atol=1e-5)
    values = torch.linalg.svdvals(made)
    assert 0.65 < values.min() <= values.max() < 1.25
    assert orthogonalized(torch.zeros(shape), eps=1e-7).eq(0).all()


def float32_products(grad: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """What torch does in bfloat16, in float64."""
    assert coefficients == COEFFICIENTS
    assert eps == pytest.approx(1e-7, rel=1)  # scaled for the first layer
    return reference(grad, steps).to(grad.dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_steps_are_torchs(nesterov, decay, adjust, monkeypatch):
    """Both with exact products: bfloat16's rounding alone moves directions without signal by several percent."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float32_products)
    ours, theirs = network().double(), network().double()
    options = {"lr": 0.02, "nesterov": nesterov, "weight_decay": decay, "adjust_lr_fn": adjust}
    train(ours, mukron.Muon(ours, precision="float32", exclude=(), **options), 10, torch.float64)
    train(theirs, torch.optim.Muon(theirs.parameters(), momentum=0.95, **options), 10, torch.float64)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_groups_for_torchs_muon_correct_for_what_it_scales_itself(adjust, monkeypatch):
    """At four times the base width, torch's own Muon with our groups takes our Muon's steps."""
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", float32_products)

    def make(width: int) -> nn.Module:
        sizes = ((32, width), (width, 2 * width), (2 * width, width), (width, 10))
        layers = [part for sides in sizes for part in (nn.Linear(*sides), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).double()

    models, options = [], {"weight_decay": 0.1}
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make(32))
    ours, theirs = models
    plans = [mukron.parametrize(model, mukron.base_shapes(make, width=8)) for model in models]
    muon = mukron.Muon(ours, plans[0], lr=0.02, fallback_lr=0.001, precision="float32", adjust_lr_fn=adjust, **options)
    groups = plans[1].param_groups("muon", lr=0.02, scaling=adjust, **options)
    others = plans[1].param_groups("adamw", lr=0.001, weight_decay=0.1, beside="muon")
    listed = [parameter for group in groups + others for parameter in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in theirs.parameters()}
    assert len(listed) == len(list(theirs.parameters()))
    optimizers = [torch.optim.Muon(groups, adjust_lr_fn=adjust), torch.optim.AdamW(others)]
    train(ours, muon, 6, torch.float64)
    for step in range(6):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(theirs(x.double()), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_groups_that_do_not_exist_are_refused():
    model = MLP(32, inputs=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda width: MLP(width, inputs=8), width=16))
    with pytest.raises(ValueError, match=r"unknown scaling 'moonlight'; known: 'original', .*'spectral_norm', 'none'"):
        plan.param_groups("muon", lr=0.1, scaling="moonlight")
    with pytest.raises(ValueError, match=r"unknown adjust_lr_fn 'none'; known: 'original', 'match_rms_adamw'$"):
        mukron.Muon(model, plan, adjust_lr_fn="none")
    for method, beside in (("adamw", "adamw"), ("muon", "muon")):
        with pytest.raises(ValueError, match=f"beside='{beside}'"):
            plan.param_groups(method, lr=0.1, beside=beside)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_in_bfloat16_it_is_as_near_to_torch_as_torch_is_to_exact_products():
    start = [parameter.detach().clone() for parameter in network().parameters()]
    ends = {}
    for name in ("ours", "theirs", "exact"):
        model = network()
        optimizer: torch.optim.Optimizer = (
            torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.0)
            if name == "theirs"
            else mukron.Muon(model, lr=0.02, precision="bfloat16" if name == "ours" else "float32", exclude=())
        )
        train(model, optimizer, 5)
        ends[name] = list(model.parameters())
    for before, ours, theirs, exact in zip(start, ends["ours"], ends["theirs"], ends["exact"], strict=True):
        moved = (exact - before).norm()
        assert (ours - theirs).norm() < 1.5 * (theirs - exact).norm() + 1e-3 * moved
        assert (ours - exact).norm() < 0.15 * moved


def test_layers_of_one_shape_are_one_stack(monkeypatch):
    sizes = []

    def counted(G, *arguments):
        sizes.append(tuple(G.shape))
        return orthogonalized(G, *arguments)

    monkeypatch.setattr("mukron.optim.muon.orthogonalized", counted)
    model = network()
    train(model, mukron.Muon(model, lr=0.02), 1)
    assert sizes == [(1, 64, 32), (2, 64, 64)]  # the last layer is Adam's


def test_a_stack_takes_the_steps_of_its_layers():
    together, alone = network().double(), network().double()
    train(together, mukron.Muon(together, lr=0.02, precision="float32"), 5, torch.float64)
    optimizer = mukron.Muon(alone, lr=0.02, precision="float32")
    optimizer.in_stacks = False
    train(alone, optimizer, 5, torch.float64)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_what_is_left_to_adam():
    model = GPT(32, depth=2, vocabulary=20, context=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda w: GPT(w, depth=2, vocabulary=20, context=8), 16))
    optimizer = mukron.Muon(model, plan)
    assert {name.split(".")[0] for name in optimizer.layers} == {"blocks"}
    assert len(optimizer.layers) == 12
    assert optimizer.param_groups[0]["fallback_lr"] == pytest.approx(0.005)
    table = plan.explain("muon", whole=True)
    for row in (dict(zip(table.columns, row, strict=True)) for row in table.rows):
        entry = optimizer.entries[row["parameter"]]
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, row
        assert row["lr x"] == f"{entry.scale:.4g}"
    assert "Every singular value of a layer's move is near s, times" in table.text(width=None)
    assert "s = max(1, d_out / d_in)^1/2" in table.text(width=None)
    assert "tokens.weight" in str(optimizer.plan(whole=True))


def test_biases_and_the_last_layer_are_adams_without_a_plan():
    optimizer = mukron.Muon(MLP(16, inputs=8))
    taken = {name for name, entry in optimizer.entries.items() if entry.preconditioned}
    assert taken == {"fc1.weight", "fc2.weight"}
    everything = mukron.Muon(MLP(16, inputs=8), exclude=())
    assert {name for name, entry in everything.entries.items() if entry.preconditioned} == {*taken, "fc3.weight"}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_features_move_alike_at_every_width(adjust):
    """The change of every layer's output by one step, over widths 64 to 1024."""
    widths, changes = (64, 128, 256, 512, 1024), {}
    x, y = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 10
    for width in widths:
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = MLP(width, inputs=32)
            plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=32), 64))
            optimizer = mukron.Muon(model, plan, lr=0.002, adjust_lr_fn=adjust)
            before = outputs_of(model, x)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            for name, after in outputs_of(model, x).items():
                change = (after - before[name]).square().mean().sqrt().item()
                changes.setdefault(name, []).append((width, change))
    for name, pairs in changes.items():
        if name != "fc3":  # its change has a part that falls with the width
            assert abs(fit_exponent(*zip(*pairs, strict=True)).slope) < 0.12, name


def test_a_convolution_is_a_matrix_of_its_channels():
    torch.manual_seed(0)
    model = CNN(8)
    optimizer = mukron.Muon(model, lr=0.1, momentum=0.0, precision="float32")
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    before = convolution.weight.detach().clone()
    model(torch.randn(8, convolution.in_channels, 28, 28)).square().mean().backward()
    G = convolution.weight.grad.flatten(1)
    optimizer.step()
    expected = reference(G) * max(1, G.shape[0] / G.shape[1]) ** 0.5
    moved = ((before - convolution.weight) / 0.1).flatten(1)
    torch.testing.assert_close(moved.double(), expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_leaves_no_trace(bad):
    model = network()
    optimizer = mukron.Muon(model, lr=0.02, weight_decay=0.1)
    train(model, optimizer, 3)
    state = (copy.deepcopy(model.state_dict()), contents(optimizer)["state"])
    optimizer.zero_grad()
    x, y = batch(9)
    F.cross_entropy(model(x * bad), y).backward()
    optimizer.step()
    assert optimizer.skipped == 1
    after = (model.state_dict(), contents(optimizer)["state"])
    for a, b in zip(flat(state), flat(after), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_it_resumes_bit_for_bit():
    whole, half = network(), network()
    optimizer = mukron.Muon(whole, lr=0.02)
    train(whole, optimizer, 3)
    first = mukron.Muon(half, lr=0.02)
    train(half, first, 3)
    resumed = network(1)
    resumed.load_state_dict(half.state_dict())
    second = mukron.Muon(resumed, lr=0.02)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(whole, optimizer, 3)
    train(resumed, second, 3)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "rounds must be at least 1"),
        ({"eps": 0.0}, ValueError, "eps above 0"),
        ({"precision": "fp8"}, ValueError, "unknown precision 'fp8'"),
        ({"adjust_lr_fn": "none"}, ValueError, "unknown adjust_lr_fn 'none'"),
        ({"trust": "spectral"}, TypeError, "trust would have no effect"),
        ({"damping": 1.0}, TypeError, "damping would have no effect"),
        ({"momentum": mukron.HeavyBall(0.9)}, TypeError, "momentum is on the gradient here"),
        ({"momentum": 1.0}, ValueError, r"\[0, 1\)"),
        ({"nesterov": "no"}, TypeError, "nesterov"),
        ({"ns_steps": 5}, TypeError, "no argument 'ns_steps'"),
    ],
)
def test_misuse(options, error, message):
    with pytest.raises(error, match=message):
        mukron.Muon(network(), **options)


def test_a_gradient_of_zeros_is_a_gradient():
    """Momentum and decay go on, as they do in torch's."""
    ours = network()
    optimizer = mukron.Muon(ours, lr=0.02, weight_decay=0.1, exclude=())
    train(ours, optimizer, 2)
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    for parameter, old in zip(ours.parameters(), before, strict=True):
        assert (parameter - old).norm() > 0.01
    assert "no factors" in str(optimizer.plan())
    assert "sample space" not in str(optimizer.plan())  # what is said of factors is of no use here


def test_what_has_only_an_output_layer_is_told_so():
    with pytest.raises(ValueError, match=r"output layers are left to the fallback rule; exclude=\(\) includes them"):
        mukron.Muon(nn.Linear(8, 3))


def test_scales_of_biases_are_the_fallback_rules():
    model = MLP(32, inputs=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda width: MLP(width, inputs=8), width=16))
    optimizer = mukron.Muon(model, plan)
    scales = plan.scales("muon")
    assert all(scales[name].lr == entry.scale for name, entry in optimizer.entries.items() if name != "fc3.weight")


def test_groups_have_momenta_of_their_own():
    model = network()
    layers = [module for module in model if isinstance(module, nn.Linear)]
    groups = [{"params": layers[0].parameters(), "momentum": 0.5}, {"params": layers[1].parameters()}]
    optimizer = mukron.Muon(model, params=groups, exclude=())
    assert [(g["momentum"], g["momentum_on"], g["nesterov"]) for g in optimizer.param_groups] == [
        (0.5, "gradient", True),
        (0.95, "gradient", True),
    ]


def test_it_trains_a_gpt_from_a_run_config():
    from mukron.train import RunConfig
    from mukron.train import train as train_run

    small = {"model_options": {"depth": 1}, "samples": 64, "epochs": 8, "batch": 16}
    config = RunConfig(model="gpt", width=32, method="muon", lr=0.05, **small)
    run = train_run(config)
    assert run.epochs[-1]["train_loss"] < 0.8 * run.epochs[0]["train_loss"]
    assert math.isfinite(run.epochs[-1]["test_loss"])


def test_a_tied_bias_leaves_its_weights_to_muon():
    class Tied(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, width)
            self.c.bias, self.head = self.b.bias, nn.Linear(width, 3)

        def forward(self, x):
            return self.head(self.c(self.b(self.a(x).tanh()).tanh()).tanh())

    model = Tied(32)
    plan = mukron.parametrize(model, mukron.base_shapes(Tied, width=16))
    optimizer = mukron.Muon(model, plan)
    assert list(optimizer.layers) == ["a", "b", "c"]
    assert sum(len(group["params"]) for group in plan.param_groups("muon", lr=0.1)) == 3
    rows = {row[0]: row[-1] for row in plan.explain("muon", whole=True).rows}
    assert {name for name, why in rows.items() if not why.startswith("not preconditioned")} == {
        *("a.weight", "b.weight", "c.weight"),
    }


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_under_sp_it_is_muon_without_a_plan(adjust):
    def make(width: int) -> nn.Module:
        sizes = ((16, width), (width, width), (width, 3))
        return nn.Sequential(*(part for sides in sizes for part in (nn.Linear(*sides), nn.Tanh())))[:-1]

    ends = []
    for planned in (True, False):
        torch.manual_seed(0)
        model = make(64)
        plan = mukron.parametrize(model, mukron.base_shapes(make, width=8), scheme="sp") if planned else None
        optimizer = mukron.Muon(model, plan, adjust_lr_fn=adjust)
        F.cross_entropy(
            model(torch.randn(32, 16, generator=torch.Generator().manual_seed(1))), torch.arange(32) % 3
        ).backward()
        optimizer.step()
        ends.append(list(model.parameters()))
        if planned:
            factors = {group["lr"] for group in plan.param_groups("muon", lr=0.1, scaling=adjust)}
            assert factors == {0.1}
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def test_a_stack_has_one_eps():
    """A square layer before residual blocks has the shape of theirs, but not their factor of the depth."""

    class Deep(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.factor = nn.Linear(width, width), 2 / depth
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
            self.head = nn.Linear(width, 3)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + self.factor * block(x).tanh()
            return self.head(x)

    ends = []
    for stacked in (True, False):
        torch.manual_seed(0)
        model = Deep(16, 8)
        plan = mukron.parametrize(model, mukron.base_shapes(Deep, width=16, depth=2))
        optimizer = mukron.Muon(model, plan, eps=1.0, precision="float32")
        optimizer.in_stacks = stacked
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        optimizer.step()
        ends.append(list(model.parameters()))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b)
