# Every target makes the virtual environment it needs; Python 3.10 or later is all that has to be there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
METHOD ?= kfac

CLIENTS ?= .venv-clients

.PHONY: demo test matrix soak check format clean clients

# Tune narrow, train wide: does the best learning rate stay where it is? About two minutes on two cores. Steps are the
# paper's plain ones, without a bound.
PLAIN = $(if $(filter sgd adamw,$(METHOD)),,--set method_options.trust=none)
demo: $(BIN)/.ready
	$(BIN)/mukron transfer --method $(METHOD) --loss mse --samples 1024 --widths 64:1024 --workers 2 --out demo/$(METHOD) $(PLAIN)

# As many processes as there are cores, up to eight; whoever is done takes tests over from another.
test: $(BIN)/.ready
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# The rest of the matrix of ranks, which make test leaves out.
matrix: $(BIN)/.ready
	$(BIN)/pytest -m matrix --numprocesses auto --maxprocesses 2 --dist worksteal

# Faults, at length: thousands of changes of every kind of file, kills, pauses. It writes the table of docs/reliability.md.
SOAK ?= 10000
COUNTS := soak-counts
soak: $(BIN)/.ready
	rm -rf $(COUNTS)
	MUKRON_SOAK=$(SOAK) MUKRON_SOAK_TABLE=$(CURDIR)/$(COUNTS) $(BIN)/pytest tests/faults --numprocesses auto --maxprocesses 8 --dist worksteal
	$(BIN)/python tests/faults/soak.py $(COUNTS) docs/reliability.md

# With the packages of others; docs/works-with.md must say what these tests find.
TRACKERS = tests/train/test_trackers.py
clients: $(CLIENTS)/.ready
	$(CLIENTS)/bin/pytest tests/clients $(TRACKERS)::test_wandb_keeps_it_offline $(TRACKERS)::test_mlflow_keeps_it_in_a_file \
		--check-table --no-skips --numprocesses auto --maxprocesses 2 --dist worksteal

check: $(BIN)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(BIN)/.ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(CLIENTS) demo $(COUNTS)

$(BIN)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mukron needs Python 3.10 or later, found " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(CLIENTS)/.ready: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --constraint constraints-clients.txt --editable '.[clients]'
	@touch $@
