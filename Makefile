# All that is needed is Python 3.11 or newer with pip; everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Oldest and newest supported versions, for `make test-matrix`.
OLDEST := torch==2.13.0 transformers==5.17.0 trl==1.8.0 peft==0.20.0 requests
NEWEST := torch==2.13.0 --upgrade transformers trl peft
MATRIX_TESTS := tests/exactness tests/lora tests/quant tests/trainers tests/cli

.PHONY: demo test test-slow test-gpu test-matrix lint bench-cpu clean

demo: $(STAMP)
	$(BIN)/longreach demo

# Two workers of one thread each: a worker per core of a small machine. Files go out in their order: by number of tests, as is
# the default, the few long ones of a file would come last, with one worker idle.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)
	$(BIN)/pytest -m "slow and not gpu" --timeout 1800

# Most of the time goes into compiling kernels, one thread each: six processes take under five minutes on 16 cores.
test-gpu: $(STAMP)
	OMP_NUM_THREADS=2 $(BIN)/pytest -m gpu -n 6 --dist loadfile --timeout 1800

# Each set of versions gets a virtual environment of its own beside .venv.
test-matrix: $(VENV)-oldest/.installed $(VENV)-newest/.installed
	$(VENV)-oldest/bin/pytest $(MATRIX_TESTS)
	$(VENV)-newest/bin/pytest $(MATRIX_TESTS)

lint: $(STAMP)
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py tests/test_names.py

bench-cpu: $(STAMP)
	$(BIN)/python bench/context_cpu.py

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest .pytest_cache .mypy_cache .ruff_cache

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

$(VENV)-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install -q -e '.[test]' $(OLDEST)
	touch $@

$(VENV)-newest/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install -q -e '.[test]' $(NEWEST)
	touch $@
