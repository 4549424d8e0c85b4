# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIBRARY := src/penstock/source/libnative.so
# hdmf-zarr needs a zarr below 3, all the rest one from 3 on: NWB in zarr stores is tested in an environment of its own.
NWB_ZARR := .venv-nwb-zarr

# cellmap-data needs a zarr below 3, and brings more than a gigabyte: a target of its own.
CELLMAP := .venv-cellmap

# MosaicML streaming needs a numpy below 2.2, and some of the others more than a gigabyte: a target of its own.
PEERS := .venv-peers

# The site is built from the text of the package, which is not imported: an environment without torch.
DOCS := .venv-docs

.PHONY: help test test-all test-browser test-sanitize test-cellmap mutants lint types demo picture docs bench soak faults faults-peers format clean

help:
	@echo "make test    format, lint, types, architecture, and all tests but the slow ones (about 7 minutes)"
	@echo "make test-all        the same with the slow tests and more random cases (about 18 minutes)"
	@echo "make test-browser    the report in a headless Chromium (apt-get install chromium)"
	@echo "make test-cellmap    our loader over the datasets of the cellmap-data package"
	@echo "make test-sanitize   the C part with AddressSanitizer and UBSan (about 2 minutes; needs the libasan of gcc)"
	@echo "make mutants small random changes of the code, and which of them no test notices (about 20 minutes)"
	@echo "make demo    generate data, train, be killed, resume bit-equal (under 2 minutes)"
	@echo "make docs    the documentation as a site, in site/ (open site/index.html)"
	@echo "make bench   speed and memory, as ratios to limits measured in the same run"
	@echo "make soak    the same laws over many more random cases, all cases of all faults, and 200 epochs for leaks"
	@echo "make faults-peers    the fault cases on webdataset, litdata, MosaicML streaming, torchdata and grain (10 minutes)"
	@echo "make faults  kills, full disks, damage and hostile input at random, counted (about 20 minutes)"
	@echo "make format  let ruff format and mend"

# Stale when what it was made from is newer.
$(READY): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, got " + sys.version)'
	@echo "Setting up $(VENV) (some minutes; torch is large) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Installing compiles it, too; this is for when the C has changed.
$(LIBRARY): src/penstock/source/native.c $(READY)
	@$(BIN)/python hatch_build.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

$(NWB_ZARR)/.ready: constraints-nwb-zarr.txt
	@echo "Setting up $(NWB_ZARR) ..."
	@$(PYTHON) -m venv --clear $(NWB_ZARR)
	@$(NWB_ZARR)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints-nwb-zarr.txt pynwb hdmf-zarr scipy xxhash typer
	@touch $@

test: lint types $(LIBRARY)
	$(BIN)/pytest -q -n 2 -m "not slow"

# Half of these tests wait for processes: four at once keep two cores busy. Folders whose tests fork most run in
# processes of their own: a fork copies what its parent has imported and collected.
ALONE := faults recipes laws source
test-all: lint types $(LIBRARY) $(NWB_ZARR)/.ready
	@export PENSTOCK_TESTS=all PENSTOCK_NWB_ZARR_PYTHON=$(CURDIR)/$(NWB_ZARR)/bin/python; failed=; \
	for tests in $(ALONE:%=tests/%) "tests src $(ALONE:%=--ignore=tests/%)"; do \
		echo "pytest $$tests"; $(BIN)/pytest -q -n 4 $$tests || failed="$$failed$$tests; "; \
	done; [ -z "$$failed" ] || { echo "These failed: $$failed"; exit 1; }

# In `make test-all` they run if there is a browser, and are skipped otherwise; here they fail without one.
test-browser: $(READY) $(LIBRARY)
	PENSTOCK_BROWSER_TESTS=1 $(BIN)/pytest -q -n 0 tests/browser

# Compiled in a copy of the tree, so that the package itself knows nothing of it.
test-sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

$(CELLMAP)/.ready: constraints-cellmap.txt
	@echo "Setting up $(CELLMAP) (about two minutes, more than a gigabyte) ..."
	@$(PYTHON) -m venv --clear $(CELLMAP)
	@$(CELLMAP)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints-cellmap.txt cellmap-data xxhash typer
	@touch $@

test-cellmap: $(READY) $(LIBRARY) $(CELLMAP)/.ready
	PENSTOCK_CELLMAP_PYTHON=$(CURDIR)/$(CELLMAP)/bin/python $(BIN)/pytest -q tests/recipes/cellmap/test_package.py

# Bounded: so many changes per folder. Folders, --count and --seed: MUTANTS="plan --count 100 --seed 3".
mutants: $(READY) $(LIBRARY)
	$(BIN)/python scripts/mutants.py $(MUTANTS)

demo: $(READY) $(LIBRARY)
	@$(BIN)/penstock demo

# The picture of the README: the top of the report of a demo.
picture: $(READY) $(LIBRARY)
	@folder=$$(mktemp -d) && $(BIN)/penstock demo --keep $$folder/demo --quiet && \
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1000,650 --screenshot=$(CURDIR)/docs/assets/report.png \
	file://$$folder/demo/report.html 2>/dev/null; rm -rf $$folder

$(DOCS)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(DOCS) (about twenty seconds) ..."
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/wanted.txt
	@$(DOCS)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -r $(DOCS)/wanted.txt
	@touch $@

# The variable leaves out a notice of the theme, which ends in 2027, about its successor.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

bench: $(READY) $(LIBRARY)
	$(BIN)/python -m bench

soak: $(READY) $(LIBRARY)
	PENSTOCK_TESTS=soak $(BIN)/pytest -q tests/laws tests/soak tests/faults --timeout=3600

# Parts, --minutes and --seed: FAULTS="kills --minutes 5 --seed 3". Writes the table of docs/explanation/guarantees.md.
faults: $(READY) $(LIBRARY)
	$(BIN)/python -m tests.campaign --write $(FAULTS)

$(PEERS)/.ready: constraints-peers.txt
	@echo "Setting up $(PEERS) (some minutes, more than a gigabyte) ..."
	@$(PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints-peers.txt webdataset litdata mosaicml-streaming torchdata grain
	@touch $@

# Writes tests/campaign/peers/results.json, which the table of guarantees.md shows: then `python -m tests.campaign --tables`.
faults-peers: $(PEERS)/.ready
	$(PEERS)/bin/python -m tests.campaign.peers.run

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(LIBRARY) $(NWB_ZARR) $(CELLMAP) $(PEERS) $(DOCS) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/out
