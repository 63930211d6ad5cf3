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
from contextlib import suppress
from pathlib import Path


def programs() -> Path | None:
    """Where initdb and postgres are: on the PATH, or where Debian puts them."""
    found = [Path(path).parent for name in ("initdb",) if (path := shutil.which(name))]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in found if all((folder / name).exists() for name in ("initdb", "postgres"))), None)


class Server:
    """Runs within ``with``; ``address`` is that of its one database."""

    def __enter__(self) -> Server:
        folder = programs()
        assert folder is not None
        self.place, self.port, user = Path(tempfile.mkdtemp(prefix="mukron-postgresql-")), _free_port(), _user()
        if user is not None:  # it does not run as root
            os.chown(self.place, user.pw_uid, user.pw_gid)
        who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": self.place, **who}
        data = self.place / "data"
        initdb = [folder / "initdb", "-D", data, "-U", "mukron", "-A", "trust", "--no-sync"]
        subprocess.run(initdb, check=True, **self.options)
        settings = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self.place}", "fsync=off")
        self.command = [folder / "postgres", "-D", data, "-p", str(self.port)]
        self.command += [part for setting in settings for part in ("-c", setting)]
        self.address = f"postgresql://mukron@127.0.0.1:{self.port}/postgres"
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.place, ignore_errors=True)

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, **self.options)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # who is still connected is sent away
        self.process.wait(30)

    def wait(self) -> None:
        """Until it answers."""
        import psycopg

        for _ in range(300):
            assert self.process.poll() is None, "PostgreSQL did not start"
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.address).close()
                return
            time.sleep(0.1)
        raise AssertionError("PostgreSQL does not answer")


def _user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {user.pw_name: user for user in pwd.getpwall()}
    return known.get("postgres") or known["nobody"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
