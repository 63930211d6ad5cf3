"""Arguments of the wrong type are refused by their names, not by what fails first inside."""

from __future__ import annotations

import pytest

import mukron
from mukron.models import MLP
from mukron.study import Design, TransferStudy
from mukron.train import RunConfig, train

SMALL = RunConfig(method="sgd", width=8, base_width=8, samples=32, epochs=1)
DESIGN = {"widths": (8, 16), "lr": 0.1}


def kfac(**options):
    model = MLP(16)
    return mukron.KFAC(model, mukron.parametrize(model, mukron.base_shapes(MLP, width=8)), 0.1, **options)


WRONG = {
    "a config": (lambda: train({}), "config must be a RunConfig, got {}"),
    "no config": (lambda: train(None), "config must be a RunConfig, got None"),
    "a data set": (lambda: train(SMALL, dataset=5), "dataset must be a Dataset, got 5"),
    "checkpoints": (lambda: train(SMALL, checkpoint_every="x"), "checkpoint_every must be a whole number, got 'x'"),
    "a tracker": (lambda: train(SMALL, tracker=5), "tracker=5: expected a name"),
    "a design": (lambda: TransferStudy(SMALL), "design must be a Design, got RunConfig"),
    "a metric": (lambda: Design(SMALL, metric=5, **DESIGN), "metric must be a name, got 5"),
    "no rate": (lambda: Design(SMALL, widths=(8, 16), lr=None), "lr: expected numbers above 0, got None"),
    "a name": (lambda: TransferStudy(Design(SMALL, **DESIGN), name=5), "name must be a text, got 5"),
    "a heartbeat": (lambda: TransferStudy(Design(SMALL, **DESIGN), beat="x"), "beat must be a whole number, got 'x'"),
    "a storage": (lambda: TransferStudy(Design(SMALL, **DESIGN), storage=5), "storage must be a text, got 5"),
    "workers": (lambda: TransferStudy(Design(SMALL, **DESIGN)).run(1.5), "workers=1.5: expected a number of processes"),
    "a design's config": (lambda: Design(5, **DESIGN), "config must be a RunConfig, got 5"),
    "schemes": (lambda: Design(SMALL, schemes=5, **DESIGN), "schemes: expected names, .* got 5"),
    "a scheme": (lambda: Design(SMALL, schemes=[5], **DESIGN), r"schemes: expected names, .* got \[5\]"),
    "tuned": (lambda: mukron.plan(64, 5), "tuned must be the record of a study, its folder or a run, got 5"),
    "a base width": (lambda: mukron.base_shapes(MLP, width=8.5), "the widths of this network are whole numbers"),
    "a scheme of a plan": (lambda: mukron.parametrize(MLP(8), mukron.base_shapes(MLP, width=8), 5), "scheme must be"),
    "layers to exclude": (lambda: kfac(exclude=["typo"]), "typo"),
    "a memory": (lambda: kfac(memory="foo"), "unknown memory 'foo'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_the_wrong_type_is_refused_by_its_name(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, said = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=said):
        make()
    assert case == "workers" or not [*tmp_path.iterdir()]
