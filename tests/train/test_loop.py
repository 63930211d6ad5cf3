"""Training itself: that it learns, that it repeats, that it ends well when it goes wrong, and what it records."""

from __future__ import annotations

import random
import re
import shutil
import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from mukron.data import Dataset, Split, load
from mukron.linalg import FactorizationError, MatrixFactor, RowsFactor
from mukron.optim.direction import base_rate
from mukron.train import RunConfig, RunError, build, train
from mukron.train.order import batches

DIGITS = load("digits")
SMALL = RunConfig(width=64, base_width=16, batch=128, epochs=2, lr=0.002, samples=512, test_samples=100)


def numbers(run):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in run.epochs]


def weights_at_the_end(config, **options):
    kept = {}

    def keep(moment):
        kept.update({name: value.clone() for name, value in moment.built.model.state_dict().items()})
        return {}

    return train(config, dataset=DIGITS, observe=[keep], **options), kept


@pytest.mark.parametrize(
    ("method", "rates", "options"),  # rates: for cross-entropy and for mse
    [
        ("sgd", (0.1, 0.1), {"nesterov": True}),
        ("adamw", (0.01, 0.01), {}),
        ("kfac", (0.1, 0.1), {}),
        ("foof", (0.2, 0.2), {}),
        ("shampoo", (0.1, 0.1), {}),
        ("gauss-newton", (0.05, 0.05), {}),
        ("kfac", (0.002, 0.03), {"memory": "ema:0.95", "trust": "none"}),
        ("kfac", (0.002, 0.002), {"fisher": "empirical", "inverse_every": 2, "trust": "none"}),
        ("foof", (0.1, 0.1), {"trust": "none"}),
        ("shampoo", (0.05, 0.05), {"trust": "none"}),
        ("shampoo:1/4", (0.05, 0.05), {"trust": "none"}),
        ("gauss-newton", (0.001, 0.01), {"trust": "none"}),
    ],
)
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_every_method_learns(method, rates, options, loss):
    lr = rates[loss == "mse"]
    config = SMALL.replace(method=method, lr=lr, loss=loss, method_options=options, batch=64)
    run = train(config, dataset=DIGITS)
    assert run.status == "finished"
    first, last = run.epochs
    untrained = 0.45 if loss == "mse" else np.log(10)  # half the squares of one-hot minus 1/10; all classes alike
    assert last["train_loss"] < 0.8 * untrained
    assert last["train_loss"] < first["train_loss"]
    assert last["test_loss"] < first["test_loss"]
    assert last["test_accuracy"] > 0.5


def test_a_run_is_the_loop_that_a_user_would_write():
    """SGD, whole batches, no records: the same numbers from a plain loop."""
    config = SMALL.replace(method="sgd", lr=0.1, batch=None, clip_norm=0.05, schedule="linear", weight_decay=0.01)
    run, ours = weights_at_the_end(config)
    data = DIGITS.subset(512, 100)
    built = build(config, data)
    x, y = data.prepare(data.train.inputs), data.train.targets
    losses = []
    for step in range(2):
        for group in built.optimizer.param_groups:
            group["lr"] *= 1 if step == 0 else 0.5
        built.optimizer.zero_grad()
        loss = F.cross_entropy(built.model(x), y)
        loss.backward()
        assert built.plan.clip_grad_norm_(0.05) > 0.05
        built.optimizer.step()
        losses.append(loss.item())
    assert [row["train_loss"] for row in run.epochs] == losses
    assert [row["lr"] for row in run.epochs] == [0.1, 0.05]
    for name, theirs in built.model.state_dict().items():
        assert torch.equal(ours[name], theirs)
    with torch.no_grad():
        output = built.model(data.prepare(data.test.inputs))
    assert run.final["test_loss"] == pytest.approx(F.cross_entropy(output, data.test.targets).item())
    assert run.final["test_accuracy"] == int((output.argmax(1) == data.test.targets).sum()) / 100


@pytest.mark.parametrize("method", ["sgd", "kfac"])
def test_same_config_same_numbers(method):
    config = SMALL.replace(method=method, augment=["crop", "flip"], record=["features", "distance"])
    one, weights = weights_at_the_end(config)
    torch.manual_seed(99)  # whatever was drawn outside does not matter
    two, again = weights_at_the_end(config)
    assert numbers(one) == numbers(two)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = train(config.replace(seed=1), dataset=DIGITS)
    assert other.final["train_loss"] != one.final["train_loss"]


def test_looking_on_changes_nothing():
    """Evaluation, probes and observers leave the run as it is, random numbers and all."""
    config = SMALL.replace(record=["features", "distance", "spectra"])
    draws = [lambda moment: {"drawn": float(torch.rand(1))}]
    watched = train(config, dataset=DIGITS, observe=draws)
    alone = train(config.replace(record=[], evaluate_every=2), dataset=DIGITS)
    assert [row["train_loss"] for row in watched.epochs] == [row["train_loss"] for row in alone.epochs]
    assert watched.epochs[0]["drawn"] == watched.epochs[1]["drawn"]
    assert "test_loss" not in alone.epochs[0]
    assert "test_loss" in alone.epochs[1]


@pytest.mark.parametrize("method", ["sgd", "kfac"])
def test_observers_may_run_the_network(method, tmp_path, monkeypatch):
    """Batch norm's averages and K-FAC's draws are as if nobody had looked."""
    (tmp_path / "net_to_look_at.py").write_text(
        "from torch import nn\n"
        "def make(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = SMALL.replace(model="net_to_look_at:make", method=method)
    gradients = []

    def look(moment):
        x = moment.dataset.prepare(moment.dataset.test.inputs)
        moment.built.outputs(x).square().sum().backward()
        gradients.append(float(moment.built.model[3].weight.grad.norm()))
        return {}

    alone, weights = weights_at_the_end(config)
    kept = {}

    def keep(moment):
        kept.update({name: value.clone() for name, value in moment.built.model.state_dict().items()})
        return {}

    watched = train(config, dataset=DIGITS, observe=[look, keep])
    assert all(gradient > 0 for gradient in gradients)
    assert numbers(watched) == numbers(alone)
    assert all(torch.equal(weights[name], kept[name]) for name in weights)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "observer look: returned None; expected numbers by name"),
        ({"epoch": 3}, "observer look: a row has its own 'epoch'; give the number another name"),
        ({"test_loss": 3}, "observer look: a row has its own 'test_loss'"),
        ({"seconds": 3}, "observer look: a row has its own 'seconds'"),
        ({"mine": "much"}, "observer look: 'mine' is 'much', not a number"),
    ],
)
def test_observers_return_numbers_by_names_of_their_own(found, message):
    def look(moment):
        return found

    with pytest.raises(RunError, match=message):
        train(SMALL.replace(epochs=1, evaluate_every=2), dataset=DIGITS, observe=[look])


def test_random_streams_outside_are_left_alone():
    def draw():
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draw()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    train(SMALL.replace(epochs=1), dataset=DIGITS)
    assert draw() == expected


def test_batches_are_whole_and_every_epoch_has_its_own_order():
    first, again, next_epoch, other_seed = (
        torch.stack(batches(20, 6, seed, epoch)) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first.shape == (3, 6)  # two samples are left out
    assert len(first.unique()) == 18
    assert torch.equal(first, again)
    assert not torch.equal(first, next_epoch)
    assert not torch.equal(first, other_seed)
    assert [each.tolist() for each in batches(4, 4, seed=0, epoch=7)] == [[0, 1, 2, 3]]
    with pytest.warns(UserWarning, match="batch=10000: digits has 512 samples to train on"):
        alone = train(SMALL.replace(batch=10_000), dataset=DIGITS)
    assert [row["step"] for row in alone.epochs] == [1, 2]  # the only batch is kept, however small


def test_the_schedule_moves_every_rate(tmp_path, monkeypatch):
    """The fallback's own learning rate too, which serves the norm's gains here."""
    (tmp_path / "net_with_a_norm.py").write_text(
        "from torch import nn\n"
        "def make(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.LayerNorm(width), nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rates = []

    def look(moment):
        entries = moment.built.optimizer.entries
        rates.extend([base_rate(entries["1.weight"]), base_rate(entries["2.weight"])])
        return {}

    options = {"fallback": "adamw", "fallback_lr": 0.1}
    config = SMALL.replace(model="net_with_a_norm:make", epochs=3, schedule="step:1,2", method_options=options, lr=1e-3)
    train(config, dataset=DIGITS, observe=[look])
    assert rates == pytest.approx([1e-3, 0.1, 2e-4, 0.02, 4e-5, 0.004])


@pytest.mark.parametrize(
    ("method", "lr"), [("sgd", 1e6), ("adamw", 1e9), ("kfac", 1e4), ("foof", 1e4), ("shampoo", 1e6)]
)
@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
def test_a_diverged_run_ends_with_a_word(method, lr, loss, tmp_path):
    run = train(SMALL.replace(method=method, lr=lr, loss=loss, epochs=50), tmp_path, dataset=DIGITS)
    assert run.status == "diverged"
    assert "lower the learning rate" in run.reason
    assert run.reason.startswith("step ")
    assert len(run.epochs) < 50
    again = train(SMALL.replace(method=method, lr=lr, loss=loss, epochs=50), tmp_path, dataset=DIGITS)
    assert again.stored  # it would diverge again
    assert again == run


def test_steps_that_are_all_skipped_are_a_divergence(monkeypatch):
    """Gradients that are not finite while the loss still is."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    def built(config, dataset):
        result = build(config, dataset)
        result.model.fc2.register_forward_hook(lambda module, inputs, output: Broken.apply(output))
        return result

    monkeypatch.setattr("mukron.train.sharding.build", built)
    run = train(SMALL.replace(epochs=5), dataset=DIGITS)
    assert run.status == "diverged"
    assert "step 9: 10 steps in a row were skipped" in run.reason


def test_factors_that_cannot_be_inverted_are_a_divergence(monkeypatch):
    def fail(*args):
        raise FactorizationError("a [64, 64] matrix could not be factorized")

    monkeypatch.setattr("mukron.linalg.inverses.factorize", fail)
    failing = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda M: (failing(M)[0], torch.ones(len(M), dtype=torch.int32)))
    run = train(SMALL, dataset=DIGITS)
    assert run.status == "diverged"
    assert re.fullmatch('step 0: layer "fc1": a .* matrix could not be factorized; raise the damping', run.reason)


def test_a_reading_that_fails_ends_nothing(tmp_path, monkeypatch):
    """Factors of which no eigenvalues are found are null in the records, and the run goes on."""

    def fail(factor):
        raise FactorizationError("no eigendecomposition")

    for kind in (MatrixFactor, RowsFactor):
        monkeypatch.setattr(kind, "largest_eigenvalue", fail)
    config = SMALL.replace(record=["features", "spectra"], method_options={"inverse_every": 2})
    run = train(config, tmp_path, dataset=DIGITS)
    assert run.status == "finished"
    assert [row["largest/fc1.A"] for row in run.epochs] == [None, None]
    assert run.final["mean/fc1.A"] > 0
    assert '"largest/fc1.A": null' in (tmp_path / "metrics.jsonl").read_text()
    assert train(config.replace(epochs=3), tmp_path, dataset=DIGITS).final["largest/fc1.A"] is None


def test_a_loss_that_never_was_finite_blames_the_data():
    data = DIGITS.subset(512, 100)
    inputs = data.prepare(data.train.inputs)
    inputs[7, 0, 3, 3] = float("nan")
    broken = Dataset("digits", Split(inputs, data.train.targets), Split(inputs, data.train.targets), 10)
    run = train(SMALL.replace(batch=None, samples=None, test_samples=None), dataset=broken)
    assert (run.status, run.reason) == (
        "diverged",
        "step 0: the loss is not finite before anything is learned; check the data",
    )


def test_progress_and_observers():
    reports = []
    observe = [lambda at: {"mine": at.epoch}, lambda at: {"x": at.row["mine"]}]
    run = train(SMALL, dataset=DIGITS, progress=reports.append, observe=observe)
    assert [at.step for at in reports if at.row is None] == list(range(1, 9))
    assert [at.row for at in reports if at.row is not None] == list(run.epochs)
    assert {(at.epochs, at.steps) for at in reports} == {(2, 8)}
    assert [at.epoch for at in reports] == [1] * 5 + [2] * 5
    assert reports[-1].seconds_left == 0
    assert reports[0].seconds_left > 0
    assert [(row["mine"], row["x"]) for row in run.epochs] == [(1, 1), (2, 2)]


def test_observers_find_the_network_as_it_trains():
    modes = []
    look = [lambda at: modes.append(at.built.model.training) or {}]
    train(SMALL.replace(evaluate_every=2), dataset=DIGITS, observe=look)
    assert modes == [True, True]  # evaluated or not


def test_probes_know_the_beginning():
    run = train(SMALL.replace(record=["distance", "features", "spectra"], record_every=2), dataset=DIGITS)
    assert "distance/fc1.weight" not in run.epochs[0]
    assert run.final["distance/fc1.weight"] > 0
    assert run.final["features/fc1"] > 0
    assert run.final["largest/fc1.A"] >= run.final["mean/fc1.A"] > 0


def test_word_embeddings_are_judged(monkeypatch):
    from mukron.train import word_probe

    torch.manual_seed(0)
    contexts, targets = torch.randint(6, (64, 4)), torch.randint(6, (64,))
    vocabulary = ("king", "queen", "man", "woman", "boy", "girl")
    text = Dataset("wikitext2", Split(contexts, targets), Split(contexts, targets), 6, vocabulary=vocabulary)
    pairs = [("king", "queen", 9.0), ("man", "girl", 2.0), ("a", "b", 1.0)]
    monkeypatch.setattr(word_probe, "word_pairs", lambda folder: pairs)
    monkeypatch.setattr(word_probe, "analogies", lambda folder: [("man", "woman", "king", "queen")])
    config = RunConfig(model="cbow", data="wikitext2", width=64, method="sgd", lr=0.1, epochs=1, record=["words"])
    final = train(config, dataset=text).final
    assert (final["words/pairs"], final["words/questions"]) == (2, 1)
    assert abs(final["words/similarity"]) == pytest.approx(1)  # the order of two pairs
    assert final["words/analogy_accuracy"] in (0.0, 1.0)
    with pytest.raises(RunError, match='record "words": digits has no words'):
        train(SMALL.replace(record=["words"]), dataset=DIGITS)


@pytest.mark.parametrize("method", ["sgd", "kfac", "shampoo", "gauss-newton"])
def test_bfloat16_is_close_to_float32(method):
    lr = {"sgd": 0.1, "kfac": 0.002, "shampoo": 0.02, "gauss-newton": 0.001}[method]
    options = {"fisher": "exact"} if method == "kfac" else {}
    config = SMALL.replace(method=method, lr=lr, epochs=1, method_options=options)
    exact, rough = (train(config.replace(dtype=dtype), dataset=DIGITS).final for dtype in ("float32", "bfloat16"))
    assert rough["train_loss"] == pytest.approx(exact["train_loss"], rel=0.02)
    assert rough["train_loss"] != exact["train_loss"]


def test_float64():
    config = SMALL.replace(method_options={"fisher": "exact"})  # draws may fall apart at a rounding
    double, single = (train(config.replace(dtype=dtype), dataset=DIGITS).final for dtype in ("float64", "float32"))
    assert double["train_loss"] == pytest.approx(single["train_loss"], rel=1e-3)
    assert double["train_loss"] != single["train_loss"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_is_close_to_a_plain_one(tmp_path):
    """K-FAC listens to it all the same; its checkpoint is a plain network's."""
    config = SMALL.replace(samples=256, epochs=1)
    plain = train(config, dataset=DIGITS)
    compiled = train(config.replace(compile=True), tmp_path, dataset=DIGITS)
    assert compiled.final["test_loss"] == pytest.approx(plain.final["test_loss"], rel=1e-3)
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert list(saved["model"]) == ["fc1.weight", "fc2.weight", "fc3.weight"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_was_compiled_for_one_method_does_not_serve_another(monkeypatch):
    """torch keeps what it compiled by class, hooks or not: K-FAC after SGD would hear nothing."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = SMALL.replace(compile=True, epochs=1)
    train(config.replace(method="sgd"), dataset=DIGITS)
    assert train(config, dataset=DIGITS).status == "finished"


def test_without_a_compiler_it_says_so(monkeypatch):
    def fail(*args, **kwargs):
        raise torch._dynamo.exc.TorchDynamoException("no working C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda model, **options: fail)
    with pytest.raises(RunError, match=r"compile=True: .*no working C\+\+ compiler found.*compile=False"):
        train(SMALL.replace(compile=True), dataset=DIGITS)


def test_ctrl_c_ends_after_the_step_and_twice_at_once():
    def press(times):
        def progress(at):
            if at.step == 3 and at.row is None:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        return progress

    before = signal.getsignal(signal.SIGINT)
    run = train(SMALL, dataset=DIGITS, progress=press(1))
    assert (run.status, run.reason) == ("interrupted", "interrupted at step 3")
    assert run.epochs == []
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, dataset=DIGITS, progress=press(2))
    assert signal.getsignal(signal.SIGINT) is before


def test_wrong_arguments():
    with pytest.raises(RunError, match="checkpoint_every counts epochs: at least 1, got 0"):
        train(SMALL, checkpoint_every=0)


def test_tf32_is_set_for_the_run_alone():
    seen = []
    before = torch.get_float32_matmul_precision()
    for dtype in ("tf32", "float32"):
        config = RunConfig(samples=32, test_samples=8, epochs=1, width=64, dtype=dtype)
        train(config, dataset=DIGITS, observe=[lambda moment: seen.append(torch.get_float32_matmul_precision()) or {}])
    assert seen == ["high", before]
    assert torch.get_float32_matmul_precision() == before
