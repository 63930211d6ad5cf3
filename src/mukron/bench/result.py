"""What a benchmark found, as it is kept: every time, and where and how it was measured."""

from __future__ import annotations

import json
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
from mukron.bench.peers import installed
from mukron.params.storage import write_json
from mukron.table import Table

WHOLE = ("forward", "backward", "step")  # what a training step is made of


@dataclass(frozen=True)
class Row:
    """One method at one width."""

    method: str
    width: int
    milliseconds: tuple[float, ...] = ()  # a step, one number a round
    memory: float | None = None  # MiB at the peak
    differs: float | None = None  # from float64, relative
    note: str = ""
    failed: str = ""  # why there are no times
    parts: Mapping[str, float] | None = None  # milliseconds of a step by label

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.milliseconds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.milliseconds, n=4, method="inclusive")
        return low, high

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        if self.milliseconds:
            mean = statistics.fmean(self.milliseconds)
            found |= {"median": self.median, "quartiles": self.quartiles, "mean": mean}
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Row:
        derived = ("median", "quartiles", "mean")
        own = {name: value for name, value in data.items() if name not in derived}
        return Row(**{**own, "milliseconds": tuple(own["milliseconds"])})


@dataclass(frozen=True)
class Result:
    """A benchmark's rows. ``base`` is the method that others are measured in, "" for none."""

    bench: str
    title: str
    base: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str
    command: str

    @property
    def name(self) -> str:
        """Of its files, without ending."""
        tf32 = "-tf32" if self.settings["precision"] == "tf32" else ""
        return f"{self.bench}-{self.settings['device']}{tf32}"

    @property
    def widths(self) -> list[int]:
        return sorted({row.width for row in self.rows})

    def at(self, width: int) -> list[Row]:
        return [row for row in self.rows if row.width == width]

    def base_at(self, width: int) -> Row | None:
        """The base's row, if it has times."""
        return next((row for row in self.at(width) if row.method == self.base and row.milliseconds), None)

    def with_rows(self, rows: Iterable[Row]) -> Result:
        return replace(self, rows=(*self.rows, *rows))

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        data = {**asdict(self), "rows": [row.to_dict() for row in self.rows]}
        write_json(path, data)
        return path

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Result:
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(map(Row.from_dict, data["rows"]))
            return Result(**{**data, "rows": rows, "notes": tuple(data["notes"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: no result of mukron bench could be read ({error}); name its .json file"
            ) from None

    # As tables.

    def table(self) -> Table:
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
        said = [f"{row.method} at width {row.width}: {row.failed}" for row in self.rows if row.failed]
        said += dict.fromkeys(f"{row.method}: {row.note}" for row in self.rows if row.note)
        return Table(self.title, tuple(columns), tuple(rows), (*self.notes, *said))

    def parts_table(self) -> Table | None:
        """Where the time goes, if that was looked at: milliseconds a step by part."""
        looked = [row for row in self.rows if row.parts]
        if not looked:
            return None
        names = list(dict.fromkeys([*WHOLE, *(name for row in looked for name in row.parts or {})]))
        on_gpu = self.settings["device"] == "cuda"
        rows = []
        for row in looked:
            parts = row.parts or {}
            cells = [
                str(row.width),
                row.method,
                _ms(row.median),
                *(_ms(parts[n]) if n in parts else "-" for n in names),
            ]
            unseen = row.median - _whole(parts)
            rows.append((*cells, *([_ms(unseen) if unseen > 0 else "-"] if on_gpu else [])))
        notes = ["all: as measured above; parts named mukron:: lie within forward, backward and step"]
        if on_gpu:
            notes.append(
                "parts: of the device, where kernels side by side all count; unseen: the rest, waiting for Python and "
                "kernels of a CUDA graph, which carry no label: inverses, where they are few and small"
            )
        columns = ("width", "method", "all", *names, *(["unseen"] if on_gpu else []))
        return Table("Where the time goes, in ms a step", columns, tuple(rows), tuple(notes))


def begun(
    bench: str,
    title: str,
    base: str,
    notes: Iterable[str],
    options: Options,
    command: str,
    packages: Iterable[str] = (),
) -> Result:
    """A result without rows yet, of this machine and today."""
    versions = {"mukron": __version__, "torch": torch.__version__, "python": platform.python_version()}
    theirs = {package: found for package in packages if (found := installed(package))}
    return Result(
        *(bench, title, base, (), tuple(notes), asdict(options)),
        *(_machine(options.device), versions | theirs, datetime.now(timezone.utc).date().isoformat(), command),
    )


def _whole(parts: Mapping[str, float]) -> float:
    return sum(parts.get(name, 0.0) for name in WHOLE)


def _ms(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}" if number >= 0.1 else f"{number:.3f}"


def _machine(device: str) -> dict[str, Any]:
    """The processor's name, and how many cores and threads there are."""
    found = {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"gpu": torch.cuda.get_device_name(), **found} if device == "cuda" else found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
