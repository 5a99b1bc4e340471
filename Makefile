# Everything runs in .venv, made on demand from pinned versions. Python 3.11 or newer; PYTHON=... chooses another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests start Python many times: compiled modules are kept whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# A test whose limit was not enough to end it (by default 300 s, the longest 900) ends with its process.
# A test mostly waits for its processes: one worker more than there are processors.
WORKERS ?= $(shell echo $$(( $$(nproc) + 1 )))
PYTEST_N := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -o faulthandler_timeout=1000 -o faulthandler_exit_on_timeout=true

.PHONY: run test test-all test-rest test-busy test-gpu bench-gpu test-docker test-slurm test-stacks test-search test-load test-frameworks test-torch lint check format fuzz scenarios docs bench bench-hangs bench-load bench-planted schema clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0 && $(PIP) --editable '.[dev]' || { \
	  echo "make: $(VENV) is not complete, for what pip says above; without a network nothing can be installed. No test was played." >&2; exit 1; }
	touch $@

run: $(STAMP) ## run the main scenario and say where its report is
	$(BIN)/chaos run scenarios/kill-one-rank.yaml

# Of a family of tests, one function with many parameters, a few members are played, drawn by this seed; the command
# that make prints plays the same again.
SAMPLE ?= $(shell git rev-parse --short=7 HEAD 2>/dev/null || echo 1)
OTHERS := docker or slurm or stacks or frameworks

test: $(STAMP) ## each capability once, real processes included (4 minutes on 2 quick cores, 9 on slow ones)
	$(PYTEST_N) --sample $(SAMPLE) -m "not long and not ($(OTHERS))"

# PART=3/36: the third of 36 equal parts, and smokes; WHOLE="tests/a tests/b": these whatever the part.
PART ?= 1/1
WHOLE ?=
PLAYED := --part $(PART) --whole "$(WHOLE)"

test-rest: $(STAMP) ## all members of all families that need no cluster, no stack and no framework (two hours)
	$(PYTEST_N) $(PLAYED) -m "not ($(OTHERS))"

test-all: test-rest test-docker test-slurm test-stacks test-frameworks test-search test-load ## all tests there are, before a release (three hours)

lint: $(STAMP) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint ## lint, and the quick ones of the unit and simulated tests (one minute on 2 quick cores, 2 on slow ones)
	$(PYTEST_N) --sample $(SAMPLE) -m "not real and not slow and not long"
	$(BIN)/python -m tests.project.sizes

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Another search each time; the seed is printed with it.
FUZZ_SEED ?= $(shell date +%s)

fuzz: $(STAMP) ## search random scenarios for ten minutes on the simulator; what is found is left in build/finds
	@echo chaos fuzz --seed $(FUZZ_SEED)
	$(BIN)/chaos fuzz --budget 10m --jobs 2 --seed $(FUZZ_SEED) --into build/finds

# The same searches each time: what changes is the code.
SEARCHED = $(if $(filter 1/1,$(PART)),$(1),$(2))

test-search: $(STAMP) ## searches with a fixed seed: in simulated jobs, in what is judged (PART other than 1/1: an eighth)
	$(BIN)/chaos fuzz --runs $(call SEARCHED,200,25) --budget 10m --jobs 2 --seed 1 --into build/finds
	$(BIN)/chaos fuzz --what judge --runs $(call SEARCHED,600,75) --budget 10m --jobs 2 --seed 1 --into build/finds

AA_RUNS ?= 40

test-busy: $(STAMP) ## arms beside processor hogs, 40 with nothing done to them: none may fail; before a release (more than an hour)
	AA_RUNS=$(AA_RUNS) $(BIN)/python -m pytest -m real tests/harness/run/test_busy_machine.py tests/harness/run/test_hogs_real.py

test-docker: $(STAMP) ## nodes as containers; starts a Docker engine when none runs (as root, with docker.io)
	$(BIN)/python -m pytest $(PLAYED) -m docker

test-slurm: $(STAMP) ## nodes of a real Slurm, which the tests start and stop (as root, with slurm-wlm and munge)
	$(BIN)/python -m pytest $(PLAYED) -m slurm

# A machine with a GPU may have no network: GPU_PYTHON=python3 uses what is there (docs/gpu-results.md says what it needs).
GPU_PYTHON ?= $(BIN)/python
GPU_STAMP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
GPU_RESULTS ?= docs/gpu-results.md

test-gpu: $(GPU_STAMP) ## the tests that need an NVIDIA GPU; skipped where there is none
	$(GPU_PYTHON) -m pytest -m gpu -o addopts=-qra -p no:cacheprovider $(shell grep -rlE --include='test_*.py' '(mark|marks)[.=].*gpu|support.devices' tests)

bench-gpu: $(GPU_STAMP) ## measure on a GPU and write docs/gpu-results.md, in ten minutes; exit status 7 where there is none
	$(GPU_PYTHON) -m benchmarks.gpu --out $(GPU_RESULTS)

test-stacks: $(STAMP) ## small comparisons with torchrun, and with torchft, whose environment it installs when it is played
	CHAOS_REQUIRE=stacks $(BIN)/python -m pytest $(PLAYED) -m stacks

# Training frameworks have an environment of their own, with the product in it: their versions are not the product's.
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
PIP_FRAMEWORKS := $(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check --constraint examples/frameworks/constraints.txt

$(FRAMEWORKS_STAMP): pyproject.toml examples/frameworks/constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(PIP_FRAMEWORKS) torch==2.13.0
	$(PIP_FRAMEWORKS) --editable '.[dev]' lightning pytorch-lightning transformers accelerate deepspeed torchtitan 'triton; sys_platform == "linux"'
	touch $@

test-frameworks: $(FRAMEWORKS_STAMP) ## callbacks of Lightning, Hugging Face and others in real training, and torchtitan; installs them (four to eight minutes, and three to install)
	$(FRAMEWORKS)/bin/python -m pytest $(PLAYED) -m "frameworks or not real" tests/chaos/integrations

# Another torch, in an environment of its own, whatever torch the machine holds pip to.
VERSION ?= 2.15.0
TORCH := .venv-torch-$(VERSION)

$(TORCH)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH)
	grep -v '^torch==' constraints.txt > $(TORCH)/constraints.txt
	PIP_CONSTRAINT=/dev/null $(TORCH)/bin/pip install --quiet --disable-pip-version-check --constraint $(TORCH)/constraints.txt torch==$(VERSION) --editable '.[dev]'
	touch $@

test-torch: $(TORCH)/.installed ## with another torch (VERSION=2.15.0, 3 GB): private names, kill-one-rank, and the recovery tests, or a PART of them
	$(TORCH)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(PLAYED) -m "not long and not ($(OTHERS))" tests/recovery
	$(TORCH)/bin/chaos run scenarios/kill-one-rank.yaml

scenarios: $(STAMP) ## run every scenario for real (those this machine cannot do are skipped)
	for file in scenarios/*.yaml scenarios/*/*.yaml; do \
	  case $$file in *.loader.yaml|*.damage.yaml) continue;; esac; \
	  $(BIN)/chaos run $$file; code=$$?; [ $$code -eq 0 ] || [ $$code -eq 7 ] || exit $$code; done

docs: $(STAMP) ## build the site of the documentation into build/site; a link that leads nowhere is an error
	$(PIP) --requirement docs/site/requirements.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP) ## measure recovery and overhead; prints the tables kept in docs/performance.md and docs/clusters.md
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.elastic
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.loops.attempts
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.nodes
	$(BIN)/python -m benchmarks.control_plane
	$(BIN)/python -m benchmarks.calls

bench-hangs: $(STAMP) ## how fast each family of hangs is found, at two step times (under five minutes, nothing else running)
	$(BIN)/python -m benchmarks.hangs

INSTALL_LOAD := $(PIP) --editable '.[dev,load]'

test-load: $(STAMP) ## the control plane under a small load, driven by Locust, which it installs
	$(INSTALL_LOAD)
	$(BIN)/python -m pytest tests/benchmarks/test_control_plane.py

bench-load: $(STAMP) ## the real coordinator under 512, 2,048 and 8,192 simulated agents, driven by Locust; into docs/control-plane.md (twelve minutes, nothing else running)
	$(INSTALL_LOAD)
	$(BIN)/python -m benchmarks.control_plane.load --all --write docs/control-plane.md

bench-planted: $(STAMP) ## how soon the search finds each planted defect; into docs/search.md (half an hour)
	$(BIN)/python -m benchmarks.planted

schema: $(STAMP) ## write the JSON Schema that editors use for scenarios
	$(BIN)/chaos schema > scenarios/scenario.schema.json

clean: ## remove what was made
	rm -rf $(VENV) $(FRAMEWORKS) runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
