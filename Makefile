# Two commands: `make demo` and `make test`. Each makes .venv and installs what it needs first.
PYTHON ?= python3
BIN := .venv/bin
# One torch thread per process: two threads on two busy cores are many times slower than one.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all check bench evidence clean help

help:
	@echo "make demo   train the three arms on a small MoE and write a report (4 to 8 minutes on 2 cores)"
	@echo "make test   run the tests (make test-all: the slow ones too)"
	@echo "make check  lint, format and types"
	@echo "make bench  time recording, training and traces, TRL beside them (about 20 minutes on a quiet machine)"
	@echo "make evidence size=quick   every suite of docs/evidence.md in small (size=full block=NAME: one block)"
	@echo "make clean  remove caches and the virtual environment; runs in outputs/ stay"

# torch first and pinned: it must not be resolved again by a package that depends on it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# MegaBlocks pins torch 2.7, so it goes in beside the resolved packages and without its own; the tests run its
# layers on the CPU. Where it does not build (with nvcc, a CUDA torch compiles its extensions), they skip.
.venv/megablocks: .venv/installed
	$(BIN)/pip install --quiet --no-build-isolation --no-deps megablocks==0.10.0 stanford-stk==0.7.1 triton \
		|| echo "MegaBlocks is not installed and its tests will skip: see docs/megablocks.md"
	touch $@

demo: .venv/installed
	$(BIN)/python -m experiments.train -m experiment=demo
	$(BIN)/python -m experiments.report runs=outputs/demo

test: .venv/megablocks
	$(BIN)/python -m pytest -m "not slow" -n 2

test-all: .venv/megablocks
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# TRL, which `against_trl` runs beside the loop; without it the results say so.
.venv/peers: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[peers]' \
		|| echo "TRL is not installed and will be missing from the results: see docs/benchmarks.md"
	touch $@

bench: .venv/peers
	$(BIN)/python -m experiments.benchmarks.all

# The paper's figures: quick (minutes, no conclusions), or full in blocks of at most 45 minutes.
size ?= quick
evidence: .venv/installed
	$(BIN)/python -m experiments.evidence size=$(size) $(if $(block),block=$(block))

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find moe_rl experiments tests -name __pycache__ -prune -exec rm -rf {} +
