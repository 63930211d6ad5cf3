"""A result names the commit of the source that made it, and none where the source is no checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mukron.workers import machine
from mukron.workers.machine import source_commit


def git(folder, *arguments) -> str:
    command = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package in a repository, with the file that asks for the commit."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path / "src" / "package"
    (folder / "workers").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(machine, "__file__", str(folder / "workers" / "machine.py"))
    return folder


def test_the_commit_and_whether_the_source_differs_from_it(package):
    git(package, "add", ".")
    git(package, "commit", "-qm", "Add a package")
    head = git(package, "rev-parse", "--short=12", "HEAD")
    assert source_commit() == head
    (package.parent / "notes.txt").write_text("not of the package")
    assert source_commit() == head
    (package / "__init__.py").write_text("changed = True")
    assert source_commit() == f"{head}-changed"


def test_no_commit_where_the_repository_is_anothers(package):
    """A virtual environment inside some repository, which does not know the package's files."""
    assert source_commit() == ""
    shutil.rmtree(package.parents[1] / ".git")
    assert source_commit() == ""
