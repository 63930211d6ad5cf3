"""Who has a study open. A study without trials may be replaced by another one only while nobody else has it open."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mukron.workers.locks import locked


class Presence:
    """A lock that all processes with an open study share, on any machine; it is released if its process dies.

    Call its methods while holding ``Store.exclusive``, or two processes may each find themselves alone.

    Args:
        url: The storage's address.
        name: The study's name.

    Example:
        >>> first, second = (Presence("sqlite:///study.db", "study") for _ in range(2))
        >>> first.enter()
        >>> second.alone()
        False
        >>> first.leave()
        >>> second.alone()
        True
    """

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self._held = ExitStack()
        self._inside = False

    def enter(self) -> None:
        """Be one of those who have the study open."""
        if self._inside:
            return
        if self._url.startswith("sqlite"):
            self._held.enter_context(locked(self._file(), shared=True))
        else:
            connection = self._connection()
            self._held.callback(connection.close)
            _ask(connection, "pg_advisory_lock_shared", self._key())
        self._inside = True

    def leave(self) -> None:
        """Be none of them any more."""
        self._held.close()
        self._inside = False

    def alone(self) -> bool:
        """Whether nobody else has the study open."""
        if self._inside:
            raise RuntimeError("a process that has the study open cannot ask whether others have")
        if self._url.startswith("sqlite"):
            with locked(self._file(), wait=False) as held:
                return held
        connection = self._connection()
        try:
            return bool(_ask(connection, "pg_try_advisory_lock", self._key()))
        finally:
            connection.close()  # and with it the lock

    def _file(self) -> Path:
        from sqlalchemy import make_url

        return Path(f"{make_url(self._url).database}.open")

    def _key(self) -> str:
        return f"mukron open {self._name}"

    def _connection(self) -> Any:
        from sqlalchemy import NullPool, create_engine

        return create_engine(self._url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect()


def _ask(connection: Any, function: str, key: str) -> Any:
    from sqlalchemy import text

    return connection.execute(text(f"SELECT {function}(hashtext(:key))"), {"key": key}).scalar()
