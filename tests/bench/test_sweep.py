"""A grid of runs, alone and as stacks: the same runs, and both are timed."""

from __future__ import annotations

from mukron.bench.measure import Options
from mukron.bench.sweep import AS_STACKS, ONE_AT_A_TIME, SweepRun, sweep_configs


def plain(work, description):
    return work


def test_stacks_come_to_what_runs_alone_come_to():
    run = SweepRun(Options((16,), batch=512, rounds=2, against="none", memory=False), "mukron bench sweep")
    (rows,) = run.rows(plain, plain)
    by_name = {row.method: row for row in rows}
    assert {name: len(row.milliseconds) for name, row in by_name.items()} == {ONE_AT_A_TIME: 2, AS_STACKS: 2}
    assert by_name[AS_STACKS].differs is not None
    assert by_name[AS_STACKS].differs < 1e-9
    assert "a stack" in by_name[AS_STACKS].note


def test_the_grid_is_of_rates_and_seeds():
    configs = sweep_configs(128, Options((128,), batch=64, against="none", memory=False))
    assert len({(config.lr, config.seed) for config in configs}) == len(configs) == 64
    assert {config.width for config in configs} == {128}
