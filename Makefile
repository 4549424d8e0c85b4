# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help test lint types unit demo bench soak format clean

help:
	@echo "make test    everything CI checks: format, lint, types, architecture, tests (about 5 minutes)"
	@echo "make demo    generate data, train, be killed, resume bit-equal (under 2 minutes)"
	@echo "make bench   speed and memory, as ratios to limits measured in the same run"
	@echo "make soak    the same laws over many more random cases, and 200 epochs for leaks"
	@echo "make format  let ruff format and mend"

# Stale when what it was made from is newer.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, got " + sys.version)'
	@echo "Setting up $(VENV) (about a minute) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest -q -n 2

test: lint types unit

demo: $(READY)
	@$(BIN)/penstock demo

bench: $(READY)
	$(BIN)/python -m bench

soak: $(READY)
	PENSTOCK_SOAK=1 $(BIN)/pytest -q tests/laws tests/soak --timeout=3600

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out
