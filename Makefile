# `make demo` and `make test` set up all they need on a machine with Python >= 3.10, git and make. Run again, they
# reuse what stands.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin

.PHONY: help env target demo test lint types check clean
help:
	@echo "make demo    train a tree drafter for SmolLM2-135M on this CPU, then compare plain, chain and tree decoding"
	@echo "make test    run the test suite"
	@echo "make check   lint, types and tests"
	@echo "make env     the virtual environment .venv with everything installed"
	@echo "make target  fetch SmolLM2-135M and convert it into the cache (TREESPARK_CACHE or ~/.cache/treespark)"
	@echo "make lint    ruff      make types   mypy --strict      make clean   remove the demo's runs"

env: .venv/.installed
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON=/path/to/it" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,target]'
	touch $@

target: env
	$(BIN)/python tools/fetch_smollm2.py

# A finished run stands until its recipe changes; `make clean` removes it.
demo: target
	test runs/demo/drafter/config.json -nt recipes/demo.yaml || $(BIN)/treespark fit --config recipes/demo.yaml
	$(BIN)/treespark bench --drafter runs/demo/drafter --suites recipes/data/test.jsonl \
		--modes plain,chain,tree --num_prompts 10 --max_new_tokens 64 --output runs/demo/results.json

# One thread per worker: the tests' tensors are tiny, and two busy workers fill two cores.
test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy --strict treespark

check: lint types test

clean:
	rm -rf runs/demo
