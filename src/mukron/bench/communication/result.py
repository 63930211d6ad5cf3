"""What was counted, as it is stored, and the tables of it."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from mukron import __version__
from mukron.bench.communication.ranks import (
    ALL_REDUCED,
    AS_IT_IS,
    COUNTED_KFACS,
    EMPIRICAL,
    PAPERS_STEP,
    SGD,
    CountedStep,
)
from mukron.optim.communication import BY_TIME, WAYS
from mukron.optim.ranked_run import DDP, PLAIN
from mukron.params.storage import check_stamp, damaged, read_json, stamp, write_json
from mukron.table import Table, bytes_
from mukron.typed import read_as

KIND, VERSION = "communication", 1
NAME = "communication"  # of its files
KFACS = {  # as titles of tables name them
    AS_IT_IS: "K-FAC as it is by default",
    EMPIRICAL: 'K-FAC with fisher="empirical"',
    PAPERS_STEP: "K-FAC with the paper's step (trust=None)",
}
WHO_AVERAGES = {PLAIN: "which averages gradients itself (process_group=)", DDP: "in DistributedDataParallel"}


@dataclass(frozen=True)
class CommunicationResult:
    """Counted steps, and where they come from.

    Attributes:
        command: The command that counts them again.
        versions: Versions by package.
        date: The day they were counted.
        steps: What arrived.

    Example:
        >>> result = CommunicationResult.new("mukron bench communication", [])
        >>> [table.rows for table in result.tables()]
        [(), (), (), ()]
    """

    command: str
    versions: dict[str, str]
    date: str
    steps: tuple[CountedStep, ...]

    @classmethod
    def new(cls, command: str, steps: Iterable[CountedStep]) -> CommunicationResult:
        """Counted today, here.

        Args:
            command: The command that counts them again.
            steps: What arrived.
        """
        versions = {"mukron": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return cls(command, versions, datetime.now(timezone.utc).date().isoformat(), tuple(steps))

    @classmethod
    def load(cls, path: Path) -> CommunicationResult:
        """As ``save`` stored it.

        Args:
            path: The file.
        """
        data = check_stamp(read_json(path), KIND, VERSION, str(path))
        fields = {name: value for name, value in data.items() if name not in ("format", "version")}
        with damaged(str(path)):
            result: CommunicationResult = read_as(cls, fields, "result")
            if any(step.predicted <= 0 for step in result.steps):
                raise ValueError("steps: expected predictions above 0")
            return result

    def save(self, folder: Path) -> Path:
        """Store it.

        Args:
            folder: Where; it is made if missing.

        Returns:
            The file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{NAME}.json"
        write_json(path, stamp(KIND, VERSION, asdict(self)))
        return path

    def step(self, like: CountedStep, optimizer: str, averaged: str, communication: str) -> CountedStep | None:
        """What was counted of another optimizer with the same ranks, width and batch.

        Args:
            like: A step with these.
            optimizer: The optimizer.
            averaged: Who averages gradients.
            communication: How curvature travels.
        """
        wanted = (like.ranks, like.width, like.batch, optimizer, averaged, communication)
        for step in self.steps:
            if (step.ranks, step.width, step.batch, step.optimizer, step.averaged, step.communication) == wanted:
                return step
        return None

    def tables(self) -> list[Table]:
        """Bytes of SGD, and how many times that other optimizers take: a table for each kind of K-FAC."""
        return [self._table(*kind) for kind in COUNTED_KFACS]

    def _table(self, optimizer: str, averaged: str) -> Table:
        title = f"{KFACS[optimizer]}, {WHO_AVERAGES[averaged]}"
        columns = ("ranks", "width", "batch", SGD, ALL_REDUCED, *WAYS, BY_TIME, "auto takes")
        notes = (
            "SGD: bytes that arrive on a rank in a step of DistributedDataParallel with SGD; others: times that.",
            f"{ALL_REDUCED}: DistributedDataParallel, both factors of a layer all-reduced whole, moves broadcast;",
            "of symmetric factors the upper triangles would do, about half of their part. All measure at every step.",
            self._agreement(),
        )
        sgd = [step for step in self.steps if step.optimizer == SGD]
        return Table(title, columns, tuple(self._row(step, optimizer, averaged) for step in sgd), notes)

    def _row(self, sgd: CountedStep, optimizer: str, averaged: str) -> tuple[str, ...]:
        steps = [self.step(sgd, ALL_REDUCED, DDP, "")]
        steps += [self.step(sgd, optimizer, averaged, way) for way in (*WAYS, BY_TIME)]
        ratios = ["-" if step is None else f"{step.bytes / sgd.bytes:.2f}" for step in steps]
        taken = steps[-1].schemes if steps[-1] is not None else {}
        chosen = ", ".join(dict.fromkeys(taken.values())) or "-"
        return (*map(str, (sgd.ranks, sgd.width, sgd.batch)), bytes_(sgd.bytes), *ratios, chosen)

    def _agreement(self) -> str:
        """How far counts are from what was predicted, and how large headers are."""
        off = max((abs(step.bytes / step.predicted - 1) for step in self.steps), default=0.0)
        headers = max((step.headers for step in self.steps), default=0.0)
        exactly = "exactly as predicted" if off < 1e-9 else f"within {off:.1%} of what was predicted"
        return f"All counts are {exactly}. Headers, which are not in them: at most {headers / 2**10:.1f} KiB."

    def where(self) -> str:
        """When and with what it was counted."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"Counted on {self.date}; {versions}."
