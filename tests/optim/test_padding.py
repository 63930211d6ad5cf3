"""Targets that the loss ignores have no part in K-FAC's factors: padding changes nothing.

Rows are valid where the loss depends on the output. With n samples that have a valid row at all and V valid rows,

    A = s sum over valid rows of h h^T / n        B = sum over valid rows of delta delta^T / V

and a bias, an input weight whose input is 1 at every valid row, is divided by s V / n. Without padding that is the
factors' usual definition. The loss here is a mean over valid rows, whose scale s is n / V.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mukron import EMA, FOOF, KFAC, Batch

VOCABULARY, WIDTH, CLASSES, SAMPLES, LENGTH = 9, 12, 3, 4, 10
IGNORED = -100


class Tokens(nn.Module):
    """Embedding, a layer, causal attention with one head and no weights of its own, and a head."""

    def __init__(self, flat: bool = False, bias: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layer = nn.Linear(width, width, bias)
        self.head = nn.Linear(width, CLASSES, bias)
        self.flat = flat

    def forward(self, tokens):
        h = torch.tanh(self.layer(self.embedding(tokens)))
        scores = h @ h.mT / h.shape[-1] ** 0.5
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        f = self.head(scores.masked_fill(later, -torch.inf).softmax(-1) @ h)
        return f.flatten(0, 1) if self.flat else f


def network(**options) -> Tokens:
    torch.manual_seed(0)
    return Tokens(**options).double()


def batch(lengths, seed=0, length=LENGTH):
    """Tokens and targets, with a tail of token 0 and ignored targets after each length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), length), generator=generator)
    targets = torch.randint(CLASSES, (len(lengths), length), generator=generator)
    padding = torch.arange(length) >= torch.tensor(lengths)[:, None]
    return tokens.masked_fill(padding, 0), targets.masked_fill(padding, IGNORED)


def loss_of(f, targets):
    return F.cross_entropy(f.reshape(-1, CLASSES), targets.flatten(), ignore_index=IGNORED)


def optimizer_of(model, method=KFAC, lr=1.0, **options):
    dims = {} if method is FOOF or model.flat else {"class_dim": -1}
    return method(model, lr=lr, damping=0.1, **dims, **{"trust": None, **options})


def change(batches, method=KFAC, model=None, **options):
    """The change of every parameter at the last step; weights are put back before each."""
    model = network() if model is None else copy.deepcopy(model)
    start = copy.deepcopy(model.state_dict())
    optimizer = optimizer_of(model, method, **options)
    for tokens, targets in batches:
        model.load_state_dict(start)
        optimizer.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()
    assert optimizer.skipped == 0
    return {name: value - start[name] for name, value in model.state_dict().items()}


def assert_close(ours, theirs, tolerance=1e-4):
    for name, move in theirs.items():
        assert move.norm() > 0, name
        error = float((ours[name] - move).norm() / move.norm())
        assert error < tolerance, f"{name}: {error:.3g}"


def cut(tokens_and_targets, length):
    tokens, targets = tokens_and_targets
    return tokens[:, :length], targets[:, :length]


LENGTHS = {"0%": 10, "50%": 5, "90%": 1}
OPTIONS = {
    "auto": {},
    "rows": {"form": "rows"},
    "matrix": {"form": "matrix"},
    "fused": {"fused": True},
    "ema": {"memory": EMA(0.9)},
    "reduce": {"sharing": "reduce"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_padding_changes_nothing(fisher, length, options):
    """Sequences of one valid length: the step is that of the batch with the padding cut off."""
    batches = [batch([length] * SAMPLES, seed) for seed in range(3 if "memory" in options else 1)]
    padded = change(batches, fisher=fisher, **options)
    assert_close(padded, change([cut(each, length) for each in batches], fisher=fisher, **options))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"memory": EMA(0.9)}], ids=["auto", "fused", "ema"])
def test_foof_too(options):
    batches = [batch([5] * SAMPLES, seed) for seed in range(2)]
    padded = change(batches, FOOF, **options)
    assert_close(padded, change([cut(each, 5) for each in batches], FOOF, **options))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("memory", [Batch(), EMA(0.9)], ids=["batch", "ema"])
def test_padding_that_differs_from_batch_to_batch(memory, fisher):
    lengths = (10, 4, 7)
    batches = [batch([length] * SAMPLES, seed) for seed, length in enumerate(lengths)]
    whole = [cut(each, length) for each, length in zip(batches, lengths, strict=True)]
    assert_close(change(batches, fisher=fisher, memory=memory), change(whole, fisher=fisher, memory=memory))


@pytest.mark.filterwarnings("ignore:the model's output has .* rows")  # with exact Fisher, which has a test of its own
@pytest.mark.parametrize("options", [{}, {"form": "matrix"}, {"fused": True}], ids=["auto", "matrix", "fused"])
@pytest.mark.parametrize("length", [5, 1])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_flattened_logits(fisher, length, options):
    """Every position is a sample of its own then, and padding is samples that are ignored."""
    padded = batch([length] * SAMPLES)
    model = network(flat=True)
    ours = change([padded], model=model, fisher=fisher, **options)
    assert_close(ours, change([cut(padded, length)], model=model, fisher=fisher, **options))


@pytest.mark.filterwarnings("ignore:the model's output has .* rows")  # as above
@pytest.mark.parametrize("flat", [False, True], ids=["positions", "flattened"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_samples_that_are_ignored_as_a_whole(fisher, flat):
    tokens, targets = batch([LENGTH] * SAMPLES)
    ignored = targets.clone()
    ignored[1:3] = IGNORED
    kept = [0, 3]
    model = network(flat=flat)
    ours = change([(tokens, ignored)], model=model, fisher=fisher)
    assert_close(ours, change([(tokens[kept], targets[kept])], model=model, fisher=fisher))


def reference(model, tokens, targets, fisher, rho=0.1):
    """The step by the definition at the top, dense, with autograd alone."""
    model = copy.deepcopy(model)
    valid = targets != IGNORED
    n, V = int(valid.any(1).sum()), int(valid.sum())
    seen = {}
    layers = {"embedding": model.embedding, "layer": model.layer, "head": model.head}
    for name, module in layers.items():
        module.register_forward_hook(lambda _, i, o, name=name: seen.__setitem__(name, (i[0].detach(), o)))
    f = model(tokens)
    p = f.detach().softmax(-1)
    outputs = [seen[name][1] for name in layers]
    if fisher == "empirical":  # V times the derivatives of the mean loss
        signals = [[V * each for each in torch.autograd.grad(loss_of(f, targets), outputs, retain_graph=True)]]
    else:
        signals = []
        for position in range(tokens.shape[1]):
            for c in range(CLASSES):
                v = torch.zeros_like(p)
                own = F.one_hot(torch.tensor(c), CLASSES) - p[:, position]
                v[:, position] = valid[:, position, None] * p[:, position, c, None].sqrt() * own
                signals.append(torch.autograd.grad(f, outputs, v, retain_graph=True))
    loss_of(f, targets).backward()
    moves = {}
    for index, (name, module) in enumerate(layers.items()):
        h = seen[name][0]
        h = F.one_hot(h, VOCABULARY).double() if name == "embedding" else h
        rows = h[valid]
        A = rows.T @ rows / n
        D = [each[index][valid] for each in signals]
        B = sum(d.T @ d for d in D) / V * (n / V)
        A, B = (M + rho * M.trace() / len(M) * torch.eye(len(M), dtype=M.dtype) for M in (A, B))
        G = module.weight.grad.T if name == "embedding" else module.weight.grad
        step = torch.linalg.solve(B, G) @ torch.linalg.inv(A)
        moves[f"{name}.weight"] = -(step.T if name == "embedding" else step)
        if name != "embedding":
            moves[f"{name}.bias"] = -torch.linalg.solve(B, module.bias.grad) * n / V
    return moves


UNEQUAL = {
    "none": [10] * SAMPLES,
    "equal": [5] * SAMPLES,
    "unequal": [10, 3, 7, 1],
    "some samples ignored": [10, 0, 7, 1],
    "long tails": [1, 1, 2, 1],
}


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_the_definition_agrees_with_cutting(fisher):
    """The reference itself: padding cut off, and ignored samples left out."""
    model = network()
    padded = batch([5] * SAMPLES)
    assert_close(reference(model, *padded, fisher), change([cut(padded, 5)], model=model, fisher=fisher), 1e-8)
    tokens, targets = batch([LENGTH, 0, LENGTH, LENGTH])
    kept = [0, 2, 3]
    theirs = change([(tokens[kept], targets[kept])], model=model, fisher=fisher)
    assert_close(reference(model, tokens, targets, fisher), theirs, 1e-8)


@pytest.mark.parametrize(
    ("fisher", "form"), [("exact", "auto"), ("exact", "matrix"), ("empirical", "auto"), ("empirical", "rows")]
)
@pytest.mark.parametrize("lengths", UNEQUAL.values(), ids=UNEQUAL)
def test_by_definition(lengths, fisher, form):
    padded = batch(lengths)
    model = network()
    assert_close(change([padded], model=model, fisher=fisher, form=form), reference(model, *padded, fisher))


@pytest.mark.parametrize("lengths", UNEQUAL.values(), ids=UNEQUAL)
def test_fused_is_the_same(lengths):
    padded = batch(lengths)
    assert_close(change([padded], fisher="exact", fused=True), change([padded], fisher="exact"), 1e-8)


def test_targets_ignored_within_a_sequence():
    """Every second position of a model that mixes none: the step of the batch without them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )
    model = model.double()
    tokens, targets = batch([LENGTH] * SAMPLES)
    ignored = targets.clone()
    ignored[:, 1::2] = IGNORED
    for fisher in ("exact", "empirical"):
        moved = []
        for inputs, wanted in ((tokens, ignored), (tokens[:, ::2], targets[:, ::2])):
            other = copy.deepcopy(model)
            optimizer = KFAC(other, lr=1.0, damping=0.1, fisher=fisher, class_dim=-1, trust=None)
            loss_of(other(inputs), wanted).backward()
            optimizer.step()
            moved.append(
                {
                    name: p.detach() - q.detach()
                    for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True)
                }
            )
        assert_close(*moved)


@pytest.mark.parametrize("length", [5, 2])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"memory": EMA(0.9)}], ids=["auto", "fused", "ema"])
def test_drawn_targets_have_no_part_in_padding(options, length):
    """Draws differ: the norms of the steps agree on the average over seeds, to 15%."""
    torch.manual_seed(0)
    padded = batch([length] * 24)
    ratios = []
    sizes = {"padded": {}, "cut": {}}
    for seed in range(8):
        for name, each in (("padded", padded), ("cut", cut(padded, length))):
            moved = change([each], fisher="mc", seed=seed, **options)
            for parameter, move in moved.items():
                sizes[name].setdefault(parameter, []).append(float(move.norm()))
    for parameter, norms in sizes["padded"].items():
        ratios.append(sum(norms) / sum(sizes["cut"][parameter]))
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.15)


@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
def test_without_ignored_targets_nothing_changes(fisher):
    """Bit for bit: with an ``ignore_index`` that no target has, and without one."""
    tokens, targets = batch([LENGTH] * SAMPLES)
    moved = []
    for ignore in ({}, {"ignore_index": -1}):
        model = network().float()
        start = copy.deepcopy(model.state_dict())
        optimizer = optimizer_of(model, fisher=fisher)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), **ignore).backward()
        optimizer.step()
        moved.append({name: value - start[name] for name, value in model.state_dict().items()})
    for name in moved[0]:
        assert torch.equal(moved[0][name], moved[1][name]), name


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"memory": EMA(0.9)}], ids=["auto", "fused", "ema"])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "mc"])
def test_a_batch_without_a_valid_target(fisher, options, loss):
    """torch's mean over no target is not a number and the step is skipped; a sum is zero. Neither moves a weight."""
    tokens, targets = batch([LENGTH] * SAMPLES)
    model = network()
    optimizer = optimizer_of(model, lr=1e-3, fisher=fisher, **options)

    def step(wanted):
        optimizer.zero_grad()
        f = model(tokens).flatten(0, 1)
        total = F.cross_entropy(f, wanted.flatten(), ignore_index=IGNORED, reduction=loss)
        (total if loss == "mean" else total / max(1, int((wanted != IGNORED).sum()))).backward()
        optimizer.step()

    step(targets)
    before = copy.deepcopy(model.state_dict())
    step(torch.full_like(targets, IGNORED))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    step(targets)
    for name, value in model.state_dict().items():
        assert bool(value.isfinite().all()), name
        assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("options", [{"fisher": "exact", "class_dim": -1}, {"fisher": "empirical"}])
def test_parts_of_a_batch_with_the_same_padding_are_counted_in_float64(options):
    """As micro-batches, or as the parts of several ranks; in float32 shares of rows that count round to 1e-7."""
    tokens, targets = batch([6] * 6)
    ends = []
    for parts in (1, 3):
        net = network()
        optimizer = KFAC(net, lr=0.1, exclude=(), **options)
        for x, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            (loss_of(net(x), y) / parts).backward()
        optimizer.step()
        ends.append([parameter.detach() for parameter in net.parameters()])
    for whole, parted in zip(*ends, strict=True):
        torch.testing.assert_close(whole, parted, rtol=1e-12, atol=1e-13)
