"""A mistake is answered with a sentence that says what to pass, never with an error from inside."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from alone import run_with_a_process_group
from mukron import FOOF, KFAC, Batch, Fixed, GaussNewton, Heuristic, Shampoo, Window
from networks import INPUTS, Net

METHODS = {"KFAC": KFAC, "FOOF": FOOF, "Shampoo": Shampoo, "GaussNewton": GaussNewton}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def net() -> Net:
    torch.manual_seed(0)
    return Net(8)


def sentence(caught) -> str:
    """The error's message: words, not a bare name as a KeyError has it."""
    text = str(caught.value)
    assert len(text.split()) >= 5, text
    return text


@pytest.mark.parametrize("given", ["parameters()", "list", "named_parameters()", "groups"])
def test_parameters_in_place_of_the_model(method, given):
    model = net()
    first = {
        "parameters()": model.parameters,
        "list": lambda: list(model.parameters()),
        "named_parameters()": model.named_parameters,
        "groups": lambda: [{"params": list(model.parameters())}],
    }[given]()
    with pytest.raises(TypeError, match="pass the model itself") as caught:
        method(first, lr=0.1, trust=None)
    assert method.__name__ in sentence(caught)


@pytest.mark.parametrize(
    ("wrong", "right"), [("learning_rate", "lr"), ("weightdecay", "weight_decay"), ("dampening", "damping")]
)
def test_a_wrong_keyword(method, wrong, right):
    with pytest.raises(TypeError) as caught:
        method(net(), **{"trust": None, **{wrong: 0.1}})
    text = sentence(caught)
    assert method.__name__ in text
    assert wrong in text
    assert f"; did you mean '{right}'?" in text


def test_a_learning_rate_in_place_of_the_parametrization(method):
    with pytest.raises(TypeError, match="parametrization") as caught:
        method(net(), 0.1, trust=None)
    sentence(caught)


@pytest.mark.parametrize("how", ["params", "group in params", "add_param_group"])
def test_a_parameter_that_is_not_the_models(method, how):
    model, stray = net(), nn.Parameter(torch.zeros(3))
    mine = list(model.first.parameters())
    attempt = {
        "params": lambda: method(model, lr=0.1, params=[*mine, stray], trust=None),
        "group in params": lambda: method(model, lr=0.1, params=[{"params": mine}, {"params": [stray]}], trust=None),
        "add_param_group": lambda: method(model, lr=0.1, params=mine, trust=None).add_param_group({"params": [stray]}),
    }[how]
    with pytest.raises(ValueError, match="model") as caught:
        attempt()
    assert "not" in sentence(caught)


def test_a_refused_group_leaves_the_optimizer_as_it_was(method):
    model = net()
    optimizer = method(model, lr=0.1, params=list(model.first.parameters()), trust=None)
    with pytest.raises(ValueError, match="model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("params", [[], [{"params": []}], iter(())], ids=["list", "group", "iterator"])
def test_no_parameters_at_all(method, params):
    """One empty group beside others is fine, as in torch; nothing at all to train is a mistake."""
    with pytest.raises(ValueError, match="params is empty") as caught:
        method(net(), lr=0.1, params=params, trust=None)
    sentence(caught)


class Sized(nn.Module):
    """A hidden layer with no inputs or no outputs beside a whole one."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.odd, self.whole = nn.Linear(d_in, d_out), nn.Linear(4, 3)
        self.sizes = (d_in, d_out)

    def forward(self, x):
        h = self.whole(x)
        d_in, d_out = self.sizes
        extra = self.odd(h[:, :d_in])
        return h + (extra if d_out == 3 else extra.sum(1, keepdim=True))


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)], ids=["no inputs", "no outputs"])
def test_a_layer_of_size_zero_works_or_is_refused_by_name(method, sizes):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: initializing zero elements is a no-op
        model = Sized(*sizes)
    try:
        optimizer = method(model, lr=0.1, trust=None)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "odd" in refusal
        assert len(refusal.split()) >= 5
        optimizer = method(model, lr=0.1, exclude=("odd",), trust=None)
    before = model.whole.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
        optimizer.step()
    assert optimizer.skipped == 0
    assert bool(model.whole.weight.isfinite().all())
    assert not torch.equal(model.whole.weight, before)


class Mixed(Net):
    """One layer computes in float64, the others in float32."""

    def __init__(self, layer: str) -> None:
        super().__init__(8)
        self.get_submodule(layer).double()

    def forward(self, x):
        for layer in (self.first, self.hidden, self.norm, self.head):
            x = layer(x.to(layer.weight.dtype))
            x = F.relu(x) if layer in (self.first, self.norm) else x
        return x


MIXED = {
    "kfac, empirical": lambda model: KFAC(model, lr=0.1, fisher="empirical", trust=None),
    "kfac, exact": lambda model: KFAC(model, lr=0.1, fisher="exact", trust=None),
    "foof": lambda model: FOOF(model, lr=0.1, trust=None),
    "foof, fused": lambda model: FOOF(model, lr=0.1, fused=True, trust=None),
    "shampoo": lambda model: Shampoo(model, lr=0.1, damping=1e-2, trust=None),
    "gauss-newton": lambda model: GaussNewton(model, lr=0.1, trust=None),
}


@pytest.mark.parametrize("layer", ["first", "hidden", "head"])
@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_layers_of_different_precision_work_or_are_refused_at_construction(make, layer):
    """Refused by the layer's name and both types; never by an error of a product inside the step."""
    torch.manual_seed(0)
    model = Mixed(layer)
    whole = net().double()
    whole.load_state_dict(model.state_dict())
    start = [parameter.detach().clone().double() for parameter in model.parameters()]
    try:
        optimizer = make(model)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        for word in (layer, "float32", "float64"):
            assert word in refusal
        return
    for part, own in ((model, optimizer), (whole, make(whole))):
        F.cross_entropy(part(X.double() if part is whole else X), Y).backward()
        own.step()
        assert own.steps == 1
    for ours, theirs, before in zip(model.parameters(), whole.parameters(), start, strict=True):
        change = theirs.detach() - before
        assert (ours.detach().double() - before - change).norm() < 1e-3 * change.norm()


COMMON = ("model", "parametrization", "lr", "damping", "momentum", "weight_decay", "decoupled", "maximize")


def test_the_signature_is_explicit(method):
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds, "**kwargs"
    assert inspect.Parameter.VAR_POSITIONAL not in kinds, "*args"
    for name in (*COMMON, "fallback", "fallback_lr", "params", "exclude"):
        assert name in parameters, name
    assert "nesterov" in parameters or hasattr(mukron, "HeavyBall")


def test_every_argument_is_described(method):
    """In the docstring of the class itself, as Google style has it: one entry ``name: ...`` an argument."""
    text = vars(method).get("__doc__") or ""
    missing = [
        name
        for name in inspect.signature(method).parameters
        if not re.search(rf"^\s+{name}\b[^\n:]*: \S", text, flags=re.MULTILINE)
    ]
    assert not missing, f"{method.__name__} does not describe {', '.join(missing)}"


def test_help_shows_the_signature(method):
    lines = inspect.getdoc(method)
    assert lines
    text = str(inspect.signature(method))
    for name in ("momentum", "weight_decay", "fallback_lr", "maximize", "decoupled"):
        assert name in text


def scaled_step(model, optimizer, scaler, unscale=False) -> None:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(X), Y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def said(steps: int, model, optimizer, scaler, unscale=False) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            scaled_step(model, optimizer, scaler, unscale)
    assert optimizer.steps == steps
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and step"])
@pytest.mark.parametrize("name", ["kfac", "gauss-newton"])
def test_a_grad_scaler_that_the_empirical_fisher_does_not_know_of(name, unscale):
    """It is told at the first step and once: signals read from the loss are 65536 times too large."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer = (
        KFAC(model, lr=0.1, fisher="empirical", trust=None)
        if name == "kfac"
        else GaussNewton(model, lr=0.1, trust=None)
    )
    messages = said(1, model, optimizer, scaler, unscale)
    assert len(messages) == 1
    assert "GradScaler" in messages[0]
    assert "grad_scaler=" in messages[0]
    assert said_again(model, optimizer, scaler, unscale) == []


def said_again(model, optimizer, scaler, unscale) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaled_step(model, optimizer, scaler, unscale)
    return [str(warning.message) for warning in caught if "GradScaler" in str(warning.message)]


KNOWN = {
    "grad_scaler=": lambda model, scaler: KFAC(model, lr=0.1, fisher="empirical", grad_scaler=scaler, trust=None),
    "Empirical(grad_scaler=)": lambda model, scaler: KFAC(
        model, lr=0.1, fisher=mukron.Empirical(grad_scaler=scaler), trust=None
    ),
    "mc": lambda model, scaler: KFAC(model, lr=0.1, trust=None),
    "exact": lambda model, scaler: KFAC(model, lr=0.1, fisher="exact", trust=None),
    "foof": lambda model, scaler: FOOF(model, lr=0.1, trust=None),
    "shampoo": lambda model, scaler: Shampoo(model, lr=0.1, trust=None),
    "gauss-newton": lambda model, scaler: GaussNewton(model, lr=0.1, grad_scaler=scaler, trust=None),
}


@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and step"])
@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_no_warning_where_the_scaler_is_known_or_does_not_matter(make, unscale):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    assert said(2, model, make(model, scaler), scaler, unscale) == []


@pytest.mark.parametrize("largest", [1e-2, 1e-6])
@pytest.mark.parametrize(
    "make", [lambda m: KFAC(m, lr=0.1, fisher="empirical", trust=None), lambda m: GaussNewton(m, lr=0.1, trust=None)]
)
def test_no_warning_where_the_gradient_was_merely_clipped(make, largest):
    model = net()
    optimizer = make(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        F.cross_entropy(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
    assert [str(warning.message) for warning in caught] == []
    assert optimizer.steps == 1


# What no optimizer of ours can serve, at its construction or at the first pass that shows it.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KFAC(Net(8), lr=-0.1, trust=None), "lr must not be negative, got -0.1"),
        (lambda: KFAC(Net(8), lr=float("nan"), trust=None), "lr must (not be negative|be finite)"),
        (lambda: KFAC(Net(8), damping=-1.0, trust=None), r"damping must not be negative: Rescaled\(rho=-1.0\)"),
        (lambda: KFAC(Net(8), damping=Fixed(a=1.0, b=-1.0), trust=None), r"Fixed\(b=-1.0\)"),
        (lambda: KFAC(Net(8), nesterov=True, trust=None), "nesterov=True needs momentum"),
        (lambda: KFAC(Net(8), weight_decay=-1.0, trust=None), "weight_decay must not be negative"),
        (lambda: KFAC(Net(8), likelihood="poisson", trust=None), "unknown likelihood 'poisson'"),
        (lambda: KFAC(Net(8), sharing="both", trust=None), "unknown sharing 'both'; known: 'expand', 'reduce'"),
        (lambda: KFAC(Net(8), form="sparse", trust=None), "unknown form 'sparse'"),
        (lambda: KFAC(Net(8), trust="kl:0"), "kappa must be a positive number"),
        (lambda: KFAC(Net(8), factor_every=0, trust=None), "factor_every counts steps"),
        (lambda: KFAC(nn.LayerNorm(3), trust=None), "nothing to precondition: no Linear, Conv or Embedding"),
        (
            lambda: KFAC(Net(8), exclude=("first", "hidden", "head"), trust=None),
            "nothing to precondition.*not in exclude=",
        ),
        (lambda: KFAC(nn.ReLU(), trust=None), "ReLU has no parameters"),
        (lambda: mukron.EMA(1.0), r"EMA's decay must lie in \[0, 1\)"),
        (lambda: mukron.Window(0), "a window holds at least one batch"),
        (lambda: Shampoo(Net(8), e=-1, trust=None), "must not be negative"),
        (lambda: Shampoo(Net(8), solver="cholesky", trust=None), "unknown solver 'cholesky'"),
        (lambda: GaussNewton(Net(8), reduction="none", trust=None), "unknown reduction 'none'"),
    ],
)
def test_a_number_or_a_model_that_cannot_be_used(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_that_do_not_fit_the_method_or_the_model():
    with pytest.raises(TypeError, match="FOOF has no Fisher factor: fisher would have no effect"):
        FOOF(Net(8), fisher="exact", trust=None)
    mixed = Net(8)
    mixed.head = nn.Linear(8, 5, device="meta")
    with pytest.raises(ValueError, match="several devices"):
        KFAC(mixed, trust=None)
    model = Net(8)
    with pytest.raises(ValueError, match="Heuristic damping balances A against B, which FOOF does not have"):
        FOOF(model, damping=Heuristic(1.0), trust=None)
    plan = mukron.parametrize(Net(16), mukron.base_shapes(Net, width=8))
    with pytest.raises(mukron.ParametrizationError, match="in this network"):
        KFAC(Net(32), plan, trust=None)
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = Shampoo(nn.Sequential(model), trust=None)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r'"0\.weight" has a sparse gradient'):
        optimizer.step()


def test_data_parallel_over_several_devices_is_refused():
    wrapped = nn.DataParallel(Net(8))
    wrapped.device_ids = [0, 1]
    with pytest.raises(ValueError, match="DataParallel runs copies of the layers"):
        KFAC(wrapped, trust=None)


def test_distributed_data_parallel_works_in_one_process():
    run_with_a_process_group(
        """
        from networks import INPUTS, Net
        from mukron import KFAC

        wrapped = nn.parallel.DistributedDataParallel(Net(8))
        optimizer = KFAC(wrapped, lr=0.05)
        before = wrapped.module.hidden.weight.detach().clone()
        wrapped(torch.randn(10, INPUTS)).logsumexp(1).mean().backward()
        optimizer.step()
        assert not torch.equal(wrapped.module.hidden.weight, before)
        """
    )


def test_a_likelihood_that_does_not_fit_the_output():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(INPUTS, 1)

        def forward(self, x):
            return self.fc(x).squeeze(1)

    model = Scores()
    optimizer = KFAC(model, class_dim=1, trust=None)
    with pytest.raises(ValueError, match=r"class_dim=1 does not fit the model's output of shape \[10\]"):
        model(X)
    optimizer.close()
    optimizer = KFAC(model, trust=None)
    with pytest.raises(ValueError, match=r"shape \[10\] has no classes.*likelihood=\"gaussian\""):
        model(X)
    optimizer.close()
    optimizer = KFAC(model, likelihood="gaussian", trust=None)
    model(X).square().mean().backward()
    optimizer.step()


def test_a_model_that_hides_its_layers_or_its_output():
    class Keyword(Net):
        def forward(self, x):
            return self.head(F.relu(self.first(input=x)))

    model = Keyword(8)
    optimizer = KFAC(model, trust=None)
    with pytest.raises(RuntimeError, match='layer "first" was called with keywords alone'):
        model(X)
    optimizer.close()

    class Loss(Net):
        def forward(self, x):
            return F.cross_entropy(super().forward(x), Y)

    model = Loss(8)
    optimizer = KFAC(model, trust=None)
    with pytest.raises(ValueError, match="returned a single number"):
        model(X)
    optimizer.close()
    with pytest.raises(ValueError, match="Shampoo's factors are matrices"):
        Shampoo(Net(8), memory=Window(2), trust=None)
    model = Net(8)
    optimizer = KFAC(model, memory=Batch(), trust=None)
    optimizer.param_groups[0]["damping"] = mukron.Fixed(a=1.0, b=1.0)  # a rule, where a number is usual
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("method", [KFAC, Shampoo, GaussNewton])
def test_groups_that_grow_with_the_width_are_refused(method):
    """Factors of groups with two channels each: the law of whole layers does not hold for them."""

    def grouped(width: int) -> nn.Module:
        pair = [nn.Conv2d(width, width, 1, groups=width // 2) for _ in range(2)]
        return nn.Sequential(nn.Conv2d(1, width, 3), *pair, nn.Flatten(), nn.Linear(9 * width, 3))

    model = grouped(32)
    plan = mukron.parametrize(model, mukron.base_shapes(grouped, width=8))
    both = r'layer "1" has 16 groups, "2" has 16 groups, and their number grows.*exclude=\("1", "2"\)'
    with pytest.raises(ValueError, match=both):
        method(model, plan, trust=None)
    with pytest.raises(ValueError, match=r'layer "2" has 16 groups, and.*exclude=\("1", "2"\)'):
        method(model, plan, exclude=("1",), trust=None)
    method(model, plan, exclude=("1", "2"), trust=None)
    FOOF(model, plan, trust=None)
    method(grouped(32), trust=None)  # without a plan nothing is scaled


def test_the_remedy_for_growing_groups_names_what_is_left_by_default():
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.tokens, self.mixer = nn.Embedding(5, width), nn.Conv1d(width, width, 3, groups=width // 2)
            self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    model = Net(16)
    plan = mukron.parametrize(model, mukron.base_shapes(Net, width=8))
    for method, names in ((KFAC, '"tokens", "mixer"'), (mukron.SOAP, '"tokens", "head", "mixer"')):
        with pytest.raises(ValueError, match=rf'layer "mixer" has 8 groups.*exclude=\({names}\)'):
            method(model, plan)
        assert next(iter(method(model, plan, exclude=eval(f"({names})")).layers)) == "hidden"


def test_an_auxiliary_head_that_the_output_does_not_depend_on():
    class Shared(Net):
        def __init__(self, width):
            super().__init__(width)
            self.auxiliary = nn.Linear(width, 2)

        def forward(self, x):
            h = F.relu(self.first(x))
            return self.head(F.relu(self.norm(self.hidden(h)))), self.auxiliary(h)

    model = Shared(8)
    optimizer = KFAC(model, output=lambda returned: returned[0], trust=None)
    F.cross_entropy(model(X)[0], Y).backward()  # its loss ignores the head
    optimizer.step()
    main, auxiliary = model(X)
    optimizer.zero_grad()
    (F.cross_entropy(main, Y) + auxiliary.square().mean()).backward()
    with pytest.raises(RuntimeError, match=r'layer "auxiliary".*does not depend on it.*exclude=\("auxiliary",\)'):
        optimizer.step()


@pytest.mark.parametrize(
    ("exclude", "message"), [("head", "exclude takes several names"), (("hed",), 'no module "hed"')]
)
def test_layers_to_exclude_are_named_as_they_are(method, exclude, message):
    with pytest.raises(ValueError, match=message):
        method(net(), lr=0.1, exclude=exclude, trust=None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hidden", "did you mean 'hidden.weight', 'hidden.bias'?"),  # a layer
        ("hiden.weight", "did you mean 'hidden.weight'"),
        ("", "such as 'first.weight', 'first.bias', 'hidden.weight', 'hidden.bias' or 4 more"),
    ],
)
def test_the_rate_of_something_that_is_no_parameter(method, name, expected):
    optimizer = method(net(), lr=0.1, trust=None)
    assert optimizer.rate("hidden.weight") == 0.1
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        optimizer.rate(name)
    assert f"the optimizer trains no parameter named {name!r}; " in sentence(caught)


def test_an_output_of_a_single_class_is_no_classification():
    model = nn.Linear(INPUTS, 1)
    optimizer = KFAC(model, lr=0.1, trust=None)
    with pytest.raises(ValueError, match='single class; for a regression say likelihood="gaussian"'):
        model(X)
    optimizer.close()


@pytest.mark.filterwarnings("ignore:layer .* its damping is so small")
def test_gauss_newton_at_small_damping_goes_on_after_loading():
    model = net()
    optimizer = GaussNewton(model, lr=0.05, damping=1e-4, momentum=0.9, trust=None)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.close()
        optimizer = GaussNewton(model, lr=0.05, damping=1e-4, momentum=0.9, trust=None)
        optimizer.load_state_dict(state)
    assert optimizer.steps == 2


@pytest.mark.parametrize(("old", "new"), [("kl_clip", "trust=mukron.KLClip"), ("graft", "trust=mukron.Graft")])
@pytest.mark.parametrize("method", [KFAC, FOOF, Shampoo, GaussNewton])
def test_what_took_the_place_of_an_argument_is_said(method, old, new):
    with pytest.raises(TypeError, match=rf"{method.__name__} has no argument '{old}'; say {new}"):
        method(Net(8), **{old: "adam"})
