"""Matrices in blocks and in parts: the steps of layers that are the blocks, muP's law of their number, and refusals."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.exponents import fit_exponent
from mukron.layers import BlockedLayer, PartedLayer, layer_of
from mukron.models import MLP

BLOCKS = {"shampoo": mukron.Shampoo, "soap": mukron.SOAP}
PARTS = {**BLOCKS, "muon": mukron.Muon}


@pytest.mark.parametrize(("d_out", "d_in"), [(8, 8), (7, 10), (4, 9), (9, 4), (1, 5), (5, 1)])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_cut_matrix_is_put_together_again(d_out, d_in, size):
    torch.manual_seed(0)
    layer = BlockedLayer(layer_of(nn.Linear(d_in, d_out)), size)
    W, b = torch.randn(d_out, d_in), torch.randn(d_out)
    blocks = layer.matrix(W)
    assert max(blocks.shape[1:]) <= size
    assert torch.equal(layer.weight(blocks), W)
    assert torch.equal(layer.values("bias", layer.block("bias", b)), b)
    assert torch.equal(layer.cut("weight", layer.whole("weight", blocks)), blocks)
    torch.testing.assert_close(blocks.square().sum(), W.square().sum())


def test_kernels_with_groups_are_cut_too():
    convolution = nn.Conv2d(8, 12, 3, groups=2)
    layer = BlockedLayer(layer_of(convolution), 5)
    assert layer.groups == 2 * 2 * 8
    assert torch.equal(layer.weight(layer.matrix(convolution.weight)), convolution.weight)


@pytest.mark.parametrize("method", BLOCKS)
def test_a_block_has_the_step_of_a_layer_that_is_this_block(method):
    """A 12 x 8 matrix in blocks of 4 beside six layers of 4 x 4, with the same gradients."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"a": nn.Linear(8, 12, bias=False), "head": nn.Linear(4, 3)})
    places = [*itertools.product(range(3), range(2))]
    parts = nn.ModuleDict({f"{i}{j}": nn.Linear(4, 4, bias=False) for i, j in places} | {"head": nn.Linear(4, 3)})
    start, gradients = torch.randn(12, 8), torch.randn(4, 12, 8)

    def part(X, i, j):
        return X[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].clone()

    options = {"lr": 0.1, "trust": None, "exclude": ("head",)}
    ours, theirs = BLOCKS[method](whole, block=4, **options), BLOCKS[method](parts, **options)
    whole["a"].weight.data.copy_(start)
    for i, j in places:
        parts[f"{i}{j}"].weight.data.copy_(part(start, i, j))
    for G in gradients:
        whole["a"].weight.grad = G.clone()
        for i, j in places:
            parts[f"{i}{j}"].weight.grad = part(G, i, j)
        ours.step()
        theirs.step()
    for i, j in places:
        torch.testing.assert_close(part(whole["a"].weight.detach(), i, j), parts[f"{i}{j}"].weight.detach())


@pytest.mark.parametrize("trust", ["graft:adam", "rms:0.2"])
@pytest.mark.parametrize("method", BLOCKS)
def test_lengths_are_those_of_the_whole_matrix(method, trust):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 12, bias=False), "head": nn.Linear(4, 3)})
    optimizer = BLOCKS[method](model, block=4, lr=1.0, trust=trust, exclude=("head",), momentum=0.0)
    before = model["a"].weight.detach().clone()
    model["a"].weight.grad = torch.randn(12, 8)
    optimizer.step()
    root_mean_square = (before - model["a"].weight.detach()).square().mean().sqrt()
    assert root_mean_square == pytest.approx(1.0 if trust == "graft:adam" else 0.2, rel=1e-3)  # Adam's first: signs


@pytest.mark.parametrize("method", PARTS)
def test_a_part_has_the_step_of_a_layer_of_its_own(method):
    torch.manual_seed(0)
    fused = nn.ModuleDict({"qkv": nn.Linear(8, 24), "head": nn.Linear(8, 3)})
    apart = nn.ModuleDict({**{name: nn.Linear(8, 8) for name in "qkv"}, "head": nn.Linear(8, 3)})
    options = {"lr": 0.1} | ({"precision": "float32"} if method == "muon" else {})
    ours, theirs = PARTS[method](fused, split={"qkv": 3}, **options), PARTS[method](apart, **options)
    for k, name in enumerate("qkv"):
        apart[name].weight.data.copy_(fused["qkv"].weight[8 * k : 8 * k + 8])
        apart[name].bias.data.copy_(fused["qkv"].bias[8 * k : 8 * k + 8])
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        fused["qkv"].weight.grad = torch.randn(24, 8, generator=generator)
        fused["qkv"].bias.grad = torch.randn(24, generator=generator)
        for k, name in enumerate("qkv"):
            apart[name].weight.grad = fused["qkv"].weight.grad[8 * k : 8 * k + 8].clone()
            apart[name].bias.grad = fused["qkv"].bias.grad[8 * k : 8 * k + 8].clone()
        ours.step()
        theirs.step()
    made = torch.cat([apart[name].weight for name in "qkv"])
    torch.testing.assert_close(fused["qkv"].weight, made, rtol=1e-4, atol=1e-5)
    if method != "shampoo":  # whose biases may be shortened as one
        torch.testing.assert_close(fused["qkv"].bias, torch.cat([apart[name].bias for name in "qkv"]))


HEADS, CLASSES = 3, 20  # the number of heads is the same at every width


class Attention(nn.Module):
    """Words to classes by attention, whose projections are one Linear layer, or one for each head of q, k and v.

    Heads are as large as their inputs, and there are many classes: gradients have full rank, so that no eigenbasis of
    theirs is arbitrary.
    """

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(31, width)
        sizes = [3 * HEADS * width] if fused else [width] * 3 * HEADS
        self.qkv = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.out, self.head = nn.Linear(HEADS * width, width), nn.Linear(width, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        rows = torch.cat([layer(x) for layer in self.qkv], -1)  # heads of q, then those of k, then those of v
        q, k, v = rows.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1 / q.shape[-1])
        return self.head(self.out(mixed.transpose(1, 2).flatten(2)).mean(1))


def attentions() -> list[tuple[nn.Module, mukron.Parametrization]]:
    """The fused one and that of single heads, with the same weights in float64, at twice the base width."""
    pairs = []
    for fused in (True, False):
        model = Attention(6, fused).double()
        plan = mukron.parametrize(model, mukron.base_shapes(lambda width, f=fused: Attention(width, f), 3))
        pairs.append((model, plan))
    (whole, _), (apart, _) = pairs
    torch.manual_seed(1)
    for name, values in whole.named_parameters():
        nn.init.normal_(values)
        if not name.startswith("qkv."):
            apart.get_parameter(name).data.copy_(values)
    for kind in ("weight", "bias"):
        for part, layer in zip(whole.get_parameter(f"qkv.0.{kind}").split(6), apart.qkv, strict=True):
            layer.get_parameter(kind).data.copy_(part)
    return pairs


@pytest.mark.parametrize("trust", [None, "spectral:0.1", "kl:1e-4"])  # lengths of grafts are those of the whole weight
@pytest.mark.parametrize("cut", [{}, {"block": 4}], ids=str)
@pytest.mark.parametrize("method", PARTS)
def test_a_split_by_heads_has_the_steps_of_heads_that_are_layers(method, cut, trust):
    options = {"lr": 0.02, "weight_decay": 0.1, "exclude": ("head", "words", "out"), "fallback": "adamw"}
    if method == "muon":
        if cut or trust:
            pytest.skip("Muon has neither blocks nor a trust")
        options["precision"] = "float32"  # and float64 for weights of float64
    else:
        options |= {"trust": trust, "inverse_every": 2, **cut}
    (whole, plan), (apart, plan_apart) = attentions()
    ours = PARTS[method](whole, plan, split={"qkv.0": 3 * HEADS}, **options)
    theirs = PARTS[method](apart, plan_apart, **options)
    assert ours.layers["qkv.0"].layer.groups >= 3 * HEADS
    start = whole.qkv[0].weight.detach().clone()
    for seed in range(6):
        words = torch.randint(31, (64, 4), generator=torch.Generator().manual_seed(seed))
        for model, optimizer in ((whole, ours), (apart, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(model(words), words[:, 0] % CLASSES).backward()
            optimizer.step()
    assert (whole.qkv[0].weight - start).abs().max() > 0.003
    made = torch.cat([layer.weight for layer in apart.qkv])
    torch.testing.assert_close(whole.qkv[0].weight, made, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(whole.out.weight, apart.out.weight, rtol=1e-7, atol=1e-7)


class Heads(nn.Module):
    """Words to classes by attention with heads of 8, whose number grows with the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.qkv = nn.Embedding(12, width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in self.qkv(self.words(words)).chunk(3, -1))
        return self.head(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("cut", [{}, {"block": 16}], ids=str)
@pytest.mark.parametrize("method", PARTS)
def test_heads_whose_number_grows_follow_the_law_of_blocks(method, cut):
    """And with their number, which differs from width to width, they do not."""
    if method == "muon" and cut:
        pytest.skip("Muon has no blocks")
    words = torch.randint(12, (6, 7), generator=torch.Generator().manual_seed(7))
    changes: dict[str, list[tuple[int, float]]] = {"rows": [], "number": []}
    for width, seed in itertools.product((32, 64, 128, 256), (0, 1)):
        for kind, split in (("rows", "rows:8"), ("number", 3 * width // 8)):
            torch.manual_seed(seed)
            model = Heads(width)
            plan = mukron.parametrize(model, mukron.base_shapes(Heads, 32))
            options = {} if method == "muon" else {"trust": None, **cut}
            optimizer = PARTS[method](model, plan, lr=0.001, split={"qkv": split}, **options)
            with torch.no_grad():
                x = model.words(words)
                before = model.qkv(x)
            F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            optimizer.step()
            with torch.no_grad():
                changes[kind].append((width, (model.qkv(x) - before).square().mean().sqrt().item()))
            if kind == "rows":
                more_inputs = width / 32 if cut else 1.0
                assert optimizer.rate("qkv.weight") == pytest.approx(0.001 * (width / 32 * more_inputs) ** -0.5)
    slopes = {kind: fit_exponent(*zip(*pairs, strict=True)).slope for kind, pairs in changes.items()}
    assert abs(slopes["rows"]) < 0.12, slopes
    assert slopes["number"] > 0.4, slopes


def test_parts_that_the_base_width_does_not_have_are_refused():
    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3 * width), nn.Linear(3 * width, 4))

    plan = mukron.parametrize(model := make(32), mukron.base_shapes(make, 4))
    with pytest.raises(ValueError, match=r'12 outputs at the base width, .* no 24 equal parts\. .*each has: "rows:4"'):
        mukron.Muon(model, plan, split={"1": 24})
    with pytest.raises(ValueError, match=r"12 outputs at the base width, which are no 32 equal parts\. .*rows:3"):
        mukron.Muon(model, plan, split={"1": 32})
    with pytest.raises(ValueError, match="12 outputs at the base width, which are no parts of 8 rows"):
        mukron.Muon(model, plan, split={"1": "rows:8"})
    assert mukron.Muon(model, plan, split={"1": "rows:4"}).layers["1"].layer.groups == 24


def test_the_bound_is_on_the_whole_matrix():
    """Blocks of one direction add up: each within a bound of its own, they would exceed it together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 3))
    optimizer = mukron.Shampoo(model, lr=1.0, block=16, exclude=("1",))
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.outer(torch.randn(64), torch.randn(64))
    optimizer.step()
    moved = torch.linalg.matrix_norm(before - model[0].weight.detach(), 2)
    assert 0.9 < moved < 1.05


@pytest.mark.parametrize("trust", [None, "spectral"])
@pytest.mark.parametrize("method", BLOCKS)
def test_features_move_alike_at_every_width(method, trust):
    """Blocks of 32, so that there are 2 x 2 of them at the base width and 16 x 16 at eight times that."""
    changes: dict[str, list[tuple[int, float]]] = {}
    unscaled: dict[str, list[tuple[int, float]]] = {}
    x, y = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10
    for width, seed in itertools.product((64, 128, 256, 512), (0, 1)):
        torch.manual_seed(seed)
        model = MLP(width, inputs=32)
        plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=32), 64))
        lr = 0.01 if trust else 0.0005
        optimizer = BLOCKS[method](model, plan, lr=lr, block=32, trust=trust)
        before = features(model, x)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for name, after in features(model, x).items():
            change = (after - before[name]).square().mean().sqrt().item()
            changes.setdefault(name, []).append((width, change))
            law = optimizer.entries[f"{name}.weight"].scale / plan.scales(method)[f"{name}.weight"].lr
            unscaled.setdefault(name, []).append((width, law))
    slopes = {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in changes.items()}
    assert all(abs(slope) < 0.12 for slope in slopes.values()), slopes
    laws = {name: fit_exponent(*zip(*pairs, strict=True)).slope for name, pairs in unscaled.items()}
    assert laws == pytest.approx({"fc1": -0.5, "fc2": -1.0}, abs=1e-6)


def features(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        first = model.fc1(x)
        return {"fc1": first, "fc2": model.fc2(first.relu())}


@pytest.mark.parametrize("method", BLOCKS)
def test_blocks_skip_and_resume(method):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 3))

    def step(model, optimizer, seed, factor=1.0):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        x, y = torch.randn(16, 10, generator=generator), torch.randint(3, (16,), generator=generator)
        (F.cross_entropy(model(x), y) * factor).backward()
        optimizer.step()

    model, twin = make(), make()
    optimizer, other = (BLOCKS[method](one, block=4, split={"0": 2}) for one in (model, twin))
    for seed in range(4):
        step(model, optimizer, seed)
    step(model, optimizer, 9, float("nan"))
    assert optimizer.skipped == 1
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(4, 16):
        step(model, optimizer, seed)
        step(twin, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with pytest.raises(ValueError, match="saved with block=4, and this optimizer has block=None"):
        BLOCKS[method](make()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": 0}, ValueError, "block must be at least 1"),
        ({"block": 2.5}, TypeError, "block"),
        ({"split": {"0": 5}}, ValueError, '"0" has 14 outputs, which are no 5 equal parts'),
        ({"split": {"qkv": 3}}, ValueError, 'no layer that is preconditioned is called "qkv"'),
        ({"split": {"0": 0}}, ValueError, "must be at least 1"),
        ({"split": {"0": "rows:0"}}, ValueError, "the rows of a part as \"rows:64\"; got 'rows:0'"),
        ({"split": {"0": "heads"}}, ValueError, "the rows of a part"),
        ({"split": {"0": "rows:5"}}, ValueError, '"0" has 14 outputs, which are no parts of 5 rows'),
        ({"split": 3}, TypeError, "split takes numbers by layer"),
        ({"block": 4, "fused": True}, ValueError, "cannot be cut"),
    ],
)
def test_misuse(options, error, message):
    with pytest.raises(error, match=message):
        mukron.Shampoo(nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 3)), **options)


def test_blocks_are_part_of_a_run():
    from mukron.train import RunConfig

    for part in (3, "rows:64"):
        run = RunConfig(method="shampoo", method_options={"block": 256, "split": {"qkv": part}})
        assert run.spec.keywords(run) == {"momentum": 0.9, "block": 256, "split": {"qkv": part}}
        assert RunConfig.from_dict(run.to_dict()) == run
    with pytest.raises(ValueError, match="the rows of a part"):
        RunConfig(method="shampoo", method_options={"split": {"qkv": "64"}})


def test_what_a_split_is_of():
    assert PartedLayer(layer_of(nn.Linear(4, 6)), 3).groups == 3


def test_a_side_that_loses_its_factor_between_two_widths_is_named():
    model = MLP(64, inputs=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=8), 16))
    with pytest.warns(UserWarning, match=r'"fc1" \[64, 8\], "fc2" \[64, 64\].*longer than max_size=32'):
        mukron.SOAP(model, plan, max_size=32)
    mukron.SOAP(model, plan, max_size=32, block=32)  # no warning
    with pytest.warns(UserWarning, match="a side is longer than max_size=8 and keeps its own coordinates"):
        mukron.SOAP(model, plan, max_size=8)  # too long at the base width as well: Adam's law, not SOAP's
    mukron.SOAP(model, plan)


def test_the_number_of_blocks_is_exact():
    """17 / (17 / 7) is more than 7 in floating point."""
    model = MLP(17, inputs=8)
    plan = mukron.parametrize(model, mukron.base_shapes(lambda w: MLP(w, inputs=8), 7))
    assert mukron.Shampoo(model, plan, block=7).entries["fc2.weight"].scale == pytest.approx(1 / 3)


@pytest.mark.parametrize("block", [None, 4])
def test_growing_groups_are_refused_with_blocks_too(block):
    def make(width):
        grouped = nn.Conv2d(width, width, 3, groups=width // 2)
        return nn.Sequential(nn.Conv2d(3, width, 3), grouped, nn.Flatten(), nn.Linear(width, 3))

    plan = mukron.parametrize(model := make(16), mukron.base_shapes(make, width=8))
    with pytest.raises(ValueError, match="8 groups, and their number grows"):
        mukron.Shampoo(model, plan, block=block)


def test_a_block_without_gradient_does_not_change_units():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 3))
    optimizer = mukron.Shampoo(model, block=8, exclude=("1",))
    for power in range(6):
        G = torch.randn(8, 16) * 10.0**-power
        G[:, 8:] = 0
        model[0].weight.grad = G
        optimizer.step()
    assert optimizer.state[model[0].weight].get("units") is None


@pytest.mark.parametrize(
    ("split", "message"),
    [({"attention": 3}, "no layer that is preconditioned"), ({"in_proj_weight": 3}, "taken as 3 matrices already")],
)
def test_what_cannot_be_split(split, message):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3)})
    with pytest.raises(ValueError, match=message):
        mukron.Shampoo(model, split=split)


@pytest.mark.parametrize("split", [{"qkv": 3, "first.qkv": 6}, {"first.qkv": 6, "qkv": 3}], ids=str)
def test_of_several_names_that_fit_the_longest_counts(split):
    names = ("first", "second")
    model = nn.ModuleDict({name: nn.ModuleDict({"qkv": nn.Linear(8, 24)}) for name in names})
    optimizer = mukron.Shampoo(model, split=split)
    assert [optimizer.layers[f"{name}.qkv"].layer.groups for name in names] == [6, 3]
