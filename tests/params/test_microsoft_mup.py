"""The same networks as in Microsoft's mup package: initial weights, learning rates, decay, and so the same training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import BaseShapes, ParametrizationError, base_shapes, parametrize
from mukron.params import mup_base_shapes
from mukron.params.mup_file import read_base_sizes

mup = pytest.importorskip("mup")
BASE, STEPS, LR, DECAY = 16, 6, 2.0**-6, 0.125
OPTIMIZERS = {  # ours and theirs; the tiny eps is that of the limit, see docs/migrating.md
    "sgd": (torch.optim.SGD, mup.MuSGD, {"momentum": 0.9, "weight_decay": DECAY}),
    "adamw": (torch.optim.AdamW, mup.MuAdamW, {"eps": 1e-40, "weight_decay": DECAY}),
}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class MLP(nn.Module):
    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        self.first, self.hidden, self.norm = nn.Linear(12, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.readout = readout(width, 5)

    def forward(self, x):
        return self.readout(self.norm(self.hidden(self.first(x).relu()).relu()))


class CNN(nn.Module):
    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.hidden, self.readout = nn.Conv2d(width, 2 * width, 3, padding=1), readout(2 * width, 5)

    def forward(self, x):
        return self.readout(self.hidden(self.norm(self.first(x)).relu()).relu().mean((2, 3)))


class Transformer(nn.Module):
    """One block with two heads, whose size grows: the logits are divided by it, and not by its root."""

    mukron_roles = {"position": "input"}  # noqa: RUF012

    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        self.token, self.position = nn.Embedding(11, width), nn.Parameter(torch.randn(6, width))
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.readout = readout(width, 11)

    def forward(self, x):
        x = self.token(x) + self.position
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scale = (BASE // 2) ** 0.5 / q.shape[-1]  # that of the base width there: 1 / root
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2))
        return self.readout(x + self.down(self.up(x).relu())).flatten(0, 1)


NETWORKS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer}


def data(name):
    draws = torch.Generator().manual_seed(1)
    if name == "transformer":
        x = torch.randint(11, (8, 6), generator=draws)
        return x, (3 * x + 1).flatten() % 11
    shape = (16, 12) if name == "mlp" else (8, 3, 6, 6)
    return torch.randn(shape, generator=draws), torch.randint(5, shape[:1], generator=draws)


def theirs(name, width):
    make = NETWORKS[name]
    torch.manual_seed(0)
    model = make(width, mup.MuReadout)
    with torch.random.fork_rng():
        mup.set_base_shapes(model, make(BASE, mup.MuReadout), delta=make(2 * BASE, mup.MuReadout))
    return model


def ours(name, width, shapes=None):
    make = NETWORKS[name]
    torch.manual_seed(0)
    model = make(width)
    return model, parametrize(model, shapes or base_shapes(make, width=BASE))


def multiplier(name, width):
    """Of a weight in their forward pass; ours has none, and its weight is what they multiply."""
    return BASE / width if name == "readout.weight" else 1.0


CASES = [(network, width) for network in NETWORKS for width in (32, 80)]


@pytest.mark.parametrize(("network", "width"), CASES)
def test_initial_weights_are_theirs(network, width):
    other, (model, _) = theirs(network, width), ours(network, width)
    for (name, mine), their in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, multiplier(name, width) * their, rtol=1e-12, atol=0.0)
    assert not torch.equal(model.readout.weight, other.readout.weight)


@pytest.mark.parametrize("method", OPTIMIZERS)
@pytest.mark.parametrize(("network", "width"), CASES)
def test_learning_rates_are_theirs(network, width, method):
    """A step of SGD on m W is m^2 times as long as on W, one of AdamW m times; decay takes off the same share."""
    other, (model, plan) = theirs(network, width), ours(network, width)
    power = 2 if method == "sgd" else 1
    given = {p: group for group in OPTIMIZERS[method][1](other.parameters(), lr=LR, weight_decay=DECAY).param_groups
             for p in group["params"]}  # fmt: skip
    mine = {p: group for group in plan.param_groups(method, lr=LR, weight_decay=DECAY) for p in group["params"]}
    rates = {}
    for (name, parameter), their in zip(model.named_parameters(), other.parameters(), strict=True):
        expected = given[their]["lr"] * multiplier(name, width) ** power
        assert mine[parameter]["lr"] == pytest.approx(expected, rel=1e-12), name
        share = given[their]["lr"] * given[their]["weight_decay"]
        assert mine[parameter]["lr"] * mine[parameter]["weight_decay"] == pytest.approx(share, rel=1e-12), name
        rates[name] = mine[parameter]["lr"] / LR
    assert rates["readout.weight"] == pytest.approx(BASE / width)
    assert len(set(rates.values())) > 1


@pytest.mark.parametrize("method", OPTIMIZERS)
@pytest.mark.parametrize(("network", "width"), CASES)
def test_training_is_theirs(network, width, method):
    x, y = data(network)
    other, (model, plan) = theirs(network, width), ours(network, width)
    own, their, options = OPTIMIZERS[method]
    ours_only = {name: value for name, value in options.items() if name in ("weight_decay", "eps")}
    rest = {name: value for name, value in options.items() if name not in ours_only}
    pairs = [
        (model, own(plan.param_groups(method, lr=LR, **ours_only), **rest)),
        (other, their(other.parameters(), lr=LR, **options)),
    ]
    losses = [[], []]
    for _ in range(STEPS):
        for place, (network_, optimizer) in enumerate(pairs):
            optimizer.zero_grad()
            loss = F.cross_entropy(network_(x), y)
            loss.backward()
            optimizer.step()
            losses[place].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert abs(losses[0][-1] - losses[0][0]) > 0.01


# Their files.


def saved(name, path):
    make = NETWORKS[name]
    return mup.make_base_shapes(make(BASE, mup.MuReadout), make(2 * BASE, mup.MuReadout), savefile=str(path))


def test_the_reader_of_other_files_names_the_one_of_theirs(tmp_path):
    saved("mlp", tmp_path / "net.bsh")
    with pytest.raises(ParametrizationError, match=r"mukron.params.mup_base_shapes\(path, model\)"):
        BaseShapes.load(tmp_path / "net.bsh")


@pytest.mark.parametrize(("network", "width"), [*CASES, ("mlp", BASE)])
def test_their_files_say_what_our_base_shapes_do(network, width, tmp_path):
    saved(network, tmp_path / "net.bsh")
    torch.manual_seed(0)
    model = NETWORKS[network](width)
    read = mup_base_shapes(tmp_path / "net.bsh", model)
    read.save(tmp_path / "shapes.json")
    plan = parametrize(model, BaseShapes.load(tmp_path / "shapes.json"))
    other, expected = ours(network, width)
    for (name, mine), their in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-12, atol=0.0)
        assert (plan.parameters[name].role, plan.parameters[name].growth) == (
            expected.parameters[name].role,
            expected.parameters[name].growth,
        )
    for method in ("sgd", "adamw", "kfac"):
        assert plan.scales(method) == expected.scales(method)


def test_their_files_in_other_spellings(tmp_path):
    first = tmp_path / "first.bsh"
    saved("mlp", first)
    sizes = read_base_sizes(first)
    assert sizes["first.weight"] == (BASE, None)
    (tmp_path / "flow.bsh").write_text("---\n" + "".join(
        f"'module.{name}': [{', '.join('null' if size is None else str(size) for size in entry)}]\n"
        for name, entry in sizes.items()
    ))  # fmt: skip
    model = MLP(64)
    assert mup_base_shapes(tmp_path / "flow.bsh", model) == mup_base_shapes(first, model)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no base shapes in this file"),
        ("- 3\n", "line 1: '- 3' is not of a file of base shapes"),
        ("readout.bias: [a]\n", "line 1: .* is not of a file of base shapes"),
        ("other: [null]\n", 'parameter "other" exists in .*bad.bsh but not in this network'),
        ('{"json": 1}\n', "line 1: .* is not of a file of base shapes"),
    ],
)
def test_files_that_are_not_theirs_are_refused(text, said, tmp_path):
    (tmp_path / "bad.bsh").write_text(text)
    with pytest.raises(ParametrizationError, match=said):
        mup_base_shapes(tmp_path / "bad.bsh", MLP(64))
    with pytest.raises(ParametrizationError, match="cannot be read"):
        mup_base_shapes(tmp_path / "none.bsh", MLP(64))


def test_what_would_be_scaled_twice_or_wrongly_is_refused(tmp_path):
    path = tmp_path / "mlp.bsh"
    saved("mlp", path)
    with pytest.raises(ParametrizationError, match='"readout" is a MuReadout, which divides by the width'):
        mup_base_shapes(path, MLP(64, mup.MuReadout))
    with pytest.raises(ParametrizationError, match="build the network anew"):
        mup_base_shapes(path, scaled_by_them(MLP(64)))
    with pytest.raises(ParametrizationError, match=r'"first\.bias", dimension 0: shrinks'):
        mup_base_shapes(path, MLP(8))
    small = MLP(64)
    nn.init.normal_(small.hidden.weight, std=0.02)  # whose std at the base width nobody knows
    nn.init.kaiming_normal_(small.first.weight)
    with pytest.raises(ParametrizationError) as caught:
        mup_base_shapes(path, small)
    assert all(f'parameter "{name}": its initial values at the base' in str(caught.value)
               for name in ("hidden.weight", "first.weight"))  # fmt: skip
    zero = MLP(64)
    nn.init.zeros_(zero.readout.weight)
    assert parametrize(zero, mup_base_shapes(path, zero)).parameters["readout.weight"].std == 0


def scaled_by_them(model):
    mup.set_base_shapes(model, None, do_assert=False)
    return model


class Recurrent(nn.Module):
    def __init__(self, width, readout=nn.Linear):
        super().__init__()
        self.rnn, self.readout = nn.RNN(4, width), readout(width, 3)


def test_layers_that_the_package_leaves_alone_need_a_factory(tmp_path):
    path = str(tmp_path / "rnn.bsh")
    mup.make_base_shapes(Recurrent(16), Recurrent(32), savefile=path)
    with pytest.raises(
        ParametrizationError, match=r'"rnn.weight_hh_l0": .* of a RNN; make base shapes from a function'
    ):
        mup_base_shapes(path, Recurrent(64))
