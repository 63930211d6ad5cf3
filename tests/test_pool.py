"""Calls in several processes: what comes back, errors, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from mukron.workers.pool import WorkerPool


def test_one_worker_is_this_process():
    with WorkerPool(1) as pool:
        assert pool.call(os.getpid) == os.getpid()


def test_several_workers_share_the_work_and_the_cores():
    found, processes, threads = [], set(), set()

    def work(item):
        found.append(item)
        processes.add(pool.call(os.getpid))
        threads.add(pool.call(torch.get_num_threads))

    with WorkerPool(2) as pool:
        pool.for_each(range(6), work)
    assert sorted(found) == [*range(6)]
    assert os.getpid() not in processes
    assert threads == {max(1, len(os.sched_getaffinity(0)) // 2)}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_ends_it(workers):
    def work(item):
        pool.call(time.sleep, 0.02)  # the other process may take long to start
        done.append(pool.call(int, item))

    done = []
    with pytest.raises(ValueError, match="invalid literal"), WorkerPool(workers) as pool:
        pool.for_each(["1", "no number", *["2"] * 2000], work)
    assert len(done) < 2000


SLEEPER = """
import time
from mukron.workers.pool import WorkerPool

if __name__ == "__main__":
    with WorkerPool(2) as pool:
        def work(seconds):
            pool.call(time.sleep, seconds)
            print("slept", flush=True)
        try:
            pool.for_each([0, *[1000] * 5], work)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def test_ctrl_c_ends_the_workers_at_once(tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "slept\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n"


ANNOUNCED = """
import os, time
from mukron.workers.pool import WorkerPool

if __name__ == "__main__":
    with WorkerPool(2) as pool:
        print(pool.call(os.getpid), flush=True)
        pool.call(time.sleep, 1000)
"""


def test_workers_end_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "announced.py"
    script.write_text(ANNOUNCED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        process.kill()
    for _ in range(100):
        if not os.path.exists(f"/proc/{worker}"):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived the process that started it")
