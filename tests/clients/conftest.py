"""Tests with the packages of others: transformers, accelerate, lightning, timm, peft. Where one is missing, its tests
are skipped; ``.ci/run`` has an environment with all of them (constraints-clients.txt).

``pytest tests/clients --write-table`` writes what works into docs/works-with.md, and ``--check-table`` fails if that
page says something else.
"""

from __future__ import annotations

from importlib.util import find_spec

import outcomes
import pytest


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write the outcomes into docs/works-with.md")
    parser.addoption("--check-table", action="store_true", help="fail if docs/works-with.md says something else")
    parser.addoption(
        "--no-skips", action="store_true", help="fail if a test or a file was skipped: all packages are there"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cell(table, row, column): the cell of docs/works-with.md that a test decides")


def pytest_collection_modifyitems(items):
    """Those packages warn of each other; what mukron warns of is tested where it is the point."""
    for item in items:
        if "clients" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


def pytest_runtest_setup(item):
    for mark in item.iter_markers("cell"):
        item.user_properties.append(("cell", mark.args))


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        for name, cell in report.user_properties:
            if name == "cell":
                outcomes.note(tuple(cell), "failed" if hasattr(report, "wasxfail") else report.outcome)


def pytest_sessionfinish(session):
    option = session.config.getoption
    if hasattr(session.config, "workerinput"):
        return
    if option("--no-skips", False):
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        for report in terminal.stats.get("skipped", []):
            print(f"\n{report.nodeid or 'a file'} was skipped, and --no-skips was given: {report.longrepr}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if option("--write-table", False):
        outcomes.PAGE.write_text(outcomes.page())
    elif option("--check-table", False) and outcomes.PAGE.read_text() != outcomes.page():
        print(f"\n{outcomes.PAGE} is not what these tests found: pytest tests/clients --write-table")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Nothing is looked for in the network, and files go into the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    if find_spec("transformers") is not None:
        import transformers

        transformers.logging.set_verbosity_error()
