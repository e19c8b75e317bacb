# Needs Python 3.11 or newer and make; every target makes or reuses .venv. PYTHON=... chooses the interpreter.

VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help demo check test examples slow sim crash hostile fuzz bench bench-quick bench-rivals lint wheel docs docs-serve notebooks clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## train real digits with a syncer and two learners on this machine (ARGS="--split classes")
	@$(BIN)/python -m yeto_torch.demo $(ARGS)

BASE ?= main
check: lint  ## before every commit, under a minute: lint, the rules of the house, tests of the rooms changed against BASE=main
	@$(BIN)/python -m pytest --quiet tests/test_architecture.py
	@$(BIN)/python -m tests.changed $(BASE)

JOBS ?= 2
test: $(VENV)/.installed-test  ## the test suite, on JOBS=2 cores (ARGS="-k name")
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

examples: $(VENV)/.installed-test  ## every example with a syncer and two learners, and what its ecosystem expects (minutes)
	@$(BIN)/python -m pytest tests/examples -m "slow or not slow" $(ARGS)

SEEDS ?= 1000
sim: $(VENV)/.installed-test  ## many seeds of the simulated world (SEEDS=5000)
	@$(BIN)/python -m tests.sim --seeds $(SEEDS)

slow: $(VENV)/.installed-test  ## what takes minutes: every layout and wire of the benchmark, slow links, late learners
	@$(BIN)/python -m pytest -m slow $(ARGS)

crash: $(VENV)/.installed-test  ## a hundred SIGKILLs of syncers and learners in all (minutes)
	@$(BIN)/python -m pytest tests/crash -m "crash or not crash" $(ARGS)

hostile: $(VENV)/.installed-test  ## ten thousand connections a minute on a syncer in use (minutes)
	@$(BIN)/python -m pytest tests/e2e -m hostile -s $(ARGS)

TIME ?= 60
fuzz: $(VENV)/.installed-fuzz  ## coverage-guided search for inputs that break a promise (TIME=seconds, ARGS=target)
	@$(BIN)/python -m tests.fuzz.run --time $(TIME) $(ARGS)

evidence: $(VENV)/.installed-evidence  ## every run of docs/evidence.md that has no record, then the page (hours; JOBS=cores)
	@$(BIN)/python -m experiments estimate --jobs $(JOBS)
	@$(BIN)/python -m experiments run --jobs $(JOBS)
	@$(BIN)/python -m experiments report

evidence-quick: $(VENV)/.installed-evidence  ## the same machinery at two seeds and short runs: minutes, no claims
	@$(BIN)/python -m experiments run --quick --jobs $(JOBS)
	@$(BIN)/python -m experiments report --quick

bench: $(VENV)/.installed-test  ## every figure of benchmarks/README.md, for a machine with nothing else to do (ARGS="step wire")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-quick: $(VENV)/.installed-test  ## the same at smaller sizes: under two minutes, on a quiet machine
	@$(BIN)/python -m benchmarks --quick $(ARGS)

bench-rivals: .venv-rivals-torchft/.installed .venv-rivals-hivemind/.installed  ## what a whole round is compared with (Linux, a few minutes)

lint: $(VENV)/.installed-test  ## ruff (rules and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

wheel: $(VENV)/bin/python  ## dist/*.whl
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

docs: $(VENV)/.installed-docs  ## the documentation as a site, in site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-docs  ## the same on http://127.0.0.1:8000, made anew at every change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

notebooks: $(VENV)/.installed-notebooks  ## execute every notebook in place
	@$(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

clean:  ## what can be made again, but for .venv and runs
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One stamp per set of extras: as long as none of these changes, nothing is asked of pip again, and nothing compiled.
COMPILED := $(wildcard yeto_torch/wire/codec/*.[ch] syncer/merge/*.c)
$(VENV)/.installed-%: pyproject.toml $(COMPILED) | $(VENV)/bin/python
	@echo "installing yeto-torch[$*] into $(VENV) (the first time this downloads PyTorch: some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

# Rivals need other versions of what we need, but not another torch: their own packages come first on the path, ours behind.
.venv-rivals-%/.installed: benchmarks/rivals/%.txt | $(VENV)/.installed-test
	@echo "installing $$(tail -n 1 $<) into $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/shared.pth
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# The first interpreter that is new enough and can make a virtual environment.
$(VENV)/bin/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	done; \
	echo "make: no Python 3.11 or newer with venv was found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1
