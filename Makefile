# `make help` lists the targets. VENV=path uses another virtual environment.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := hetero_fw recipes train.py $(wildcard plugins/hydra_plugins)

.DEFAULT_GOAL := help
.PHONY: help setup check test lint format bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST)

setup: $(STAMP) ## create the virtual environment and install what constraints.txt pins

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

check: lint test ## everything that CI runs

test: $(STAMP) ## run the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP) ## formatting, lint, types and the import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## print the benchmark figures and ratios
	$(BIN)/python -m pytest -m benchmark -s --timeout=1800 tests/benchmarks

clean: ## remove environments, caches and build leftovers (never outputs/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
