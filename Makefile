# Everything here needs Python 3.11 to 3.13, make and a package index. Paths are relative: a
# checkout may lie under a folder with a space in its name.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo dev test test-oldest screenshots check format bench bench-runs proto docs constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

# Made anew when the dependencies change, or when the interpreter it was made with is gone.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "outbox_pipelines needs Python 3.11 to 3.13: say which with make PYTHON=python3.12 …"; exit 1; }
	@echo "installing into .venv (about a minute the first time) …"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch .venv/installed

install: .venv/installed ## Make .venv and install the package with what it needs

demo: .venv/installed ## See it work: five tenants' rows leave in Dagster runs, then the proof
	@$(BIN)/python -m outbox_pipelines.cli demo $(ARGS)

dev: .venv/installed ## Run database, ML service, webserver and daemon until Ctrl-C
	@$(BIN)/python -m outbox_pipelines.cli dev $(ARGS)

test: .venv/installed ## Run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

# The launcher uses names of Dagster that no release promises to keep: its tests are also run with the oldest one.
test-oldest: .venv-oldest/installed ## Run the launcher's tests with the oldest Dagster that it supports
	@.venv-oldest/bin/python -m pytest -n $(WORKERS) --dist loadgroup tests/launch --deselect tests/launch/test_many_runs.py $(ARGS)

.venv-oldest/installed: pyproject.toml constraints.txt
	@echo "installing into .venv-oldest …"
	@$(PYTHON) -m venv --clear .venv-oldest
	@grep -v '^dagster' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint .venv-oldest/constraints.txt --editable '.[dev]' \
	  'dagster==1.13.0' 'dagster-graphql==1.13.0' 'dagster-webserver==1.13.0' 'dagster-postgres==0.29.0'
	@touch .venv-oldest/installed

screenshots: .venv/installed ## Take the README's pictures of the UI anew (needs Chromium)
	@OUTBOX_TEST_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/ui $(ARGS)

check: .venv/installed ## Lint, types, the direction of imports, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs.generate --check

format: .venv/installed ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/bench ## Measure speed, beside pgqueuer and procrastinate; writes benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

bench-runs: .venv/installed ## Measure what a Dagster run costs: stock, pooled, forked, reused (about ten minutes)
	$(BIN)/python -m benchmarks runs

.venv/bench: .venv/installed
	@echo "installing the queues to measure beside …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	@touch .venv/bench

proto: .venv/installed ## Generate the gRPC code from training.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  outbox_pipelines/ml_service/training.proto

docs: .venv/installed ## Write the README's table of settings from settings.py
	$(BIN)/python -m docs.generate

constraints: ## Pin the newest versions that fit, in a fresh environment
	@rm -rf .tmp-venv && $(PYTHON) -m venv .tmp-venv
	@.tmp-venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@{ echo "# What the tests were run with. Written by: make constraints"; \
	   .tmp-venv/bin/python -m pip freeze --exclude-editable; } > constraints.txt
	@rm -rf .tmp-venv

clean: ## Remove the environment and what the demo left
	@rm -rf .venv .venv-oldest .outbox build dist .tmp-venv
