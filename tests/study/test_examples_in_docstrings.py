"""The examples in the docstrings of studies run and show what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

import mukron.study


@pytest.mark.parametrize("module", ["certificate", "design", "points"])
def test_examples(module):
    found = doctest.testmod(import_module(f"mukron.study.{module}"))
    assert found.attempted
    assert found.failed == 0


def test_all_public_names_are_documented():
    for name in mukron.study.__all__:
        documentation = getattr(mukron.study, name).__doc__
        assert documentation, name
        assert not documentation.startswith(f"{name}("), name  # as a dataclass has it where nobody wrote one
