"""What is listened to, what is not, and what is refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mukron import FOOF, KFAC, GaussNewton, Shampoo
from mukron.layers import conv
from mukron.linalg import matmul_precision, products_of
from networks import GPT, LENGTH, VOCABULARY, Net

DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 12, generator=DATA), torch.randint(5, (6,), generator=DATA)


def seen(optimizer) -> set[str]:
    return set(optimizer.capture.gather())


def backward(model, x=X, y=Y):
    F.cross_entropy(model(x), y).backward()


def test_a_differentiated_forward_pass_is_listened_to():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    loss = F.cross_entropy(model(X), Y)
    assert seen(optimizer) == set()  # not yet: it may never be differentiated
    loss.backward()
    assert seen(optimizer) == {"first", "hidden", "head"}
    assert optimizer.capture.samples == 6


def test_passes_that_leave_no_trace():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    with torch.no_grad():
        model(X)
    model.eval()
    backward(model)
    model.train()
    with optimizer.paused():
        backward(model)
    model(X)  # never differentiated
    assert seen(optimizer) == set()
    backward(model)
    assert optimizer.capture.samples == 6


@pytest.mark.parametrize("order", ["before the forward pass", "after it"])
def test_zero_grad_wherever_people_put_it(order):
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    for _ in range(2):
        if order == "before the forward pass":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        if order == "after it":
            optimizer.zero_grad()
        loss.backward()
        assert optimizer.capture.samples == 6
        optimizer.step()


def test_statistics_of_gradients_that_are_thrown_away_go_with_them():
    """As when a GradScaler skips the step."""
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    backward(model)
    optimizer.zero_grad()
    backward(model)
    assert optimizer.capture.samples == 6


class InPlace(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 5))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_in_place_activations_give_the_same_step(fisher):
    """The signal is the derivative by the layer's output as it was before the in-place change."""
    torch.manual_seed(0)
    plain, inplace = InPlace(False), InPlace(True)
    inplace.load_state_dict(plain.state_dict())
    for model in (plain, inplace):
        optimizer = KFAC(model, lr=0.1, fisher=fisher, trust=None)
        backward(model)
        optimizer.step()
    for ours, theirs in zip(inplace.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


CHANGES_IN_PLACE = {
    "relu": lambda h: F.relu(h, inplace=True),
    "masked": lambda h: h.mul_(torch.arange(h.shape[-1]) != 1),
    "twice": lambda h: h.add_(1.0).tanh_(),
    "assigned": lambda h: h.index_fill_(1, torch.tensor([0]), 0.5),
}


class ChangedBehindItsView(nn.Module):
    """The output of a Linear layer with a bias is a view where there are positions."""

    def __init__(self, change: str, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.change, self.inplace = CHANGES_IN_PLACE[change], inplace

    def forward(self, x):
        h = x
        for layer in (self.first, self.second):
            h = layer(h)
            h = self.change(h if self.inplace else h.clone())
        return self.head(h.mean(1))


@pytest.mark.parametrize("change", CHANGES_IN_PLACE)
@pytest.mark.parametrize(
    "method",
    [
        *(partial(KFAC, fisher=fisher) for fisher in ("signs", "mc", "exact", "empirical")),
        *(partial(KFAC, fisher="exact", memory="ema:0.9"), partial(KFAC, fused=True), FOOF, GaussNewton),
    ],
)
def test_views_that_are_changed_in_place_give_the_same_step(method, change):
    torch.manual_seed(0)
    plain, inplace = ChangedBehindItsView(change, False), ChangedBehindItsView(change, True)
    inplace.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3, 12)
    for model in (plain, inplace):
        optimizer = method(model, lr=0.1, trust=None)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), Y).backward()
            optimizer.step()
    for (name, ours), theirs in zip(inplace.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)


class Twice(Net):
    """One layer on two inputs, in two calls or side by side as positions."""

    def __init__(self, width: int, calls: int) -> None:
        super().__init__(width)
        self.calls, self.extra = calls, nn.Linear(width, width)

    def forward(self, x):
        h = F.relu(self.first(x))
        inputs = h, self.extra(h).tanh()
        if self.calls == 2:
            u = torch.stack([self.hidden(h) for h in inputs], dim=1)
        else:
            u = self.hidden(torch.stack(inputs, dim=1))
        return self.head(F.relu(u).mean(1))


USES = {
    "plain": (KFAC, {"trust": None}),
    "defaults": (KFAC, {}),
    "exact": (KFAC, {"fisher": "exact", "trust": None}),
    "empirical": (KFAC, {"fisher": "empirical", "memory": "window:2"}),
    "rows": (KFAC, {"form": "rows", "trust": None, "memory": "batch"}),
    "fused": (KFAC, {"form": "rows", "fused": True, "memory": "batch"}),
    "foof": (FOOF, {"trust": None}),
    "gauss-newton": (GaussNewton, {"trust": None}),
}


@pytest.mark.parametrize("kind", USES)
def test_a_layer_that_is_used_twice_has_the_positions_of_both_uses(kind):
    method, options = USES[kind]
    torch.manual_seed(0)
    models = [Twice(8, calls).double() for calls in (1, 2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = method(model, lr=0.1, **options)
        for seed in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(seed)
            backward(model, torch.randn(6, 12, generator=generator, dtype=torch.float64))
            optimizer.step()
        assert optimizer.skipped == 0
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_after_itself():
    class Again(Net):
        def forward(self, x):
            return self.head(self.hidden(F.relu(self.hidden(F.relu(self.first(x))))))

    torch.manual_seed(0)
    model = Again(8)
    optimizer = KFAC(model, lr=0.1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert set(optimizer.layers) == {"first", "hidden", "head"}


def test_a_use_that_the_output_does_not_depend_on_does_not_count():
    class Idle(Net):
        def forward(self, x):
            h = F.relu(self.first(x))
            self.hidden(100 * h)
            return self.head(F.relu(self.hidden(h)))

    torch.manual_seed(0)
    models = Idle(8).double(), Net(8).double()
    models[0].norm = models[1].norm = nn.Identity()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = KFAC(model, lr=0.1, trust=None)
        backward(model, X.double())
        optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_tied_embeddings_that_are_not_excluded_are_refused_by_name():
    """FOOF has no factor of signals, without which an embedding and a head cannot be summed."""
    with pytest.raises(ValueError, match=r'tied parameter "token.weight", "head.weight".*exclude='):
        FOOF(GPT(16), trust=None, exclude=())


@pytest.mark.parametrize("given", [{}, {"exclude": ("token",)}, {"exclude": ("token", "head")}], ids=str)
def test_tied_embeddings_are_left_to_the_fallback_rule(given):
    optimizer = KFAC(GPT(16), class_dim=-1, **given)
    assert not {"token", "head"} & set(optimizer.layers)
    assert optimizer.layers


def test_a_gpt_trains():
    """Sequences, norms, fused attention and a bare parameter: what is not preconditioned takes the fallback rule."""
    torch.manual_seed(0)
    model = GPT(16)
    optimizer = KFAC(
        model, lr=0.02, exclude=("token", "head"), class_dim=-1, fallback="adamw", fallback_lr=0.01, trust=None
    )
    assert {"blocks.0.up", "blocks.1.down"} <= set(optimizer.layers)
    assert {"blocks.0.attention.in_proj_weight", "blocks.1.attention.out_proj"} <= set(optimizer.layers)
    tokens = torch.randint(VOCABULARY, (8, LENGTH))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_segmentation_and_language_outputs():
    """Classes in dimension 1 or last: the same network, its output turned, takes the same step."""

    class Dense(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv1d(2, 4, 3, padding=1), last

        def forward(self, x):
            return self.conv(x).transpose(1, 2) if self.last else self.conv(x)

    torch.manual_seed(0)
    x, y = torch.randn(3, 2, 5), torch.randint(4, (3, 5))
    first, last = Dense(False), Dense(True)
    last.load_state_dict(first.state_dict())
    for model, class_dim in ((first, 1), (last, -1)):
        optimizer = KFAC(model, lr=0.1, class_dim=class_dim, fisher="exact", trust=None)
        logits = model(x) if class_dim == 1 else model(x).transpose(1, 2)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    assert torch.allclose(first.conv.weight, last.conv.weight, rtol=1e-5)
    optimizer = KFAC(first, trust=None)
    with pytest.raises(ValueError, match=r"shape \[3, 4, 5\]: say where the classes are"):
        first(x)
    optimizer.close()


def test_outputs_that_are_not_tensors():
    class Wrapped(Net):
        def forward(self, x):
            return {"logits": super().forward(x)}

    model = Wrapped(8)
    optimizer = KFAC(model, trust=None)
    with pytest.raises(TypeError, match=r'returned a dict, not a tensor; say where its output is: .*\["logits"\]'):
        model(X)
    optimizer.close()
    optimizer = KFAC(model, output=lambda returned: returned["logits"], trust=None)
    F.cross_entropy(model(X)["logits"], Y).backward()
    optimizer.step()


def test_a_loss_is_never_named_as_the_output():
    """As transformers' models return them, with the loss first."""

    class WithLoss(Net):
        def forward(self, x):
            f = super().forward(x)
            return {"loss": F.cross_entropy(f, Y), "logits": f, "hidden": f * 2}

    class Unnamed(WithLoss):
        def forward(self, x):
            returned = super().forward(x)
            return {"loss": returned["loss"], "start": returned["logits"], "end": returned["hidden"]}

    for kind, output, said in (
        (WithLoss, None, r'say where its output is: output=lambda returned: returned\["logits"\]$'),
        (WithLoss, lambda r: r["loss"], r'picked a single number \(the loss\?\).*returned\["logits"\]$'),
        (WithLoss, lambda r: (r["logits"],), r'picked a tuple.*returned\["logits"\]$'),
        (Unnamed, None, r'the loss is made of by output=.*\["start"\] of shape \[6, 5\], returned\["end"\] of shape'),
    ):
        model = kind(8)
        optimizer = KFAC(model, output=output)
        with pytest.raises((TypeError, ValueError), match=said):
            model(X)
        optimizer.close()


@pytest.mark.parametrize("method", [partial(KFAC, fisher="exact"), GaussNewton])
def test_positions_that_the_output_has_as_rows_are_warned_of_where_they_matter(method):
    class Language(nn.Module):
        def __init__(self, flat: bool) -> None:
            super().__init__()
            self.hidden, self.head, self.flat = nn.Linear(6, 8), nn.Linear(8, 5), flat

        def forward(self, x):
            f = self.head(torch.tanh(self.hidden(x)))
            return f.flatten(0, 1) if self.flat else f

    x, y = torch.randn(3, 4, 6), torch.arange(12) % 5
    class_dim = {} if method is GaussNewton else {"class_dim": -1}
    for make, flat, warns in (
        (method, True, True),
        (partial(method, **class_dim), False, False),
        (partial(KFAC, fisher="signs"), True, False),
        (partial(KFAC, fisher="empirical"), True, False),
        (FOOF, True, False),
    ):
        model = Language(flat)
        optimizer = make(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                F.cross_entropy(model(x).reshape(12, 5), y).backward()
        told = [w for w in caught if "rows of one sample are taken for samples" in str(w.message)]
        assert len(told) == warns, (make, flat)
        optimizer.close()


def test_a_loss_that_is_not_made_of_the_named_output_is_told():
    class Two(Net):
        def forward(self, x):
            f = super().forward(x)
            return {"logits": f * 1.0, "raw": f}

    model = Two(8)
    optimizer = KFAC(model, output=lambda returned: returned["logits"])
    F.cross_entropy(model(X)["raw"], Y).backward()
    with pytest.raises(RuntimeError, match="the loss does not depend on the output that the model's forward pass"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_that_returns_several_tensors_is_named_with_a_remedy(fused):
    """As routers of mixtures of experts do."""

    class Router(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return logits.softmax(-1), logits

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = Router(12, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(self.router(x)[0])

    for exclude in (None, ("router",)):
        model = Model()
        optimizer = KFAC(model, lr=0.1, fused=fused, exclude=exclude)
        before = model.router.weight.detach().clone()
        F.cross_entropy(model(X), Y).backward()
        if exclude is None:
            with pytest.raises(RuntimeError, match=r'layer "router" returns a tuple .*exclude=\("router",\)'):
                optimizer.step()
        else:
            optimizer.step()
            assert not torch.equal(model.router.weight, before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Checkpointed(Net):
        def forward(self, x):
            x = self.first(x)
            x = checkpoint(lambda h: self.norm(self.hidden(F.relu(h))), x, use_reentrant=reentrant)
            return self.head(F.relu(x))

    torch.manual_seed(0)
    model = Checkpointed(8)
    plain = Net(8)
    plain.load_state_dict(model.state_dict())
    optimizer = KFAC(model, lr=0.1, fisher="exact" if not reentrant else "empirical", trust=None)
    backward(model)
    if reentrant:
        with pytest.raises(
            RuntimeError, match=r'layer "hidden" has a gradient, but no forward pass.*use_reentrant=False'
        ):
            optimizer.step()
        return
    optimizer.step()
    reference = KFAC(plain, lr=0.1, fisher="exact", trust=None)
    backward(plain)
    reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's compiler itself
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_compiled_models(first):
    """Compiled before or after the optimizer is made: hooks run as plain Python, and the step is the same."""
    torch.manual_seed(0)
    model, plain = Net(8), Net(8)
    plain.load_state_dict(model.state_dict())
    if first == "model":
        compiled = torch.compile(model, backend="eager")
        optimizer = KFAC(compiled, lr=0.1, fisher="exact", trust=None)
    else:
        optimizer = KFAC(model, lr=0.1, fisher="exact", trust=None)
        compiled = torch.compile(model, backend="eager")
    reference = KFAC(plain, lr=0.1, fisher="exact", trust=None)
    for _ in range(2):
        for each, network in ((optimizer, compiled), (reference, plain)):
            each.zero_grad()
            backward(network)
            each.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_running_a_part_of_the_model_is_told():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    F.cross_entropy(model.head(F.relu(model.norm(model.hidden(F.relu(model.first(X)))))), Y).backward()
    with pytest.raises(RuntimeError, match=r'layer "first" has a gradient, but no forward pass of the model was seen'):
        optimizer.step()


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_go_with_the_optimizer():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    assert hooks(model) == 5  # three layers, and two on the model
    optimizer.close()
    assert hooks(model) == 0
    optimizer = KFAC(model, trust=None)
    dead = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dead() is None
    assert hooks(model) == 0
    Shampoo(model, trust=None)
    assert hooks(model) == 0  # it listens to nothing


def test_copies_of_a_model_do_not_speak_to_its_optimizer():
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        backward(other)
        assert seen(optimizer) == set()


def test_two_optimizers_on_parts_of_one_model():
    torch.manual_seed(0)
    model = Net(8)
    kfac = KFAC(model, lr=0.1, params=list(model.first.parameters()), trust=None)
    shampoo = Shampoo(model, lr=0.1, params=[*model.hidden.parameters(), *model.norm.parameters()], trust=None)
    rest = GaussNewton(model, lr=0.1, params=list(model.head.parameters()), trust=None)
    before = {name: values.detach().clone() for name, values in model.named_parameters()}
    backward(model)
    kfac.step()
    assert {name for name, values in model.named_parameters() if not torch.equal(values, before[name])} == {
        "first.weight",
        "first.bias",
    }
    shampoo.step()
    rest.step()
    assert all(not torch.equal(values, before[name]) for name, values in model.named_parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it moves the model there")
def test_data_parallel_wrapper():
    model = Net(8)
    wrapped = nn.DataParallel(model)  # without devices it runs the model itself
    optimizer = KFAC(wrapped, trust=None)
    backward(wrapped)
    optimizer.step()
    assert set(optimizer.layers) == {"first", "hidden", "head"}


def conv_net():
    """The second layer has few positions and wide patches: its rows are made at the step."""
    return nn.Sequential(
        *(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.LazyLinear(5)),
    )


def images(samples=6):
    return torch.randn(samples, 2, 7, 7, dtype=torch.float64)


def started(net):
    """With the shapes that its lazy layer takes from a batch."""
    net = net.double()
    net(images())
    return net


def test_a_loss_that_is_kept_keeps_no_statistics():
    """People hold the last loss while the next batch runs: its graph stays, what was gathered through it does not."""
    torch.manual_seed(0)
    model = started(conv_net())
    optimizer = KFAC(model, trust=None)
    loss = F.cross_entropy(model(images()), Y)
    loss.backward(retain_graph=True)
    (this,) = optimizer.capture.passes
    assert [name for name, layer in this.layers.items() if layer.waits] == ["2"]
    held = [weakref.ref(layer) for layer in this.layers.values()]  # with their inputs, statistics and derivatives
    optimizer.zero_grad()
    assert not this.layers
    assert [layer() for layer in held] == [None, None, None]
    loss.backward()  # once more through the graph whose gradients were thrown away
    assert not this.layers
    assert not optimizer.capture.passes
    assert loss.requires_grad


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"form": "rows"}, {"fisher": "empirical"}])
def test_a_forward_pass_that_is_never_differentiated_holds_no_memory(options):
    """Its graph must not be kept alive by what waits in it for a step."""
    torch.manual_seed(0)
    model, kept = started(conv_net()), []
    optimizer = KFAC(model, **{"trust": None, **options})
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    for _ in range(2):
        assert model(images()).requires_grad
    gc.collect()
    assert [output() for output in kept] == [None, None]
    assert not optimizer.capture.passes


class Experts(nn.Module):
    """Each sample goes to the expert that it names."""

    def __init__(self, expert):
        super().__init__()
        self.experts, self.head = nn.ModuleList(expert() for _ in range(3)), nn.Linear(6, 4)

    def forward(self, x, route):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.nonzero(route == number, as_tuple=True)
            out = out.index_put((chosen,), expert(x[chosen]))
        return self.head(out.flatten(1))


@pytest.mark.parametrize("expert", [lambda: nn.Linear(6, 6), lambda: nn.Conv1d(6, 6, 1)])
@pytest.mark.parametrize(
    "make",
    [KFAC, partial(KFAC, fused=True), partial(KFAC, fisher="empirical"), partial(Shampoo, fused=True), Shampoo],
)
def test_an_expert_that_no_sample_is_sent_to_sits_the_step_out(make, expert):
    torch.manual_seed(0)
    model = Experts(expert)
    optimizer, idle = make(model, lr=0.1), model.experts[2].weight.detach().clone()
    shape = (8, 6) if isinstance(model.experts[0], nn.Linear) else (8, 6, 1)
    for step, route in enumerate(([0, 0, 1, 1, 0, 1, 0, 1], [0, 0, 2, 1, 2, 2, 0, 1], [1, 0, 0, 1, 0, 1, 0, 1])):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(shape), torch.tensor(route)), torch.randint(4, (8,)))
        loss.backward()
        optimizer.step()
        assert torch.equal(model.experts[2].weight, idle) == (step == 0)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (optimizer.steps, optimizer.skipped) == (3, 0)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"form": "rows"}, {"sharing": "reduce"}])
@pytest.mark.parametrize("leaf", [False, True])
def test_an_input_that_is_overwritten_after_the_backward_pass_counts_as_it_was(options, leaf):
    """What the model itself made may wait for the step, the user's own input may not, even if it has a gradient."""
    torch.manual_seed(0)
    model, x = started(conv_net()), images()
    other = copy.deepcopy(model)
    for each, overwritten in ((model, False), (other, True)):
        optimizer, buffer = KFAC(each, lr=0.01, **{"trust": None, **options}), x.clone().requires_grad_(leaf)
        F.cross_entropy(each(buffer), Y).backward()
        if overwritten:
            buffer.detach().fill_(3.0)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"form": "rows"}, {"fisher": "empirical"}])
@pytest.mark.parametrize("net", [lambda: nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5)), conv_net])
def test_one_buffer_for_all_micro_batches(options, net):
    """Refilled for each of them, as people do who record CUDA graphs."""
    torch.manual_seed(0)
    model = net().double()
    batches = [torch.randn(6, 12, dtype=torch.float64) if net is not conv_net else images() for _ in range(3)]
    model(batches[0])
    other = copy.deepcopy(model)
    for each, shared in ((model, False), (other, True)):
        optimizer, buffer = KFAC(each, lr=0.01, **{"trust": None, **options}), torch.empty_like(batches[0])
        for batch in batches:
            x = buffer.copy_(batch) if shared else batch
            (F.cross_entropy(each(x), Y) / 3).backward()
        buffer.zero_()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_waits_for_the_step_must_not_change():
    model = started(conv_net())
    optimizer, kept = KFAC(model, trust=None), []
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    F.cross_entropy(model(images()), Y).backward()
    with torch.no_grad():
        kept[0].add_(1.0)
    with pytest.raises(RuntimeError, match='input of layer "2" was changed in place'):
        optimizer.step()


@pytest.mark.parametrize("portion", [2**24, 300])
def test_means_over_positions_do_not_depend_on_portions(portion, monkeypatch):
    torch.manual_seed(0)
    model, x = started(conv_net()), images()
    monkeypatch.setattr(conv, "PORTION", portion)
    optimizer = KFAC(model, sharing="reduce", form="matrix", trust=None)
    F.cross_entropy(model(x), Y).backward()
    found = optimizer.capture.gather()["0"].A.factor().M[0]
    H = F.unfold(x, 3).mean(2)
    assert torch.allclose(found, H.mT @ H / 6, rtol=1e-12)


def test_torch_may_refuse_to_say_how_precise_products_are(monkeypatch):
    """As it does once they were set by ``torch.backends.cuda.matmul.fp32_precision``."""

    def refuse():
        raise RuntimeError("mixed use of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    model = Net(8)
    optimizer = KFAC(model, trust=None)
    backward(model)
    optimizer.step()
    assert optimizer.steps == 1
    assert matmul_precision() is None
    before = torch.randn(3, 3) @ torch.randn(3, 3)
    with products_of(True):  # of a layer that uses TF32
        assert torch.isfinite(before @ before).all()
