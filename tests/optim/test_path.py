"""One step reads downwards: following it takes few files, and seldom leads back and forth between them."""

from __future__ import annotations

import sys

from path_of_a_step import counts, followed, path_of_a_step


def test_a_step_takes_few_files_and_changes_of_file():
    path = path_of_a_step()
    assert {"optim/optimizer.py", "curvature/capture.py"} <= {visit.file for visit in path}  # backward pass and step
    found = counts(path)
    lines = "\n".join(f"{visit.file}: {visit.function}" for visit in path)
    assert found.files <= 12, f"{found}\n{lines}"
    assert found.changes <= 30, f"{found}\n{lines}"


def test_the_profiler_that_was_set_before_is_set_again():
    before = sys.getprofile()
    assert followed(lambda: None) == []
    assert sys.getprofile() is before
