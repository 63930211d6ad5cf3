"""The best learning rate transfers with bounded steps and inverses that are kept for ten steps."""

from __future__ import annotations

import pytest

from mukron.study import Design, TransferStudy
from mukron.study.certificate import TRANSFERS
from mukron.train import RunConfig

OPTIONS = {"inverse_every": 10, "refresh_warmup": 10}  # as they are by default, beside the default trust


@pytest.mark.slow
def test_the_best_learning_rate_transfers(tmp_path):
    """The study of ``make demo`` with fewer widths and learning rates: 40 steps on 1,024 digits."""
    config = RunConfig(
        method="kfac", base_width=64, samples=1024, loss="mse", epochs=5, batch=128, method_options=OPTIONS
    )
    rates = [2.0**z for z in range(-4, 1)]
    design = Design(config, widths=(64, 128, 256, 512), lr=rates, schemes=("mup",), seeds=5)
    certificate = TransferStudy(design, folder=tmp_path).run().certificate
    assert certificate is not None
    [judgement] = certificate.judgements
    assert judgement.verdict == TRANSFERS, str(certificate.table())
    assert certificate.exit_code == 0
