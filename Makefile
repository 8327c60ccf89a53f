# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv first.

# mxnet, which some tests compare with, exists up to Python 3.11; any Python from 3.11 on runs the product.
PYTHON ?= $(shell for v in 3.11 3.12 3.13 3; do python$$v -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo python$$v && break; done)
# The release that the tests ran with. On a machine with NVIDIA GPUs the index serves its CUDA build under this name.
TORCH ?= torch==2.13.0
JOBS ?= 2

BIN := .venv/bin
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadgroup

.PHONY: help demo test test-all test-cluster test-gpu lint type bench pictures clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: .venv/.ready  ## Pack, check the ranks, train and evaluate on an embedded data set, in three minutes
	rm -rf demo-run
	$(BIN)/rwkvclip demo demo-run

test: lint type  ## Lint, types and a sample of every kind of test (no GPU, no root)
	$(PYTEST) -m "not slow and not gpu and not multigpu and not cluster"

test-all: lint type  ## The full matrices
	$(PYTEST) -m "not gpu and not multigpu and not cluster"

test-cluster: .venv/.ready  ## What needs root and Debian packages: several hosts on this machine
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v ip && command -v nsenter; } >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y iproute2 util-linux >/dev/null; fi || true
	$(BIN)/pytest -m cluster

test-gpu: .venv/.ready  ## What needs an NVIDIA GPU
	$(BIN)/pytest -m "gpu or multigpu"

lint: .venv/.ready  ## Style and layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: .venv/.ready  ## Static types
	$(BIN)/mypy

bench: .venv/.ready  ## Speed, each figure beside its peer in the same run
	for script in tests/benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

pictures: .venv/.ready  ## Record the README's terminal pictures
	$(BIN)/python .assets/record.py

clean:  ## Remove what the other targets made
	rm -rf .venv .venv-mxnet demo-run .pytest_cache .mypy_cache .ruff_cache *.egg-info
