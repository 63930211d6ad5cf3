"""A user's own function by its name, and what is said where there is none."""

from __future__ import annotations

import sys

import pytest

from mukron.imports import import_function


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_modules_of_the_current_folder_count(here):
    (here / "own_module_here.py").write_text("def make(width):\n    return 2 * width\n")
    assert import_function("own_module_here:make", "--factory")(3) == 6


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("make", "--factory 'make': expected MODULE:FUNCTION"),
        (":make", "expected MODULE:FUNCTION"),
        ("nowhere:make", "No module named 'nowhere'.*this folder counts too"),
        ("own_module_lacking:make", "it imports 'not_installed_at_all', which is not installed"),
        ("own_module_bare:make", "module 'own_module_bare' has no function or class 'make'"),
        ("own_module_bare:number", "has no function or class 'number'"),
    ],
)
def test_what_cannot_be_imported(here, path, message):
    (here / "own_module_lacking.py").write_text("import not_installed_at_all\n")
    (here / "own_module_bare.py").write_text("number = 3\n")
    with pytest.raises(ValueError, match=message):
        import_function(path, "--factory")
