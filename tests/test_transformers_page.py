"""docs/transformers.md, as it is printed: every command that needs neither a file of the reader's nor a GPU."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"
CANNOT_TELL = 4  # a short study may not be able to


def commands() -> list[tuple[list[str], int]]:
    """The page's commands, and the exit codes that it says they have."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = []
    for line in lines:
        if not any(word in line for word in ("mypackage", "corpus.txt", "--device cuda")):
            code = re.search(r"# exit code (\d)", line)
            found.append((shlex.split(line, comments=True), int(code[1]) if code else 0))
    return found


@pytest.mark.slow
def test_the_page_runs_as_it_is_printed(tmp_path):
    outputs = {}
    for words, code in commands():
        program = {"mukron": [sys.executable, "-m", "mukron.cli"], "python": [sys.executable]}[words[0]]
        done = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False
        )
        allowed = {code, CANNOT_TELL} if words[1] == "transfer" else {code}
        assert done.returncode in allowed, (words, done.returncode, done.stdout, done.stderr)
        outputs[" ".join(words)] = done.stdout
    said = list(outputs.values())
    assert any("blocks.0-3.attention.{query,key,value}.weight" in text for text in said)
    assert sum("NOT OK" in text for text in said) == sum(code == 1 for _, code in commands())
    assert any("tokens, " in text and "a second" in text and "What it writes" in text for text in said)


def test_the_page_names_every_command():
    used = {words[1] for words, _ in commands() if words[0] == "mukron"}
    assert used == {"explain", "check", "transfer", "tune", "plan", "train"}
