"""A PostgreSQL of one's own on loopback, for as long as a test needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def programs() -> Path | None:
    """Where initdb and postgres are: on the PATH, or where Debian puts them."""
    found = [Path(path).parent for name in ("initdb",) if (path := shutil.which(name))]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if all((folder / name).exists() for name in ("initdb", "postgres"))), None)


@contextmanager
def server() -> Iterator[str]:
    """The address of its one database."""
    folder = programs()
    assert folder is not None
    place = Path(tempfile.mkdtemp(prefix="mukron-postgresql-"))
    user = _user()
    if user is not None:  # it does not run as root
        os.chown(place, user.pw_uid, user.pw_gid)
    who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": place}
    process = None
    try:
        initdb = [folder / "initdb", "-D", place / "data", "-U", "mukron", "-A", "trust", "--no-sync"]
        subprocess.run(initdb, check=True, **quiet, **who)
        port = _free_port()
        options = ["-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={place}", "-c", "fsync=off"]
        process = subprocess.Popen(
            [folder / "postgres", "-D", place / "data", "-p", str(port), *options], **quiet, **who
        )
        _wait(port, process)
        yield f"postgresql://mukron@127.0.0.1:{port}/postgres"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # who is still connected is sent away
            process.wait(30)
        shutil.rmtree(place, ignore_errors=True)


def _user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {user.pw_name: user for user in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(port: int, process: subprocess.Popen) -> None:
    import psycopg

    for _ in range(300):
        assert process.poll() is None, "PostgreSQL did not start"
        try:
            psycopg.connect(f"postgresql://mukron@127.0.0.1:{port}/postgres").close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError("PostgreSQL does not answer")
