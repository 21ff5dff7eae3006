# make demo, make test: each does everything on a bare machine, the virtual environment included.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Nothing here loads from a model hub.
export HF_HUB_OFFLINE = 1

.PHONY: demo test test-all zoo lint clean

demo: $(VENV)/.installed
	$(BIN)/t5fx demo

test: lint
	$(BIN)/python -m pytest -n auto -m "not slow"

test-all: lint
	$(BIN)/python -m pytest -n auto -m "slow or not slow"

# The table of docs/zoo.md, anew.
zoo: $(VENV)/.installed
	$(BIN)/python tests/zoo_table.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	@rm -rf build/typed && mkdir -p build/typed && cp -r t5fx build/typed/ && cp -r passes kernels build/typed/t5fx/
	cd build/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p t5fx

# The stamp is as new as the dependencies: a second call installs nothing.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
