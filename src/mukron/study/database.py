"""The database of a study's storage: its address, how it is opened, and its errors in one line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mukron.study.errors import StudyError
from mukron.workers.locks import HeldLockError

NOT_DAMAGED = re.compile("is locked|is full|readonly|unable to open|disk I/O")  # SQLite's words of other troubles


class UnreachableError(StudyError):
    """The storage cannot be reached."""


def sqlite_at(path: Path) -> str:
    """Return the database address of a file, with special characters in its path escaped."""
    optuna_package()  # reports what to install if Optuna, and with it SQLAlchemy, is missing
    from sqlalchemy import URL, make_url

    url = URL.create("sqlite", database=str(path)).render_as_string()
    if make_url(url).database != str(path):  # SQLAlchemy before 2.1 takes what follows a ? for options
        raise StudyError(f"{path}: a study cannot be kept in a folder of this name; choose one without a '?'")
    return url


def without_password(text: str) -> str:
    """Hide the passwords of database addresses in a text, whether they stand before the host or among the options.

    Args:
        text: An address, or a text in which one stands.

    Returns:
        The text with ``***`` in their place.

    Example:
        >>> without_password("postgresql://user:secret@host/studies?sslmode=require&password=secret")
        'postgresql://user:***@host/studies?sslmode=require&password=***'
    """
    text = re.sub(r"(://[^:/@\s]*):[^\n]*@", r"\1:***@", text)
    return re.sub(r"([?&][a-z]*(?:password|passwd|pwd)=)[^&#\n]*", r"\1***", text, flags=re.IGNORECASE)


def optuna_package() -> Any:
    """Import Optuna, and say what to install if that fails."""
    try:
        import optuna
    except ImportError as error:
        raise StudyError(f"studies are kept by Optuna: {error}; pip install 'mukron[studies]' brings it") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def checked_address(url: str) -> str:
    """Return the address with the driver that mukron installs: SQLAlchemy's default depends on its version."""
    kind, _, rest = url.partition(":")
    if kind in ("postgresql", "postgres"):
        return f"postgresql+psycopg:{rest}"
    if kind.partition("+")[0] not in ("sqlite", "postgresql") or url.rstrip("/") == "sqlite:":
        shown = without_password(url)
        raise StudyError(f"storage {shown!r}: expected sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    return url


def open_rdb(url: str, beat: int, grace: int) -> Any:
    """Open an Optuna storage.

    Args:
        url: Its address.
        beat: Seconds between two heartbeats of a trial.
        grace: Seconds without a heartbeat after which a trial counts as lost.
    """
    optuna = optuna_package()
    kind = url.partition(":")[0].partition("+")[0]
    engine = {"connect_args": {"timeout": 60}} if kind == "sqlite" else {"pool_pre_ping": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        rdb = optuna.storages.RDBStorage(url, engine_kwargs=engine, heartbeat_interval=beat, grace_period=grace)
    if kind == "sqlite":
        _quick_commits(rdb.engine)
        _check_pages(rdb.engine)
    return rdb


def _check_pages(engine: Any) -> None:
    from sqlalchemy import text

    with engine.connect() as connection:
        found = connection.execute(text("PRAGMA quick_check(1)")).scalar()
    if found != "ok":
        raise ValueError(found)


def _quick_commits(engine: Any) -> None:
    """Use a write-ahead log, which does not block readers, without waiting for the disk: a trial takes nine commits."""
    from sqlalchemy import event

    def pragmas(connection: Any, record: Any) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    event.listen(engine, "connect", pragmas)
    engine.dispose()  # of connections without these settings


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Report what a storage holds and cannot be read, whatever Optuna and SQLAlchemy make of it, in one line.

    For code that reads and does nothing else: any exception is taken for damage.
    """
    with storage_errors(url):
        try:
            yield
        except Exception as error:
            if isinstance(error, (StudyError, ImportError, OSError, HeldLockError, *_errors_of_storages())):
                raise
            if "optuna version" in str(error):  # Optuna says what to do
                raise _damaged(url, str(error).rstrip("."), or_else="If it is damaged instead, bring") from error
            raise _damaged(url, f"{type(error).__name__} {error}".partition("\n")[0][:300]) from error


def _errors_of_storages() -> tuple[type[Exception], ...]:
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError, optuna_package().exceptions.StorageInternalError


def _damaged(url: str, what: str, or_else: str = "") -> StudyError:
    if url.startswith("sqlite"):
        way_out = "move it away, with the files study.db-*: the same command then trains the study anew"
    else:
        way_out = "choose another --name: the same command then trains the study anew"
    said = f"{what}. {or_else}" if or_else else f"damaged, or edited: {what}. Bring"
    return StudyError(f"storage {without_password(url)}: {said} back a copy of it, or {way_out}")


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn errors of the storage into messages of one line that name it."""
    address = without_password(url)
    try:
        yield
    except _errors_of_storages() as error:
        cause = error.__cause__ or error
        message = without_password(str(getattr(cause, "orig", None) or cause).strip().partition("\n")[0])
        if url.startswith("sqlite") and not NOT_DAMAGED.search(message):
            raise _damaged(url, message) from error
        raise UnreachableError(f"storage {address}: {message}") from error
    except HeldLockError as error:
        raise StudyError(str(error)) from error
    except ImportError as error:
        raise StudyError(f"storage {address}: {error}; pip install 'mukron[postgresql]' brings it") from error
    except OSError as error:
        raise StudyError(f"storage {address}: {error.strerror}") from error
