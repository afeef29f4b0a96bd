# Every target works as the first command on a machine with git, make and Python >= 3.11 with its venv module.
# make PYTHON=python3.12 test     another interpreter
# make test PYTEST_ARGS="tests/nn -k norm"
# pip's own configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) is honoured.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PYTEST_ARGS ?=
# Two processes of pytest. Each begins with one half, in order, so that files keep their fixtures; whoever is done takes
# from the other, so that both are busy to the end.
PARALLEL := -n 2 --dist worksteal
BENCH_ARGS ?=

# The tests start the package in dozens of processes, which would all compile it.
unexport PYTHONDONTWRITEBYTECODE

# requirements.lock pins every version; what is installed is what setup.py asks for. Build isolation is off, because it
# would download a setuptools of its own for each build.
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-compile -c requirements.lock
# pip would compile one file after the other. Some libraries bring files that aren't Python of this version.
COMPILE := $(PY) -m compileall -qq -j 0 $(VENV)/lib || true
METADATA := setup.py pyproject.toml requirements.lock

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint bench clean
# Targets given together (make lint test) run in the order given.
.NOTPARALLEL:
# A failed step must not leave a target that looks finished.
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create .venv and install megalite into it

quickstart: $(VENV)/.installed ## train a small GPT on real text and generate a sample, in under 10 minutes
	$(PY) tools/quickstart.py

test: $(VENV)/.installed-dev ## run the test suite (PYTEST_ARGS="...")
	$(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-all: $(VENV)/.installed-dev ## run the long tests too, for hours: whole programs and every layout
	$(PY) -m pytest -m "not smollm2" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## ruff, format, types and the project's own rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/lint_rules.py

bench: $(VENV)/.installed-dev ## training speed beside others, in one table (BENCH_ARGS="...")
	$(PY) -m benchmarks.run $(BENCH_ARGS)

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist megalite.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "make: no '$(PYTHON)' here: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $$($(PYTHON) --version 2>&1) is too old, megalite needs 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) lacks the venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.build-tools: $(VENV)/.created requirements.lock
	$(PIP_INSTALL) setuptools
	@touch $@

$(VENV)/.installed: $(VENV)/.build-tools $(METADATA)
	$(PIP_INSTALL) --no-build-isolation -e .
	$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.build-tools $(METADATA)
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	$(COMPILE)
	@touch $@ $(VENV)/.installed
