"""The numbers of epochs, as rows: read, checked, and written as lines of JSON and as a table."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mukron.params.storage import sealed, unsealed
from mukron.typed import read_as

EpochRow = dict[str, Any]  # the numbers of an epoch by name; None stands for one that is not finite


def check_rows(data: object, place: str, first: int = 0) -> list[EpochRow]:
    """Read the rows of epochs: numbers by name, with rising epochs.

    Args:
        data: A list of rows.
        place: The name of the list, for errors.
        first: The number of the first row in errors.

    Returns:
        The rows.

    Raises:
        ValueError: A row is something else.
    """
    rows: list[EpochRow] = []
    for number, row in enumerate(read_as(list[Any], data, place), first):
        numbers = read_as(dict[str, float | None], row, f"{place} {number}")
        epoch, before = (
            read_as(int, numbers.get("epoch"), f"{place} {number}: epoch"),
            rows[-1]["epoch"] if rows else -1,
        )
        if epoch <= before:
            raise ValueError(f"{place} {number}: expected an epoch after {before}, found {epoch}")
        rows.append(numbers)
    return rows


def finite(row: Mapping[str, Any]) -> EpochRow:
    """Returns the numbers as Python numbers that JSON can hold.

    Args:
        row: Numbers by name, of Python, numpy or torch.

    Returns:
        The same, with None for what is not finite.

    Example:
        >>> import math
        >>> import torch
        >>> finite({"epoch": 1, "train_loss": torch.tensor(0.5), "test_loss": math.inf})
        {'epoch': 1, 'train_loss': 0.5, 'test_loss': None}
    """
    plain = {name: int(value) if isinstance(value, int) else float(value) for name, value in row.items()}
    return {name: value if math.isfinite(value) else None for name, value in plain.items()}


def line_of(row: EpochRow) -> str:
    """A line of metrics.jsonl, with a seal of its numbers.

    Args:
        row: The numbers of an epoch.
    """
    json.dumps(row, allow_nan=False)
    return json.dumps(sealed(row), allow_nan=False) + "\n"


def rows_of(text: str, source: str) -> list[EpochRow]:
    """Read complete lines of metrics.jsonl: a run may be killed while it writes one.

    Args:
        text: The lines.
        source: Where they come from, for errors.

    Returns:
        The rows, one for every epoch from the first on.

    Raises:
        ValueError: A line is damaged, or missing.
    """
    lines = text[: text.rfind("\n") + 1].splitlines()
    content = [unsealed(json.loads(line), f"{source}: line {number}") for number, line in enumerate(lines, 1)]
    rows = check_rows(content, "line", first=1)
    if rows and rows[-1]["epoch"] != len(rows):
        raise ValueError(f"{len(rows)} lines end with epoch {rows[-1]['epoch']}")
    return rows


def table_of(rows: Sequence[EpochRow]) -> str:
    """The text of metrics.csv.

    Args:
        rows: The numbers of the epochs.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
