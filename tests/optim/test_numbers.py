"""Precisions, numbers that are not finite, failed factorizations, wrong input, and what the width does to damping."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from alone import run_with_a_process_group
from mukron import FOOF, KFAC, Constant, Fixed, GaussNewton, Heuristic, MaxEigenvalue, Rescaled, Shampoo
from mukron.linalg import Operator
from networks import INPUTS, Net

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(10, INPUTS, generator=DATA), torch.randint(5, (10,), generator=DATA)


@pytest.fixture(params=METHODS)
def method(request):
    torch.manual_seed(0)
    return METHODS[request.param]


def backward(model, x=X, scale=1.0):
    (F.cross_entropy(model(x).float(), Y) * scale).backward()


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, list):
        for each in value:
            yield from tensors(each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_keep_float32_factors(method, dtype):
    model = Net(8).to(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = method(model, lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, X.to(dtype))
        optimizer.step()
    assert all(p.dtype == dtype for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for slot in optimizer.layers.values():
        state = optimizer.state[slot.anchor]
        kept = [t for key in ("memory", "operators") for t in tensors(state.get(key, {}))]
        assert kept
        assert all(t.dtype == torch.float32 for t in kept if t.is_floating_point())
    loaded = method(Net(8).to(dtype), lr=0.05, momentum=0.9)
    loaded.load_state_dict(optimizer.state_dict())
    slot = next(iter(loaded.layers.values()))
    assert all(t.dtype == torch.float32 for t in tensors(loaded.state[slot.anchor]["operators"]))


def test_autocast_steps_nearly_as_float32(method):
    plain = Net(8)
    cast = copy.deepcopy(plain)
    options = {"fisher": "exact"} if method is KFAC else {}
    for model, enabled in ((plain, False), (cast, True)):
        optimizer = method(model, lr=0.05, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            backward(model)
        optimizer.step()
    moved = torch.cat(
        [(a - b).detach().flatten() for a, b in zip(plain.parameters(), Net(8).parameters(), strict=True)]
    )
    off = torch.cat([(a - b).detach().flatten() for a, b in zip(plain.parameters(), cast.parameters(), strict=True)])
    assert float(off.norm()) < 0.1 * float(moved.norm())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_grad_scaler_changes_nothing(fisher):
    """Gradients are unscaled by the scaler, empirical signals by us."""
    torch.manual_seed(0)
    plain = Net(8)
    scaled = copy.deepcopy(plain)
    reference = KFAC(plain, lr=0.05, fisher=fisher)
    backward(plain)
    reference.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = KFAC(scaled, lr=0.05, fisher=fisher, grad_scaler=scaler if fisher == "empirical" else None)
    scaler.scale(F.cross_entropy(scaled(X), Y)).backward()
    scaler.step(optimizer)
    scaler.update()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_overflow_is_skipped_by_the_scaler_and_leaves_no_trace():
    model = Net(8)
    optimizer = KFAC(model, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(F.cross_entropy(model(X), Y) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    backward(model)
    assert optimizer.capture.samples == 10
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("what", ["gradient", "input", "output"])
def test_numbers_that_are_not_finite_skip_the_step(method, what):
    model = Net(8)
    optimizer = method(model, lr=0.05)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    states = copy.deepcopy(optimizer.state_dict()["state"])
    x = X.clone()
    if what == "input":
        x[0, 0] = float("inf")
    backward(model, x, scale=float("nan") if what == "output" else 1.0)
    if what == "gradient":
        model.hidden.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(map(torch.equal, before, model.parameters()))
    kept = list(tensors(optimizer.state_dict()["state"]))
    assert all(map(torch.equal, tensors(states), kept))
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_failed_factorization_is_rescued_counted_and_told_once(monkeypatch):
    """A matrix that is not positive definite, as rounding can make one: more damping, counted by layer."""
    model = Net(8)
    optimizer = KFAC(model, lr=0.05, form="matrix", damping=Constant(0.1))
    measure = KFAC.measure

    def spoiled(self, slot, gathered, gradients):
        blocks = measure(self, slot, gathered, gradients)
        if slot.name == "hidden":
            A = blocks["weight"]["A"]
            A.M = A.M - torch.eye(A.d) * (torch.linalg.eigvalsh(A.M)[0, 0] + 0.5)  # lowest eigenvalue -0.5
        return blocks

    monkeypatch.setattr(KFAC, "measure", spoiled)
    backward(model)
    with pytest.warns(RuntimeWarning, match='layer "hidden", factor A: factorized with 10 x damping'):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert optimizer.rescues == {"hidden A: 10 x damping": 2}
    assert "2 factorizations rescued" in optimizer.plan().title


def test_when_no_rung_holds_the_last_inverse_is_kept(monkeypatch):
    model = Net(8)
    optimizer = KFAC(model, lr=0.05, form="matrix")
    backward(model)
    optimizer.step()
    slot = optimizer.layers["hidden"]
    before = [t.clone() for t in tensors(optimizer.state[slot.anchor]["operators"])]
    measure = KFAC.measure

    def hopeless(self, slot, gathered, gradients):
        blocks = measure(self, slot, gathered, gradients)
        if slot.name == "hidden":
            blocks["weight"]["A"].M = -1e6 * torch.eye(blocks["weight"]["A"].d)[None]
        return blocks

    monkeypatch.setattr(KFAC, "measure", hopeless)
    optimizer.zero_grad()
    backward(model)
    with pytest.warns(RuntimeWarning, match="kept the last inverse"):
        optimizer.step()
    assert all(map(torch.equal, before, tensors(optimizer.state[slot.anchor]["operators"])))
    fresh = Net(8)
    other = KFAC(fresh, lr=0.05, form="matrix")
    backward(fresh)
    with pytest.raises(RuntimeError, match=r'layer "hidden": .* could not be factorized.*raise the damping'):
        other.step()


def wide(base=8, width=32, scheme="mup"):
    torch.manual_seed(0)
    model = Net(width)
    return model, mukron.parametrize(model, mukron.base_shapes(Net, width=base), scheme)


def damping_of(optimizer, model, layer, factor, x=X):
    """What was added to a factor, read back from the prepared inverse."""
    backward(model, x)
    M = getattr(optimizer.capture.gather()[layer], factor).factor().M[0]
    optimizer.step()
    state = optimizer.state[optimizer.layers[layer].anchor]["operators"]["weight"][factor]
    P = Operator.from_state(state).right(torch.eye(len(M)).to(M)[None])[0]
    return float((torch.linalg.inv(P) - M).diagonal().mean()), M


@pytest.mark.parametrize(
    ("factor", "layer", "growth"), [("A", "hidden", 4), ("A", "first", 1), ("B", "hidden", 4), ("B", "head", 1)]
)
def test_rescaled_damping_divides_by_the_base_size(factor, layer, growth):
    """At four times the width: rho tr(M) / (d / 4) on an infinite side, rho tr(M) / d on a finite one."""
    model, plan = wide()
    model = model.double()
    optimizer = KFAC(model, plan, lr=0.0, damping=Rescaled(0.3), fisher="exact", form="matrix")
    rho, M = damping_of(optimizer, model, layer, factor, X.double())
    assert rho == pytest.approx(0.3 * float(M.trace()) / len(M) * growth, rel=1e-6)


def test_fixed_damping_follows_the_theory():
    model, plan = wide()
    optimizer = KFAC(model, plan, lr=0.0, damping=Fixed(a=0.5, b=0.2), fisher="exact", form="matrix")
    rho, _ = damping_of(optimizer, model, "hidden", "A")
    assert rho == pytest.approx(0.5 * 4, rel=1e-2)
    model, plan = wide()
    optimizer = KFAC(model, plan, lr=0.0, damping=Fixed(a=0.5, b=0.2), fisher="exact", form="matrix")
    rho, _ = damping_of(optimizer, model, "hidden", "B")
    assert rho == pytest.approx(0.2 / 4, rel=1e-2)


def test_learning_rates_follow_the_method(method):
    """The optimizer applies its own exponents: FOOF's hidden step is r_out times SP's with the same curvature."""
    model, plan = wide()
    optimizer = method(model, plan, lr=0.1)
    scales = plan.scales(optimizer.method)
    for name, parameter in model.named_parameters():
        expected = plan.scales("sgd")[name].lr if name.startswith("norm") else scales[name].lr
        assert optimizer.rate(parameter) == pytest.approx(0.1 * expected)
    grafted = method(model, plan, lr=0.1, graft="sgd")
    assert grafted.rate(model.head.weight) == pytest.approx(0.1 * plan.scales("sgd")["head.weight"].lr)
    other = method(model, plan, lr=0.1, fallback="adamw", fallback_lr=0.01)
    assert other.rate(model.norm.weight) == pytest.approx(0.01 * plan.scales("adamw")["norm.weight"].lr)


def test_a_bare_number_means_the_rule_that_mup_allows():
    assert KFAC(Net(8), damping=2.0).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert FOOF(Net(8), damping=2.0).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert GaussNewton(Net(8), damping=2.0).param_groups[0]["damping_rule"] == Rescaled(2.0).plain()
    assert Shampoo(Net(8), damping=2.0).param_groups[0]["damping_rule"] == MaxEigenvalue(2.0).plain()


@pytest.mark.parametrize("method", [KFAC, FOOF])
@pytest.mark.parametrize("planned", [True, False])
def test_the_nngp_trap_is_told(method, planned):
    model, plan = wide()
    if planned:
        model = Net(32)
        plan = mukron.parametrize(model, mukron.base_shapes(Net, width=8), output_exponent=64)
    else:
        plan = None
        nn.init.zeros_(model.head.weight)
    with pytest.warns(UserWarning, match=r'output layer "head" starts at \(nearly\) zero.*kernel-regression'):
        method(model, plan)


def test_an_output_layer_that_is_small_but_not_zero_is_another_trap():
    model, plan = wide()
    model.head.weight.data.mul_(1e-8)
    with pytest.warns(UserWarning, match="near zero, but not at it: KFAC's first step in the layers below grows"):
        KFAC(model, plan)
    with pytest.warns(UserWarning, match="kernel-regression"):  # FOOF does not divide by B
        FOOF(model, plan)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_a_gradient_is_recognized_at_any_size(size):
    """Its layer's own, whatever its size; the check must not see rounding to zero as another use of the weight."""
    model = Net(64)
    optimizer = KFAC(model, lr=0.05, fallback_lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, scale=size)
        optimizer.step()
    assert optimizer.skipped == 0


def test_no_nngp_warning_where_there_is_no_trap():
    model, plan = wide()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(model, plan)
        nn.init.zeros_(model.head.weight)
        Shampoo(model, plan)
        GaussNewton(model, plan)


def test_plan_tells_form_memory_and_work():
    model = Net(64)
    optimizer = KFAC(model, lr=0.05)
    assert "after the first step" in str(optimizer.plan())
    backward(model)
    optimizer.step()
    rows = {row[0]: row for row in optimizer.plan().rows}
    assert rows["hidden"][1] == "64 x 64"
    assert rows["hidden"][2] == "A: sample space, 10 rows of 64, B: sample space, 10 rows of 64"
    assert "matrix 12" in rows["first"][2]
    assert "norm.weight, norm.bias" in str(optimizer.plan())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KFAC(Net(8), lr=-0.1), "lr must not be negative, got -0.1"),
        (lambda: KFAC(Net(8), lr=float("nan")), "lr must not be negative"),
        (lambda: KFAC(Net(8), damping=-1.0), r"damping must not be negative: Rescaled\(rho=-1.0\)"),
        (lambda: KFAC(Net(8), damping=Fixed(a=1.0, b=-1.0)), r"Fixed\(b=-1.0\)"),
        (lambda: KFAC(Net(8), momentum=1.0), r"momentum must lie in \[0, 1\)"),
        (lambda: KFAC(Net(8), nesterov=True), "nesterov=True needs momentum"),
        (lambda: KFAC(Net(8), weight_decay=-1.0), "weight_decay must not be negative"),
        (lambda: KFAC(Net(8), fisher="mcc"), "unknown fisher 'mcc'; known: 'mc', 'exact', 'empirical'"),
        (lambda: KFAC(Net(8), likelihood="poisson"), "unknown likelihood 'poisson'"),
        (lambda: KFAC(Net(8), sharing="both"), "unknown sharing 'both'; known: 'expand', 'reduce'"),
        (lambda: KFAC(Net(8), solver="lu"), "unknown solver 'lu'"),
        (lambda: KFAC(Net(8), form="sparse"), "unknown form 'sparse'"),
        (lambda: KFAC(Net(8), fallback="lion"), "unknown fallback 'lion'; known: sgd, adamw"),
        (lambda: KFAC(Net(8), graft="lion"), "unknown graft 'lion'"),
        (lambda: KFAC(Net(8), kl_clip=0.0), "kl_clip must be positive"),
        (lambda: KFAC(Net(8), factor_every=0), "factor_every counts steps"),
        (lambda: KFAC(nn.LayerNorm(3)), "nothing to precondition: no Linear, Conv or Embedding"),
        (lambda: KFAC(Net(8), exclude=("first", "hidden", "head")), "nothing to precondition.*not in exclude="),
        (lambda: KFAC(nn.ReLU()), "ReLU has no parameters"),
        (lambda: mukron.EMA(1.0), r"EMA's decay must lie in \[0, 1\)"),
        (lambda: mukron.Window(0), "a window holds at least one batch"),
        (lambda: Shampoo(Net(8), e=-1), "must not be negative"),
        (lambda: Shampoo(Net(8), solver="cholesky"), "unknown solver 'cholesky'"),
        (lambda: GaussNewton(Net(8), reduction="none"), "unknown reduction 'none'"),
    ],
)
def test_wrong_input_is_told(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_input_of_other_kinds():
    with pytest.raises(TypeError, match="FOOF has no Fisher factor: fisher would have no effect"):
        FOOF(Net(8), fisher="exact")
    mixed = Net(8)
    mixed.head = nn.Linear(8, 5, device="meta")
    with pytest.raises(ValueError, match="several devices"):
        KFAC(mixed)
    model = Net(8)
    optimizer = FOOF(model, damping=Heuristic(1.0))
    backward(model)
    with pytest.raises(ValueError, match="the heuristic damping balances A against B"):
        optimizer.step()
    plan = mukron.parametrize(Net(16), mukron.base_shapes(Net, width=8))
    with pytest.raises(mukron.ParametrizationError, match="in this network"):
        KFAC(Net(32), plan)
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = Shampoo(nn.Sequential(model))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r'"0\.weight" has a sparse gradient'):
        optimizer.step()


def test_data_parallel_over_several_devices_is_refused():
    wrapped = nn.DataParallel(Net(8))
    wrapped.device_ids = [0, 1]
    with pytest.raises(ValueError, match="DataParallel runs copies of the layers"):
        KFAC(wrapped)


def test_distributed_data_parallel_works_alone_and_is_refused_in_company():
    run_with_a_process_group(
        """
        import pytest
        from networks import INPUTS, Net
        from mukron import KFAC

        wrapped = nn.parallel.DistributedDataParallel(Net(8))
        optimizer = KFAC(wrapped, lr=0.05)
        before = wrapped.module.hidden.weight.detach().clone()
        wrapped(torch.randn(10, INPUTS)).logsumexp(1).mean().backward()
        optimizer.step()
        assert not torch.equal(wrapped.module.hidden.weight, before)
        torch.distributed.get_world_size = lambda: 2
        with pytest.raises(ValueError, match="over several processes is not supported"):
            KFAC(wrapped)
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
    optimizer = KFAC(model, class_dim=1)
    with pytest.raises(ValueError, match=r"class_dim=1 does not fit the model's output of shape \[10\]"):
        model(X)
    optimizer.close()
    optimizer = KFAC(model)
    with pytest.raises(ValueError, match=r"shape \[10\] has no classes.*likelihood=\"gaussian\""):
        model(X)
    optimizer.close()
    optimizer = KFAC(model, likelihood="gaussian")
    model(X).square().mean().backward()
    optimizer.step()
