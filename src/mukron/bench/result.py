"""The stored result of a benchmark: every measured time, and where and how it was measured."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from mukron import __version__
from mukron.bench.measure import Options
from mukron.bench.peers import installed_version
from mukron.params.storage import read_json, write_json
from mukron.table import Table
from mukron.typed import fields_of, read_as

STEP_PHASES = ("forward", "backward", "step")  # the labels that together cover a training step


@dataclass(frozen=True)
class MethodResult:
    """What was measured of one method at one width.

    Attributes:
        method: The method's name.
        width: The network's width.
        milliseconds: Time per step, one number per round.
        memory: Peak memory in MiB, if it was measured.
        differs: Relative difference of the first update from float64, if it was measured.
        note: A remark below the table.
        failed: Why there are no times; empty if there are.
        parts: Milliseconds per step by label, if the steps were profiled.

    Example:
        >>> MethodResult("SGD", 256, (1.0, 3.0, 2.0)).median
        2.0
    """

    method: str
    width: int
    milliseconds: tuple[float, ...] = ()
    memory: float | None = None
    differs: float | None = None
    note: str = ""
    failed: str = ""
    parts: Mapping[str, float] | None = None

    @property
    def median(self) -> float:
        """The median time per step in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and upper quartile of the time per step in milliseconds."""
        if len(self.milliseconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.milliseconds, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, and the statistics of the times, as data for JSON."""
        data = asdict(self)
        if self.milliseconds:
            mean = statistics.fmean(self.milliseconds)
            data |= {"median": self.median, "quartiles": self.quartiles, "mean": mean}
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> MethodResult:
        """Reads what ``to_dict`` returned.

        Args:
            data: The fields by name; statistics of the times are computed again.

        Returns:
            The measurement.
        """
        derived = ("median", "quartiles", "mean")
        fields = {name: value for name, value in fields_of(data, "row").items() if name not in derived}
        row: MethodResult = read_as(MethodResult, fields, "row")
        return row


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark.

    Attributes:
        bench: The benchmark's name.
        title: What was measured, in words.
        base: The method that others are compared with; empty for none.
        rows: The measurements.
        notes: Remarks below the table.
        settings: The options the benchmark was run with.
        machine: Names of processor and GPU, numbers of cores and threads.
        versions: Versions by package.
        date: The day it was started.
        command: The command that runs it again.

    Example:
        >>> result = new_result("kfac-step", "One step", "SGD", (), Options((256,)), "mukron bench kfac-step")
        >>> result.with_rows([MethodResult("SGD", 256, (1.0, 2.0, 3.0))]).table().columns
        ('width', 'method', 'ms', 'quartiles', 'mean', 'x SGD')
    """

    bench: str
    title: str
    base: str
    rows: tuple[MethodResult, ...]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    command: str

    @property
    def name(self) -> str:
        """The name of its files, without ending."""
        tf32 = "-tf32" if self.settings["precision"] == "tf32" else ""
        return f"{self.bench}-{self.settings['device']}{tf32}"

    @property
    def widths(self) -> list[int]:
        """The measured widths, in rising order."""
        return sorted({row.width for row in self.rows})

    def at(self, width: int) -> list[MethodResult]:
        """Returns the measurements at one width.

        Args:
            width: The width.

        Returns:
            One measurement per method.
        """
        return [row for row in self.rows if row.width == width]

    def base_at(self, width: int) -> MethodResult | None:
        """Returns the base method's measurement.

        Args:
            width: The width.

        Returns:
            The measurement, or None if the base has no times at that width.
        """
        return next((row for row in self.at(width) if row.method == self.base and row.milliseconds), None)

    def with_rows(self, rows: Iterable[MethodResult]) -> BenchResult:
        """Returns the result with more measurements.

        Args:
            rows: The measurements to append.

        Returns:
            A new result.
        """
        return replace(self, rows=(*self.rows, *rows))

    def save(self, folder: Path) -> Path:
        """Writes the result to a JSON file.

        Args:
            folder: Where to write; created if missing.

        Returns:
            The file, NAME.json.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        data = {**asdict(self), "rows": [row.to_dict() for row in self.rows]}
        write_json(path, data)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> BenchResult:
        """Reads a result.

        Args:
            path: A file that ``save`` wrote.

        Returns:
            The result.

        Raises:
            ValueError: If the file cannot be read or holds something else.
        """
        try:
            data = fields_of(read_json(path), "result", "rows")
            rows = [MethodResult.from_dict(row) for row in read_as(list[Any], data["rows"], "rows")]
            result: BenchResult = read_as(BenchResult, {**data, "rows": []}, "result")
            return result.with_rows(rows)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: no result of mukron bench could be read ({error}); name its .json file"
            ) from None

    def table(self) -> Table:
        """Returns the table of all measurements."""
        memory = any(row.memory is not None for row in self.rows)
        differs = any(row.differs is not None for row in self.rows)
        rows = []
        for row in self.rows:
            base = self.base_at(row.width)
            cells = [str(row.width), row.method]
            if row.milliseconds:
                low, high = row.quartiles
                cells += [_ms(row.median), f"{_ms(low)} - {_ms(high)}", _ms(statistics.fmean(row.milliseconds))]
            else:
                cells += ["-", "-", "-"]
            if self.base:
                cells += [f"{row.median / base.median:.2f}" if row.milliseconds and base else "-"]
            if memory:
                cells += ["-" if row.memory is None else f"{row.memory:.0f}"]
                cells += [f"{row.memory / base.memory:.2f}" if row.memory and base and base.memory else "-"]
            if differs:
                cells += ["-" if row.differs is None else f"{row.differs:.1e}"]
            rows.append(tuple(cells))
        columns = ["width", "method", "ms", "quartiles", "mean"]
        columns += [f"x {self.base}"] if self.base else []
        columns += ["MiB", f"MiB x {self.base}"] if memory else []
        columns += ["off by"] if differs else []
        remarks = [f"{row.method} at width {row.width}: {row.failed}" for row in self.rows if row.failed]
        remarks += dict.fromkeys(f"{row.method}: {row.note}" for row in self.rows if row.note)
        return Table(self.title, tuple(columns), tuple(rows), (*self.notes, *remarks))

    def parts_table(self) -> Table | None:
        """Returns the table of milliseconds per step by part, or None if no method was profiled."""
        profiled = [row for row in self.rows if row.parts]
        if not profiled:
            return None
        names = list(dict.fromkeys([*STEP_PHASES, *(name for row in profiled for name in row.parts or {})]))
        on_gpu = self.settings["device"] == "cuda"
        rows = []
        for row in profiled:
            parts = row.parts or {}
            cells = [
                str(row.width),
                row.method,
                _ms(row.median),
                *(_ms(parts[n]) if n in parts else "-" for n in names),
            ]
            unlabelled = row.median - _total(parts)
            rows.append((*cells, *([_ms(unlabelled) if unlabelled > 0 else "-"] if on_gpu else [])))
        notes = ["all: as measured above; parts named mukron:: lie within forward, backward and step"]
        if on_gpu:
            notes.append(
                "parts: of the device, where kernels side by side all count; unseen: the rest, waiting for Python and "
                "kernels of a CUDA graph, which carry no label: inverses, where they are few and small"
            )
        columns = ("width", "method", "all", *names, *(["unseen"] if on_gpu else []))
        return Table("Where the time goes, in ms a step", columns, tuple(rows), tuple(notes))


def new_result(
    bench: str,
    title: str,
    base: str,
    notes: Iterable[str],
    options: Options,
    command: str,
    packages: Iterable[str] = (),
) -> BenchResult:
    """Returns a result without measurements, with this machine and today's date.

    Args:
        bench: The benchmark's name.
        title: What is measured, in words.
        base: The method that others are compared with; empty for none.
        notes: Remarks below the table.
        options: The options of the benchmark.
        command: The command that runs it again.
        packages: Other libraries whose versions are recorded, by their names on PyPI.

    Returns:
        The result.

    Example:
        >>> new_result("kfac-step", "One step", "SGD", (), Options((256,)), "mukron bench kfac-step").name
        'kfac-step-cpu'
    """
    versions = {"mukron": __version__, "torch": torch.__version__, "python": platform.python_version()}
    peer_versions = {package: version for package in packages if (version := installed_version(package))}
    return BenchResult(
        *(bench, title, base, (), tuple(notes), asdict(options)),
        *(machine_of(options.device), versions | peer_versions, datetime.now(timezone.utc).date().isoformat(), command),
    )


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.get(name, 0.0) for name in STEP_PHASES)


def _ms(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}" if number >= 0.1 else f"{number:.3f}"


def machine_of(device: str) -> dict[str, Any]:
    """Returns the processor's name and the numbers of cores and threads, and on a GPU its name.

    Args:
        device: "cpu" or "cuda".

    Returns:
        What is known, by name.

    Example:
        >>> sorted(machine_of("cpu"))
        ['cores', 'cpu', 'threads']
    """
    cpu = {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"gpu": torch.cuda.get_device_name(), **cpu} if device == "cuda" else cpu


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
