# Two commands on a fresh machine: `make train` and `make test`. Everything else is for working on the code.
PYTHON ?= python3
VENV ?= .venv
# Named first, so that nothing else chooses a release: DeepSpeed's requirement alone would take the newest.
TORCH ?= torch==2.13.0
TOPOLOGY ?= 4x2
PLANNER ?= sap
ARGS ?=
export OMP_NUM_THREADS ?= 1
BIN = $(VENV)/bin
READY = $(VENV)/.ready
RUN = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python

.PHONY: help train test test-gpu exhaustive check types coverage format golden parity clean
.PHONY: bench bench-planning bench-packing bench-loader bench-fidelity bench-attention bench-nodes bench-train bench-memory bench-tsp bench-gpu bench-mutants bench-fuzz bench-planfuzz
.PHONY: bench-faults bench-soak

help:  ## Show the targets.
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[dev]"
	touch $(READY)

train: $(READY)  ## Set up, then pretrain the tiny model on the corpus in datasets/ (TOPOLOGY=4x2 PLANNER=sap ARGS=...).
	$(RUN) train.py +topology=$(TOPOLOGY) planner=$(PLANNER) $(ARGS)

test: $(READY)  ## Set up, then run all tests that need no GPU.
	$(RUN) -m pytest -m "not exhaustive" -n 2 --dist loadscope

test-gpu: $(READY)  ## Everything that needs a CUDA device, on one GPU and, where there are more, on all over NCCL.
	$(RUN) -m tests.gpu $(ARGS)

exhaustive: $(READY)  ## Every combination of planner, mask, heads and topology, which `test` meets in pairs: an hour.
	$(RUN) -m pytest -m exhaustive -n 2

check: $(READY)  ## Style, types, and most of the tests that need no torch: for every edit.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) -m pytest -m "not slow" tests/ir tests/compiler tests/planners tests/verify tests/test_cli.py tests/test_imports.py -n 2

types: $(READY)  ## Types alone, by mypy, whose settings are in pyproject.toml.
	$(BIN)/mypy

coverage: $(READY)  ## The tests of `test`, and the lines of hsap/ that they run, by file; 90 % at the least.
	$(BIN)/coverage erase
	COVERAGE_FILE="$(CURDIR)/.coverage" $(RUN) -m coverage run -m pytest -m "not exhaustive" -n 2 --dist loadscope
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=90

format: $(READY)  ## Bring the code to the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(READY)  ## Rewrite the golden plans in tests/golden on purpose.
	$(RUN) -m tests.golden.regenerate

parity: $(READY)  ## Loss and gradients of every topology, ZeRO stage and accumulation against one process.
	$(RUN) -m tests.parity

.PHONY: docs
docs: $(READY)  ## Build the documentation into site/, strictly: a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

bench: bench-planning  ## Planning, then the accuracy of split attention.
	$(RUN) -m tests.bench.accuracy

bench-planning: $(READY)  ## Balance, bytes and time of every planner (ARGS="--quick", "--runs 5 --markdown FILE").
	$(RUN) -m tests.bench.planning $(ARGS)

bench-packing: $(READY)  ## How full, how even and how fast packs are made, on 16 datasets' lengths (ARGS="--quick").
	$(RUN) -m tests.bench.packing $(ARGS)

bench-loader: $(READY)  ## Tokens/s of packing, batching and planning beside training's, and its waits (ARGS="--quick").
	$(RUN) -m tests.bench.loader $(ARGS)

bench-fidelity: $(READY)  ## Real times of plans against the simulator's, calibrated first (ARGS="--ranks 2 4 8", "--nodes 2").
	$(RUN) -m tests.bench.fidelity $(ARGS)

bench-attention: $(READY)  ## The executor on 8 gloo ranks against one process, DeepSpeed and torch (ARGS="--quick").
	$(RUN) -m tests.bench.attention $(ARGS)

bench-nodes: $(READY)  ## Planners over two to four emulated nodes at 1 Gb/s; needs root, ip and tc (ARGS="--quick").
	$(RUN) -m tests.bench.nodes $(ARGS)

bench-train: $(READY)  ## Training tokens/s: padded batches, packing with ring and Ulysses, HSAP (ARGS="--quick").
	$(RUN) -m tests.bench.train $(ARGS)

bench-tsp: $(READY)  ## Memory of a rank under TSP, SP, ZeRO 3 and TP, and the TSP paper's case (ARGS="--quick").
	$(RUN) -m tests.bench.tsp $(ARGS)

bench-memory: $(READY)  ## Counted allocations beside the memory model's (ARGS="--drawn 16", "--long").
	$(RUN) -m tests.bench.memory $(ARGS)

bench-gpu: $(READY)  ## Attention on CUDA against flash attention, planners over NCCL, the 135M model's MFU (ARGS="--quick").
	$(RUN) -m tests.bench.gpu $(ARGS)

bench-mutants: $(READY)  ## Does the verifier reject whatever is wrong? 20,000 changed plans (ARGS="--workers 8", "--rejected 500").
	$(RUN) -m tests.bench.mutants $(ARGS)

bench-fuzz: $(READY)  ## Random batches through planning, text and the reference runtime, against float64 (ARGS="--minutes 30").
	$(RUN) -m tests.bench.chainfuzz $(ARGS)

bench-planfuzz: $(READY)  ## Damaged plan files and texts are refused, within memory and time (ARGS="--minutes 10", "--atheris").
	$(RUN) -m tests.bench.planfuzz $(ARGS)

bench-faults: $(READY)  ## Faults of every kind at every moment of training: what is said, left and lost (ARGS="--quick").
	$(RUN) -m tests.bench.faults $(ARGS)

bench-soak: $(READY)  ## Train for long: does anything grow, is it repeatable (ARGS="--minutes 30", "--minutes 120 --out DIR").
	$(RUN) -m tests.bench.soak $(ARGS)

clean:  ## Remove what running has made; the environment stays.
	rm -rf outputs multirun site .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage*
