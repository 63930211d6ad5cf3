"""The coordinate check on real networks, from Python."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mukron
from mukron.diagnose import Check, coordinate_check, depth_check
from mukron.models import MLP, ResidualMLP
from networks import GPT, GPT_ROLES, LENGTH, VOCABULARY

WIDTHS = (128, 256, 512)


def data(samples: int = 32, inputs: int = 16, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, inputs, generator=generator), torch.randint(classes, (samples,), generator=generator)


def mlp(width: int) -> nn.Module:
    return MLP(width, inputs=16, classes=4)


def sgd(lr: float):
    return lambda model, plan: torch.optim.SGD(plan.param_groups("sgd", lr=lr))


def kfac(**options):
    return lambda model, plan: mukron.KFAC(model, plan, lr=0.01, **{"trust": None, **options})


@pytest.fixture(scope="module")
def learned():
    return coordinate_check(mlp, kfac(), data(), base_width=32, widths=WIDTHS, seeds=2, steps=2)


def test_mup_learns(learned):
    learned.assert_ok()
    assert learned.exit_code == 0
    assert [verdict.layer for verdict in learned.features] == [
        *("fc1", "fc2", "fc3", "output"),
        *("fc1.weight", "fc2.weight", "fc3.weight"),
        "output",  # along the descent
    ]
    assert {verdict.predicted for verdict in learned.features} == {0.0}
    assert "OK: every layer learns alike at every width." in str(learned)


def test_curvature_follows_its_law(learned):
    """Largest eigenvalues of A and B go like the theory's powers of the width, and damping with them."""
    assert {verdict.word for verdict in learned.damping} == {"valid"}
    rows = {row[0]: row[1:] for row in learned.spectra_table().rows}
    for factor, exponent in {"fc2.A": 1, "fc2.B": -1, "fc3.A": 1, "fc1.B": -1}.items():
        slope = float(rows[factor][0].split(", ")[1].split(" ")[0])
        assert slope == pytest.approx(exponent, abs=0.2), (factor, slope)
    assert rows["fc2.B"][1].endswith("[-2]")  # the mean eigenvalue


def test_hidden_weights_stay_near_where_they_began(learned):
    """|dW| / |W| of a hidden layer falls like the root of the width under muP: its update has low rank."""
    rows = {row[0]: float(row[2].split(", ")[1]) for row in learned.distance_table().rows}
    assert rows["fc1.weight"] == pytest.approx(0, abs=0.15)
    assert rows["fc2.weight"] == pytest.approx(-0.5, abs=0.15)


def test_sp_does_not():
    result = coordinate_check(mlp, sgd(0.01), data(), base_width=32, widths=WIDTHS, seeds=2, steps=2, scheme="sp")
    assert not result.ok
    words = {verdict.layer: verdict.word for verdict in result.features}
    assert (words["fc1"], words["fc2"], words["output"]) == ("vanishes", "explodes", "explodes")
    for verdict in result.features:
        assert verdict.measured.slope == pytest.approx(verdict.predicted, abs=0.2), verdict


def test_a_wrong_learning_rate_of_one_layer_is_found():
    """The middle layer's own update vanishes; its features, which move with those below, do not show it."""

    def forgetful(model, plan):
        groups = plan.param_groups("sgd", lr=0.1)
        for group in groups:
            if group["role"] == "hidden":
                group["lr"] /= model.fc2.in_features / 32
        return torch.optim.SGD(groups)

    result = coordinate_check(mlp, forgetful, data(), base_width=32, widths=WIDTHS, seeds=2, steps=2)
    assert [verdict.layer for verdict in result.failures] == ["fc2.weight"]
    assert result.failures[0].word == "vanishes"


def test_results_are_files_that_can_be_looked_at(learned, tmp_path):
    written = learned.save(tmp_path / "check")
    names = {path.name for path in written}
    kinds = ("features", "damping", "spectra", "distance")
    assert names == {"check.json", *(f"{kind}.{ending}" for kind in kinds for ending in ("svg", "png", "csv"))}
    content = json.loads((tmp_path / "check" / "check.json").read_text(), parse_constant=pytest.fail)
    assert content["ok"] is True
    assert Check.load(tmp_path / "check" / "check.json").record == learned.record
    assert len(content["record"]["rows"]) == len(learned.record.rows)
    lines = (tmp_path / "check" / "features.csv").read_text().splitlines()
    assert lines[0] == "width,seed,step,quantity,layer,value"
    assert len(lines) == 1 + 3 * 2 * 2 * 8
    assert (tmp_path / "check" / "features.png").read_bytes()[:4] == b"\x89PNG"
    assert "vanishes" not in (tmp_path / "check" / "features.svg").read_text()


def test_an_unknown_figure(learned):
    with pytest.raises(ValueError, match="known: features, damping, spectra, distance"):
        learned.figure("feature")


def test_a_run_that_explodes_is_a_verdict_and_no_crash(tmp_path):
    result = coordinate_check(mlp, sgd(1e20), data(), base_width=32, widths=(32, 64), seeds=1, steps=5)
    assert not result.ok
    assert "the loss is" in result.verdict()
    result.save(tmp_path)


def test_a_transformer_with_tied_weights():
    """Several kinds of layers, a bare parameter, attention, one weight in two places."""
    words = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0))

    def adamw(model, plan):
        return torch.optim.AdamW(plan.param_groups("adamw", lr=1e-3))

    def loss(output, targets):
        return F.cross_entropy(output.flatten(0, 1), targets.flatten())

    batch = ((words,), words)
    wanted = {"base_width": 16, "widths": (64, 128, 256), "seeds": 2, "steps": 2, "loss": loss, "roles": GPT_ROLES}
    result = coordinate_check(GPT, adamw, batch, **wanted)
    assert {verdict.role for verdict in result.features} >= {"input", "hidden", "vector"}
    assert result.damping == []
    assert all(math.isfinite(row.value) for row in result.record.rows)
    output = next(verdict for verdict in result.features if verdict.layer == "output")
    assert output.word == "learns"


def test_an_optimizer_that_theory_does_not_know():
    def rprop(model, plan):
        return torch.optim.Rprop(model.parameters(), lr=1e-4)

    result = coordinate_check(mlp, rprop, data(), base_width=32, widths=(64, 128), seeds=1, steps=1)
    assert {verdict.predicted for verdict in result.features} == {None}
    assert result.title.startswith("this optimizer, mup, base width 32")
    assert "does not use the plan" in result.verdict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (64,)}, "at least two widths"),
        ({"steps": 0}, "at least 1, got 0"),
        ({"seeds": ()}, "at least one seed"),
    ],
)
def test_wrong_requests(changes, message):
    wanted = {"base_width": 32, "widths": (64, 128), "seeds": 1, "steps": 1, **changes}
    with pytest.raises(ValueError, match=message):
        coordinate_check(mlp, sgd(0.1), data(), **wanted)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda model, plan: plan.param_groups("sgd", lr=0.1), "it made a list"),
        (lambda model, plan: None, "it made a NoneType"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "it is a SGD"),
    ],
)
def test_what_makes_no_optimizer_is_told(optimizer, said):
    shown = r"torch\.optim\.SGD\(plan\.param_groups\(\"sgd\", lr=0\.1\)\); " + said
    with pytest.raises(TypeError, match=shown):
        coordinate_check(mlp, optimizer, data(), base_width=32, widths=(64, 128))
    with pytest.raises(TypeError, match=shown):
        depth_check(
            lambda width, depth: ResidualMLP(width, depth=depth, base_depth=2, inputs=16, classes=4),
            *(optimizer, data()),
            base_width=16,
            base_depth=2,
        )


class Output(dict):
    @property
    def logits(self):
        return self["logits"]


class Returned(nn.Module):
    """A network that returns what those of transformers do."""

    def __init__(self, width):
        super().__init__()
        self.network = mlp(width)

    def forward(self, pixels):
        return Output(logits=self.network(pixels))


def test_networks_that_return_no_tensor_need_a_loss():
    x, y = data()
    usual = {"base_width": 32, "widths": (64, 128), "seeds": 1, "steps": 1}
    with pytest.raises(TypeError, match=r"returned a Output.* loss=lambda returned, targets: F\.cross"):
        coordinate_check(Returned, sgd(0.01), ({"pixels": x}, y), **usual)
    found = coordinate_check(
        Returned, sgd(0.01), ({"pixels": x}, y), **usual, loss=lambda returned, y: F.cross_entropy(returned.logits, y)
    )
    assert found.record.rows


@pytest.mark.parametrize("batch", [{"pixels": data()[0], "labels": data()[1]}, data()[0], (data()[0],)])
def test_a_batch_is_a_pair(batch):
    with pytest.raises(TypeError, match=r"batch is a pair, \(inputs, targets\).* got a (dict|Tensor|tuple)"):
        coordinate_check(mlp, sgd(0.01), batch, base_width=32, widths=(64, 128))


def test_what_does_not_train_is_said_and_does_not_fail():
    """A frozen input layer, a head outside the loss, and a bias whose gradient a batch norm takes away."""

    class Partly(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(16, width).requires_grad_(False)
            self.hidden = nn.Linear(width, width)
            self.norm = nn.BatchNorm1d(width)
            self.head, self.other = nn.Linear(width, 4), nn.Linear(width, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.hidden(self.first(x).relu())).relu()
            self.other(h)
            return self.head(h)

    result = coordinate_check(Partly, sgd(0.1), data(), base_width=32, widths=(128, 256, 512), seeds=3, steps=2)
    words = {(verdict.reading, verdict.layer): verdict.word for verdict in result.features}
    assert words["features", "first"] == words["own update", "first.weight"] == "frozen"
    assert words["features", "other"] == words["own update", "other.weight"] == "unused"
    assert words["own update", "hidden.bias"] == "no part"
    assert {verdict.word for verdict in result.failures} <= {"unclear"}


def test_a_learning_rate_of_zero_is_no_excuse():
    def lame(model, plan):
        groups = plan.param_groups("sgd", lr=0.1)
        for group in groups:
            group["lr"] *= group["role"] != "hidden"
        return torch.optim.SGD(groups)

    result = coordinate_check(mlp, lame, data(), base_width=32, widths=(64, 128), seeds=1, steps=1)
    assert {verdict.layer: verdict.word for verdict in result.failures}["fc2.weight"] == "not in the optimizer"


def test_an_optimizer_that_forgets_the_plan_is_told():
    def forgetful(model, plan):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    result = coordinate_check(mlp, forgetful, data(), base_width=32, widths=WIDTHS, seeds=1, steps=1)
    assert not result.ok
    assert "The optimizer does not use the plan: give it plan.param_groups(...)" in result.verdict()


def test_theory_says_nothing_of_another_output_exponent():
    wanted = {"base_width": 32, "widths": (64, 128), "seeds": 1, "steps": 1, "output_exponent": 2}
    result = coordinate_check(mlp, sgd(0.1), data(), **wanted)
    assert {verdict.predicted for verdict in result.features} == {None}


def test_numbers_of_other_kinds_and_twice_the_same(tmp_path):
    random = torch.get_rng_state()
    result = coordinate_check(
        mlp, sgd(0.1), data(), base_width=32, widths=[*2 ** np.arange(6, 8), 64], seeds=1, steps=1
    )
    result.save(tmp_path)
    assert Check.load(tmp_path / "check.json").record.widths == (64, 128)
    assert len(result.record.select("features", "fc1")) == 2
    assert torch.equal(torch.get_rng_state(), random)


def test_inputs_that_are_no_numbers_are_a_verdict(tmp_path):
    x, y = data()
    result = coordinate_check(mlp, sgd(0.1), (x * math.nan, y), base_width=32, widths=(64, 128), seeds=1, steps=1)
    assert "2 of the runs broke (width 128, seed 0: the loss is nan after 0 steps)" in str(result)
    result.save(tmp_path)
    with pytest.raises(AssertionError, match="broke"):
        result.assert_ok()


def test_numbers_are_written_without_matplotlib(learned, tmp_path, monkeypatch):
    monkeypatch.setattr("mukron.figures.available", lambda: False)
    assert {path.suffix for path in learned.save(tmp_path)} == {".json", ".csv"}
    with pytest.raises(ValueError, match="figures need matplotlib"):
        learned.figure()


def test_progress_is_told():
    told = []
    coordinate_check(
        mlp, sgd(0.1), data(), base_width=32, widths=(64, 128), seeds=2, steps=1, progress=lambda *at: told.append(at)
    )
    assert [at[:2] for at in told] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[0][2] == "width 128, seed 0"  # the widest first: its time is known at once


def test_the_default_widths_begin_above_the_base():
    """At the base width muP and SP are the same network: it tells nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = coordinate_check(mlp, sgd(0.1), data(), base_width=8, seeds=1, steps=1)
    assert result.record.widths == (32, 64, 128, 256)
