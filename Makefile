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

OLDEST := build/oldest
VLLM := build/vllm
# Further options for pip where torch's CPU builds are not in the usual index, e.g. --extra-index-url URL.
PIP_OPTIONS ?=

.PHONY: demo test test-slow test-oldest test-vllm vllm check install clean

demo: install  ## train the bundled model for about four minutes, then compare it with the base model
	rm -rf runs/demo
	$(BIN)/digen run flowgrpo --model glyph --run-dir runs/demo
	$(BIN)/digen eval runs/demo

test: install  ## the default test suite
	$(PYTEST)

# In three parts, because whatever processes a part keeps warm for its tests stays in memory to its end.
test-slow: install  ## longer tests: learning, equality of all schedules, every command of the README
	for part in a-f g-o p-z; do $(PYTEST) -m slow tests/test_[$$part]*.py || exit 1; done

test-oldest: install $(OLDEST)/installed  ## latents and pixels of the pipelines, with the oldest libraries that are allowed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest tests/test_models.py -p no:cacheprovider \
	  -k "plain_pipeline or as_if_alone or ratio_one"

test-vllm: vllm  ## the generator vllm-omni on the real engine, on CPU, in an environment of its own
	OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=ERROR TQDM_DISABLE=1 $(VLLM)/bin/python -m pytest tests/vllm -m vllm -W ignore \
	  -p no:cacheprovider
	$(BIN)/python .ci/vllm.py record

vllm: install $(VLLM)/installed

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

# What .venv has is found after what is installed here, so that nothing large is there twice.
$(OLDEST)/installed: pyproject.toml
	$(BIN)/python -m venv --clear $(OLDEST)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	$(OLDEST)/bin/python -m pip install --quiet diffusers==0.40.0 transformers==5.13.0
	touch $@

# The engine pins other versions of what .venv has; all that it does not pin is found there, after what is here.
$(VLLM)/installed: $(wildcard tests/vllm/*.txt) $(shell find tests/vllm/plugin -name '*.py' -o -name '*.toml')
	$(BIN)/python -m venv --clear $(VLLM)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/newest.pth"
	$(VLLM)/bin/python -m pip install --quiet $(PIP_OPTIONS) --no-deps -r tests/vllm/engine.txt
	$(VLLM)/bin/python -m pip install --quiet $(PIP_OPTIONS) -r tests/vllm/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation ./tests/vllm/plugin
	cp tests/vllm/plugin/tv_schema_shim.py "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	echo 'import tv_schema_shim' \
	  > "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/a_tv_schema_shim.pth"
	touch $@

clean:
	rm -rf .venv build dist
