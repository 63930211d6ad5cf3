"""One step reads downwards: following it takes few files, and seldom leads back and forth between them."""

from __future__ import annotations

import sys

import pytest

from path_of_a_step import counts, followed, path_of_a_step


@pytest.mark.parametrize(("options", "files", "changes"), [({"trust": None}, 12, 30), ({}, 13, 33)])
def test_a_step_takes_few_files_and_changes_of_file(options, files, changes):
    """The plain step; and the default one, with its average and its bound."""
    path = path_of_a_step(**options)
    assert {"optim/optimizer.py", "curvature/capture.py"} <= {visit.file for visit in path}  # backward pass and step
    found = counts(path)
    lines = "\n".join(f"{visit.file}: {visit.function}" for visit in path)
    assert found.files <= files, f"{found}\n{lines}"
    assert found.changes <= changes, f"{found}\n{lines}"


def test_the_profiler_that_was_set_before_is_set_again():
    before = sys.getprofile()
    assert followed(lambda: None) == []
    assert sys.getprofile() is before
