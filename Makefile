# make chat    set up, fetch the demo pair, open the chat on it
# make test    set up, run the whole suite            (ARGS="-k loop" narrows it)
# make lint    ruff, mypy --strict, import-linter
# make bench   plain against speculative on the demo pair
# make bench-gpu  forwards and rounds, random weights, on a card (reduced without one)
#                 ARGS="--pair demo": a pair in fp32, bf16 and NF4 side by side
# make bench-peers  this program and the published dflash in turn on the demo pair (Linux)
# make bench-llama  this program in NF4 and llama.cpp in turn on the demo pair (needs a C++ compiler)
# make bench-forward  this program's forward of the demo target and transformers' own
# make demo-draft  train the demo draft anew (hours; resumes), into dflash_local/demo_draft
# make clean   remove .venv and everything that was built
#
# PYTHON=python3.12 chooses the interpreter of .venv; MODEL=name another pair.

PYTHON ?= python3
MODEL ?= demo
PROMPT ?= Name three things that make a city pleasant to live in.
ARGS ?=
# Test processes at once; each computes on one thread. 0 runs everything in one, for a debugger.
WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Apple Silicon runs on MLX, so there the chat needs no PyTorch. Elsewhere it goes in first, pinned.
TORCH := $(if $(filter Darwin-arm64,$(shell uname -s)-$(shell uname -m)),,torch)

.PHONY: chat test lint bench bench-gpu bench-peers bench-llama bench-forward demo-draft clean

chat: .venv/ready
	@$(BIN)/dflash-local pull $(MODEL)
	@if [ -t 0 ] && [ -t 1 ]; then \
		$(BIN)/dflash-chat --model $(MODEL); \
	else \
		echo "No terminal on stdin and stdout: answering one prompt in plain text (PROMPT=... gives another)."; \
		echo "> $(PROMPT)"; \
		$(BIN)/dflash-local generate --model $(MODEL) "$(PROMPT)"; \
	fi

test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/packaging/lay_out.py build/imports
	cd build/imports && ../../$(BIN)/lint-imports --no-cache --config ../../pyproject.toml

bench: .venv/ready
	@$(BIN)/dflash-local pull $(MODEL)
	$(BIN)/dflash-local bench --model $(MODEL) $(ARGS)

bench-gpu: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m dflash_local.backends.torch_bench $(ARGS)

bench-peers: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers.bench_peers $(ARGS)

bench-llama: .venv/ready-dev
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers.bench_llama $(ARGS)

bench-forward: .venv/ready-dev
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m tests.peers.bench_forward $(ARGS)

DEMO_DRAFT := build/demo-draft
# glibc gives the large blocks of every step back to the system, which clears them page by page
# when they are asked for again: a twentieth of the time and more. So it keeps them.
KEEP_BLOCKS := MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592
DEMO_TRAIN := $(KEEP_BLOCKS) $(BIN)/dflash-local train demo --answer-tokens 256 --held-out 120
demo-draft: .venv/ready
	@$(BIN)/dflash-local pull demo
	$(DEMO_TRAIN) --out $(DEMO_DRAFT)/first --own 6000 --rows 128 --minutes 50 \
		--draft-vocab 24576 $(ARGS)
	$(DEMO_TRAIN) --out $(DEMO_DRAFT)/second --seed 1 --own 10000 --rows 512 --minutes 40 \
		--draft-vocab 24576 --with $(DEMO_DRAFT)/first --init $(DEMO_DRAFT)/first/draft $(ARGS)
	$(DEMO_TRAIN) --out $(DEMO_DRAFT)/third --seed 2 --own 6000 --rows 512 --minutes 50 \
		--draft-vocab 12288 --selector --short-block 5 --short-share 0.7 \
		--with $(DEMO_DRAFT)/first --with $(DEMO_DRAFT)/second --init $(DEMO_DRAFT)/second/draft $(ARGS)
	cp $(DEMO_DRAFT)/third/draft/* dflash_local/demo_draft/

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dflash_local backends training tui tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"dflash-local needs Python 3.10 or newer, this is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/ready: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing dflash-local into .venv (the first time takes some minutes)."
	$(if $(TORCH),$(PIP) $(TORCH))
	$(PIP) -e .
	@touch $@

.venv/ready-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing dflash-local and its test tools into .venv (the first time takes some minutes)."
	$(PIP) torch
	$(PIP) -e '.[dev,mlx,cuda,plot]'
	@touch $@ .venv/ready
