# Needs only make and Python 3.11 or newer. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
PLUGINS := $(sort $(dir $(wildcard plugins/*/pyproject.toml)))

.PHONY: help demo jaeger test plugins lint types coverage check bench mutate all-pythons clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-18s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## see an agent that runs into its limits, offline
	@$(BIN)/python examples/02_agent.py

jaeger: ## build Jaeger (once) and start it, without its web pages
	@.ci/jaeger

test: $(VENV)/.dev ## run the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.dev ## check style and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## check types with mypy and pyright
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

coverage: $(VENV)/.dev ## run the tests, at least 95 % covered
	$(BIN)/python -m pytest --cov --cov-report=term

check: lint types coverage ## lint, types, and the tests with coverage

plugins: $(VENV)/.dev ## install the plugins and test them; LOOPGUARD_TEST_REDIS names an empty database
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --editable ,$(PLUGINS))
	$(BIN)/mypy $(wildcard plugins/*/loopguard_*)
	$(BIN)/pyright --pythonpath $(BIN)/python $(wildcard plugins/*/loopguard_*)
	set -e; for plugin in $(PLUGINS); do $(BIN)/python -m pytest $${plugin}tests; done
	$(BIN)/python -m pytest tests/scenarios

bench: $(VENV)/.dev ## measure guarded calls, model calls, ledgers and the command
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/metering.py
	$(BIN)/python benchmarks/ledgers.py
	$(BIN)/python benchmarks/cli.py

mutate: $(VENV)/.dev ## plant faults and count those that the tests miss
	$(BIN)/python tests/mutation/run.py

all-pythons: $(VENV)/.dev ## run the tests on every Python 3.11+ of this machine
	$(BIN)/nox

clean: ## delete what can be made again, except the virtual environment
	rm -rf .nox .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* coverage.xml htmlcov build dist mutants
	find loopguard tests examples benchmarks plugins -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "loopguard needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) -V 2>&1)" >&2; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The stamps say that what pyproject.toml asks for is installed.
$(VENV)/.demo: EXTRAS := [otlp]
$(VENV)/.dev: EXTRAS := [dev]
$(VENV)/.demo $(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (once) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(EXTRAS)'
	@touch $@
