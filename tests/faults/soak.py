"""How long the faults are tried, and the table of what became of them.

MUKRON_SOAK=N tries N changes of every kind of file, instead of the few of the usual tests. MUKRON_SOAK_TABLE=FOLDER
keeps the counts of each kind there, of which ``python tests/faults/soak.py FOLDER PAGE`` makes the table of PAGE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 600  # seconds for one fault, also on a machine with much else to do
SAME, REFUSED, SILENT, TRACEBACK, HANG = "read as it was", "refused", "wrong in silence", "traceback", "hang"
OUTCOMES = (SAME, REFUSED, SILENT, TRACEBACK, HANG)
WRONG = (SILENT, TRACEBACK, HANG)
MARKER = "<!-- faults -->"


def number(usual: int, slow: int | None = None) -> int:
    """How many faults of a kind to try.

    Args:
        usual: Without MUKRON_SOAK.
        slow: With it, for kinds whose faults take seconds each; by default as many as MUKRON_SOAK says.
    """
    soak = os.environ.get("MUKRON_SOAK")
    if soak is None:
        return usual
    return int(soak) if slow is None else slow


@contextmanager
def watched():
    """A hang is an error."""

    def end(number, frame):
        raise TimeoutError(f"not done after {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(use: Callable[[], bool]) -> tuple[str, str]:
    """What becomes of a fault.

    Args:
        use: Uses what is faulty; returns whether all is as it should be.

    Returns:
        One of ``OUTCOMES``, and what was wrong. A refusal is a ValueError, a TypeError or an OSError of one short line.
    """
    try:
        with watched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (SAME, "") if use() else (SILENT, "other numbers were taken")
    except TimeoutError:
        return HANG, traceback.format_exc()
    except (ValueError, OSError) as error:
        said = str(error)
        return (REFUSED, "") if said and len(said) < 3000 else (TRACEBACK, f"an error of {len(said)} characters")
    except Exception:
        return TRACEBACK, traceback.format_exc()


def check(kind: str, faults: int, try_one: Callable[[int], tuple[str, str]]) -> None:
    """Try faults by their numbers, keep the counts, and fail if one of them did harm.

    Args:
        kind: What is faulty.
        faults: How many.
        try_one: Tries the fault of a number.
    """
    found: Counter[str] = Counter()
    wrong = {}
    for seed in range(faults):
        what, said = try_one(seed)
        found[what] += 1
        if what in WRONG:
            wrong[f"seed {seed}: {what}: {said.strip().splitlines()[-1]:.200}"] = said
    keep(kind, found)
    assert not wrong, "\n".join([*wrong, *list(wrong.values())[:3]])


def keep(kind: str, found: Counter[str]) -> None:
    """Keep the counts of a kind for the table.

    Args:
        kind: What was faulty.
        found: How many faults had which outcome.
    """
    if folder := os.environ.get("MUKRON_SOAK_TABLE"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in kind)
        (Path(folder) / f"{name}.json").write_text(json.dumps({"kind": kind, **found}))


def table(folder: Path) -> str:
    """The table of all kinds that have left counts.

    Args:
        folder: The counts.
    """
    lines = [f"| what | tried | survived | {' | '.join(WRONG)} |", "| --- |" + " ---: |" * (2 + len(WRONG))]
    for file in sorted(folder.glob("*.json")):
        counts = json.loads(file.read_text())
        tried = sum(counts.get(name, 0) for name in OUTCOMES)
        survived = counts.get(SAME, 0) + counts.get(REFUSED, 0)
        cells = [counts["kind"], f"{tried:,}", f"{survived:,}", *(str(counts.get(name, 0)) for name in WRONG)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[2])
    before, _, after = page.read_text().split(MARKER)
    page.write_text(f"{before}{MARKER}\n{table(Path(sys.argv[1]))}\n{MARKER}{after}")
