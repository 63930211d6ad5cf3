# Every target makes the virtual environment it needs; Python 3.10 or later is all that has to be there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check format clean

demo: $(BIN)/.ready
	$(BIN)/mukron explain --method all
	$(BIN)/mukron explain --model mlp --base-width 64 --width 4096 --method kfac
	$(BIN)/python examples/quickstart.py
	$(BIN)/mukron check --model mlp --method kfac --scheme mup

test: $(BIN)/.ready
	$(BIN)/pytest

check: $(BIN)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(BIN)/.ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV)

$(BIN)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mukron needs Python 3.10 or later, found " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
