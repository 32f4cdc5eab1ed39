# The two commands of the README are `make compare` and `make test`; `make check` runs all that CI runs.
#
#   make test PYTHON=python3.12      another interpreter for the virtual environment
#   make test VENV=none              no virtual environment: use PYTHON and what is installed there,
#                                    for machines with a GPU build of torch and no network
#   make test ARGS="-k mark -x"      more arguments for pytest (or, with compare, for the command)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(VENV),none)
PY := $(PYTHON)
BIN :=
READY := build/named/sgl_piecewise/__init__.py
export PYTHONPATH := $(CURDIR)/build/named
else
BIN := $(CURDIR)/$(VENV)/bin/
PY := $(BIN)python
READY := $(VENV)/.installed
endif
# Without this, `python -m` would find the folder sgl_piecewise/ here instead of the package.
export PYTHONSAFEPATH := 1

.PHONY: help compare test test-slow test-matrix check lint format types layers named clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

compare: $(READY)
	$(PY) -m sgl_piecewise compare $(ARGS)

# Two processes on a machine with two cores; where pytest-xdist is missing, one: ARGS="..." NUM_PROCESSES=
NUM_PROCESSES ?= $(shell $(PY) -c 'import importlib.util as u, os; print(min(os.cpu_count() or 1, 8) if u.find_spec("xdist") else "")' 2>/dev/null)

test: $(READY)
	$(PY) -m pytest $(if $(NUM_PROCESSES),-n $(NUM_PROCESSES)) $(ARGS)

test-slow: $(READY)
	$(PY) -m pytest -m slow --timeout 600 $(if $(NUM_PROCESSES),-n $(NUM_PROCESSES)) $(ARGS)

# Hours on a CPU, where graphs are emulated.
test-matrix: $(READY)
	$(PY) -m pytest -m matrix --timeout 7200 $(ARGS)

check: lint types layers test test-slow

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	$(PY) scripts/file_tree.py
	$(PY) scripts/faults_covered.py

# mypy and import-linter need the modules laid out by their names: see scripts/named_tree.py.
types: named
	cd build/named && $(PY) -m mypy --config-file $(CURDIR)/pyproject.toml -p sgl_piecewise

layers: named
	cd build/named && $(BIN)lint-imports --no-cache --no-logo $(CURDIR)/pyproject.toml

named: $(READY)
	$(PY) scripts/named_tree.py

build/named/sgl_piecewise/__init__.py: $(shell find compiler passes runtime models sgl_piecewise -name '*.py')
	$(PYTHON) scripts/named_tree.py

# Some systems ship Python without ensurepip: there the environment gets its pip from the system's.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is older: try make PYTHON=python3.12")'
	@echo "Installing pinned packages into $(VENV): about two minutes, torch is large."
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; }
	$(PY) -m pip install --quiet --constraint constraints.txt setuptools
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,models,openvino]'
	@touch $@

clean:
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
