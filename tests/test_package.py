"""What importing costs and needs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import mukron


def run_python(code: str) -> str:
    """In a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_theory_needs_the_standard_library_alone():
    """Every package that is installed beside mukron is made impossible to import."""
    run_python(
        """
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] not in {*sys.stdlib_module_names, "mukron"}:
                    raise ImportError(f"{name} is not of the standard library")

        sys.meta_path.insert(0, Refuse())
        import mukron.theory
        from mukron.theory import comparison_table
        assert "K-FAC" in str(comparison_table())
        """
    )


def test_import_is_light():
    """The whole library as a user of it loads it: torch and numpy, and nothing of the command line or the studies."""
    run_python(
        """
        import sys
        import torch, numpy
        before = set(sys.modules)
        import mukron
        assert "mukron.params" not in sys.modules  # loaded when used
        mukron.parametrize, mukron.base_shapes
        import mukron.models
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        new -= {*sys.stdlib_module_names, "torch", "numpy", "mukron"}
        assert not new & {"typer", "rich", "click", "matplotlib", "optuna", "sklearn", "jinja2", "pooch", "pandas"}, new
        """
    )


def test_public_names():
    for name in mukron.__all__:
        assert getattr(mukron, name) is not None
    assert set(mukron.__all__) <= set(dir(mukron))
    with pytest.raises(AttributeError, match="no attribute 'KFCA'"):
        mukron.KFCA  # noqa: B018
