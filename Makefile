# Tessera: `make` lists what there is to do. Everything runs in .venv, which is made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all coverage check docs docs-version bench artifact venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## the gain on two different cards, the proof on a small model, and where it does not pay
	$(BIN)/tessera demo

# More processes than two cores: some tests wait.
test: $(READY) ## run every test that needs no GPU
	$(BIN)/python -m pytest -n 4 --dist loadfile

test-all: $(READY) ## the same with slow tests, whole proofs and new random examples
	$(BIN)/python -m pytest -n 4 --dist loadfile --whole

coverage: $(READY) ## run the tests, and say how much of each package they run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pytest-cov
	$(BIN)/python -m pytest -n 4 --dist loadfile --cov --cov-report=json:build/coverage.json
	$(BIN)/python scripts/coverage_by_package.py build/coverage.json

check: $(READY) ## lint, types, import contracts and the line budget
	$(BIN)/ruff check src tests benchmarks scripts examples corpus
	$(BIN)/ruff format --check src tests benchmarks scripts examples corpus
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/size.py

docs: $(READY) ## build the documents as a site, build/site; fails on a link that leads nowhere
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-version: docs ## add the site to the branch gh-pages under its version, and make it the latest
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(BIN):$$PATH" mike deploy --update-aliases $$(sed -n 's/^__version__ = "\(.*\)\..*"$$/\1/p' src/tessera/__init__.py) latest
	$(BIN)/mike set-default latest

bench: $(READY) ## measure the planner, the simulator and the analyzer on this machine
	for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python -m benchmarks.$$(basename $$bench .py) || exit 1; done

artifact: $(READY) ## check the claims of docs/claims.md, half an hour on two cores
	$(BIN)/python scripts/artifact.py

venv: $(READY) ## make .venv and install everything into it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Tessera needs Python 3.11 or later; try: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
		|| { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and the rest into $(VENV); this takes a few minutes, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean: ## remove .venv and everything that was made
	rm -rf $(VENV) tessera-demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
