"""Edits of a study's database: of the bytes of its file, and of what its tables say."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

from mutations import changed_bytes, changed_json_text

VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 2, 7, 10**15, 1.5, -0.5, 1e308, float("inf")),
    *(
        "",
        "x",
        "{",
        "[]",
        "{}",
        "null",
        "1e999999999",
        "COMPLETE",
        "RUNNING",
        "FAIL",
        "2020-01-01 00:00:00",
        b"\x00\xff",
    ),
)


def edit(path: Path, seed: int) -> None:
    """Make the edit of a number: every third one of bytes, the others of one cell or row.

    Args:
        path: The database, which nobody has open.
        seed: The number.
    """
    rng = random.Random(seed)
    if seed % 3 == 0:
        path.write_bytes(changed_bytes(path.read_bytes(), rng))
        return
    database = sqlite3.connect(path)
    with database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if database.execute(f"SELECT count(*) FROM {name}").fetchone()[0]]
        table = rng.choice(filled)
        row, *_ = rng.choice(database.execute(f"SELECT rowid FROM {table}").fetchall())
        columns = [column[1] for column in database.execute(f"PRAGMA table_info({table})")]
        change = rng.choice(("cell", "cell", "cell", "json", "delete", "empty", "drop"))
        column = rng.choice(columns)
        if change == "delete":
            database.execute(f"DELETE FROM {table} WHERE rowid = {row}")
        elif change == "empty":
            database.execute(f"DELETE FROM {table}")
        elif change == "drop":
            database.execute(f"DROP TABLE {table}")
        else:
            value = rng.choice(VALUES)
            if change == "json" and "value_json" in columns:
                column = "value_json"
                (text,) = database.execute(f"SELECT value_json FROM {table} WHERE rowid = {row}").fetchone()
                value = changed_json_text(text, rng)
            try:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = {row}", (value,))
            except sqlite3.IntegrityError:
                database.execute(f"DELETE FROM {table} WHERE rowid = {row}")
    database.close()
