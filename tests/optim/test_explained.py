"""What ``explain`` and ``plan()`` say is what the optimizer does, by default and with every trust."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mukron import FOOF, KFAC, SOAP, GaussNewton, Shampoo, base_shapes, parametrize
from mukron.optim.spec import SPECS
from mukron.trust import USUAL, Trust

METHODS = {"kfac": KFAC, "foof": FOOF, "shampoo": Shampoo, "gauss-newton": GaussNewton}
TRUSTS = ("spectral:0.5", "kl:0.001", "graft:adam", "graft:sgd", "rms:0.2", "none")


class Words(nn.Module):
    """An embedding, a norm, and layers with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.norm, self.hidden, self.head = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.norm(self.embedding(tokens).mean(1)))))


MODEL = Words(32)
PLAN = parametrize(MODEL, base_shapes(Words, width=8))


def rows_of(table):
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


@pytest.mark.parametrize("sides", ["both", "input", "output"])
def test_explain_shows_damping_of_the_factors_that_shampoo_has(sides):
    optimizer = Shampoo(MODEL, PLAN, sides=sides, exclude=())
    rows = rows_of(PLAN.explain(f"shampoo:1/2,{sides}" if sides != "both" else "shampoo", exclude=(), whole=True))
    for layer in optimizer.layers.values():
        for block, entry in layer.blocks.items():
            shown = {name[4] for name, cell in rows[entry.name].items() if name.startswith("rho_") and cell != "-"}
            assert shown == set(optimizer.factors_of(layer, block)), entry.name


@pytest.mark.parametrize(
    ("method", "scheme", "told"), [("kfac", "mup", 1), ("foof", "mup", 1), ("kfac", "sp", 0), ("shampoo", "mup", 0)]
)
def test_explain_says_from_how_many_rows_on_ranks_decide(method, scheme, told):
    """Where damping is multiplied and a factor is made of rows."""
    notes = parametrize(Words(32), base_shapes(Words, width=8), scheme).explain(method).notes
    assert sum("rows (samples x positions x remembered batches) than the layer has inputs" in x for x in notes) == told


@pytest.mark.parametrize(
    ("method", "scheme", "told"),
    [*((method, "mup", 1) for method in ("shampoo", "soap", "muon")), ("kfac", "mup", 0), ("shampoo", "sp", 0)],
)
def test_explain_says_that_it_is_of_whole_matrices(method, scheme, told):
    """Where a matrix can be cut into blocks, whose number has a law."""
    notes = parametrize(Words(32), base_shapes(Words, width=8), scheme).explain(method).notes
    assert sum("Multipliers are those of whole matrices" in note for note in notes) == told


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("method", [*METHODS, "soap"])
def test_explain_shows_each_eps_that_the_optimizer_has(method, trust):
    """SOAP's own; Adam's where Adam is grafted or the fallback rule; none beside RMS, which has Adam's rates alone."""
    optimizer = {**METHODS, "soap": SOAP}[method](MODEL, PLAN, trust=trust, fallback="adamw")
    for name, row in rows_of(PLAN.explain(method, trust=trust, fallback="adamw", whole=True)).items():
        entry = optimizer.entries[name]
        own = f"{entry.eps:.4g}" if method == "soap" else f"{entry.adams_eps:.4g}" if trust == "graft:adam" else "-"
        assert row["eps x"] == (own if entry.preconditioned else f"{entry.adams_eps:.4g}"), name


@pytest.mark.parametrize("scheme", ["mup", "sp"])
@pytest.mark.parametrize("decay", ["constant", "1/width", 0.5])
def test_explain_always_shows_the_decay_that_a_step_makes(scheme, decay):
    """Of every optimizer, and in the groups of others; Adam alone has no decoupled decay, and no column for it."""
    model = Words(32)
    plan = parametrize(model, base_shapes(Words, width=8), scheme, decay=decay)
    for spec in SPECS.values():
        if spec.layerwise:
            for trust in (USUAL, None) if spec.method.damped else (None,):
                given = {"fallback": "sgd", **({"trust": trust} if spec.method.damped else {})}
                optimizer = spec.optimizer(model, plan, lr=0.1, weight_decay=0.1, **given)
                shown = rows_of(plan.explain(spec.method, **given, whole=True))
                assert {name: row["decay x"] for name, row in shown.items()} == {
                    entry.name: f"{entry.decay:.4g}" for entry in optimizer.entries.values()
                }
    for name in ("sgd", "adamw", "lion"):
        shown = {row["decay x"] for row in rows_of(plan.explain(name, whole=True)).values()}
        assert shown == {
            f"{g['lr'] * g['weight_decay'] / 0.01:.4g}" for g in plan.param_groups(name, 0.1, weight_decay=0.1)
        }
    assert {"AdamW, " + scheme, "Adam, " + scheme} == {plan.explain(name).title for name in ("adamw", "adam")}
    assert "decay" not in str(plan.explain("adam"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        *({"trust": trust} for trust in TRUSTS),
        {"fallback": "sgd"},
        {"fallback": "adamw", "trust": None},
        {"exclude": ()},
        {"exclude": ("hidden",), "trust": "rms"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_explain_is_what_the_optimizer_does(method, given):
    optimizer = METHODS[method](MODEL, PLAN, **given)
    table = PLAN.explain(method, **given, whole=True)
    for name, row in rows_of(table).items():
        entry = optimizer.entries[name]
        assert row["lr x"] == f"{entry.scale:.4g}", name
        assert row["why"].startswith("not preconditioned") != entry.preconditioned, name
        if not entry.preconditioned:
            title = {"sgd": "SGD", "adamw": "AdamW"}[optimizer.options.fallback.name]
            assert f"{title}'s row" in row["why"]
    trust = optimizer.options.trust
    for told in (str(table), str(optimizer.plan())):
        assert f"trust {'none' if trust is None else trust.text}:" in told


def test_embeddings_take_the_fallback_rule_beside_a_trust_alone():
    assert "not preconditioned, AdamW's row" in rows_of(PLAN.explain("kfac", whole=True))["embedding.weight"]["why"]
    plain = rows_of(PLAN.explain("kfac", trust=None, whole=True))
    assert "not preconditioned" not in plain["embedding.weight"]["why"]
    assert "SGD's row" in plain["norm.weight"]["why"]


def test_every_optimizer_has_the_usual_trust():
    for spec in SPECS.values():
        if spec.layerwise and spec.method.damped:  # without factors there is nothing to bound
            assert spec.defaults["trust"] == USUAL


LAWS = {
    "spectral:2": "times the learning rate. Until a layer's inverse is made again, it also moves by at most 2 times "
    "the move of the step that made the inverse; learning-rate multipliers are those of K-FAC itself.",
    "spectral:2:inf": "2 (d_out / d_in)^1/2 in spectral norm, times the learning rate; learning-rate multipliers are "
    "those of K-FAC itself.",
    "kl:0.01": "at most 0.01; learning-rate multipliers are those of K-FAC itself.",
    "graft:adam": "the length of a step of Adam; learning-rate multipliers are those of Adam. That law holds",
    "graft:sgd": "the length of a step of SGD; learning-rate multipliers are those of SGD. That law holds",
    "rms:0.1": "is 0.1, times the learning rate; learning-rate multipliers are those of Adam. That law holds",
    "none": "the paper's, of any length; learning-rate multipliers are those of K-FAC itself.",
}


@pytest.mark.parametrize("trust", LAWS)
def test_the_law_is_told(trust):
    assert LAWS[trust] in PLAN.explain("kfac", trust=trust).text(width=None)
    assert LAWS[trust] in KFAC(MODEL, PLAN, trust=trust).plan().text(width=None)


def test_methods_without_factors_have_no_trust():
    assert "trust" not in str(PLAN.explain("sgd"))
    assert rows_of(PLAN.explain("sgd", whole=True))["norm.weight"]["why"].startswith("one number per unit")


def test_every_kind_of_trust_says_what_it_means():
    assert all(kind().meaning and kind().text for kind in Trust.kinds.values())


def test_a_saved_plan_knows_its_embeddings(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    loaded = type(PLAN).load(tmp_path / "plan.json")
    assert str(loaded.explain("kfac")) == str(PLAN.explain("kfac"))
