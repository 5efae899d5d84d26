# `make demo` and `make test` need only Python 3.11 or newer; both make their own .venv.
PYTHON ?= python3
BIN := .venv/bin
# CPU workers share cores: threads that spin while they wait make each other many times slower.
export OMP_WAIT_POLICY = PASSIVE
export GOMP_SPINCOUNT = 0
export HF_HUB_OFFLINE = 1

# Two tests at a time, one thread each: halves of the list in order, so that fixtures of a file are mostly made once.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test test-slow check install clean

demo: install  ## train the bundled model for about four minutes, then compare it with the base model
	rm -rf runs/demo
	$(BIN)/digen run flowgrpo --model glyph --run-dir runs/demo
	$(BIN)/digen eval runs/demo

test: install  ## the default test suite
	$(PYTEST)

test-slow: install  ## longer tests: learning, equality of all schedules, every command of the README
	$(PYTEST) -m slow

check: install  ## style, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "digen needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist
