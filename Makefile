# Every target sets up what it needs in .venv; nothing to export, nothing to start by hand.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The only CPU build of torch that all our machines have. Other versions are a matter for `make soak`.
TORCH  ?= 2.13.0
# Tests wait for processes more than they compute: three at a time, also on two cores.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -m "not soak"

# Paddle's CPU package, for tests of the trainer that has it in place of torch. Nothing else of it is pinned.
PADDLE ?= 3.3.1
PADDLE_VENV := .venv-paddle

# TRL, with its own versions of transformers, accelerate and peft. Other versions of the range in pyproject.toml: `make test-trl TRL=1.15.0`.
TRL ?= 1.16.0
TRL_VENV := .venv-trl
TRL_PYTEST := $(TRL_VENV)/bin/python -m pytest tests/trl
BENCH_VENV := .venv-bench

# vLLM's CPU package, a third party's build, for tests only. Its versions are pinned with their hashes in tests/vllm/pins.
VLLM ?= 0.32.0
VLLM_VENV := .venv-vllm/$(VLLM)

# Another torch than everything else has, for a trainer beside vLLM's.
OTHER_TORCH ?= 2.6.0
OTHER_VENV := .venv-torch/$(OTHER_TORCH)

.PHONY: venv environments demo picture profile test test-paddle test-trl test-vllm check soak soak-trl soak-vllm bench wheel clean
venv: $(VENV)/.ready

# torch first: a range alone would pull the newest build with gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml setup.py $(wildcard native/*.c native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[demo,nixl]" --group dev
	touch $@

# All that CI needs: the two large ones at once; what builds the package in this tree, one after the other.
environments:
	$(MAKE) -j 2 venv $(VLLM_VENV)/.packages
	$(MAKE) $(PADDLE_VENV)/.ready $(TRL_VENV)/.ready $(VLLM_VENV)/.ready

demo: venv
	$(BIN)/liveweight demo

# The README's picture of the demo, from a whole run.
picture: venv
	$(BIN)/python docs/pictures/draw.py

# The picture of docs/performance.md: where a round's time goes.
profile: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python -m pip install --quiet "py-spy>=0.4,<1"
	PATH="$(abspath $(BENCH_VENV))/bin:$$PATH" $(BENCH_VENV)/bin/python docs/pictures/profile.py

# What fails is run once more, alone: what fails again is broken, what passes then says that a test depends on its neighbours or on the
# machine's load. Its first failure stays in the log, and is a defect too.
test: venv
	$(PYTEST) -n $(WORKERS) --dist worksteal --durations 25 || $(PYTEST) --last-failed --last-failed-no-failures none

# Two environments: Paddle without torch in one, the engine and the tests in the other.
test-paddle: venv $(PADDLE_VENV)/.ready
	LIVEWEIGHT_PADDLE_PYTHON=$(PADDLE_VENV)/bin/python $(BIN)/python -m pytest tests/paddle

$(PADDLE_VENV)/.ready: pyproject.toml setup.py $(wildcard native/*.c native/*.h) | venv
	$(PYTHON) -m venv $(PADDLE_VENV)
	$(PADDLE_VENV)/bin/python -m pip install --quiet "paddlepaddle==$(PADDLE)"
	$(PADDLE_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

# TRL's trainer, the engine and the tests in one environment. What fails is run once more, as in `make test`.
test-trl: $(TRL_VENV)/.ready
	$(TRL_PYTEST) -m "not soak" --durations 15 || $(TRL_PYTEST) -m "not soak" --last-failed --last-failed-no-failures none

# Whole training runs: three seeds, killed engines and ranks, vLLM's server.
soak-trl: $(TRL_VENV)/.ready $(VLLM_VENV)/.ready
	LIVEWEIGHT_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(TRL_PYTEST) -m soak --timeout 3600

# torch first, as above; then TRL, so that nothing after it brings another one.
$(TRL_VENV)/.ready: pyproject.toml setup.py $(wildcard native/*.c native/*.h)
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(TRL_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)"
	$(TRL_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" "trl==$(TRL)" "peft>=0.17,<1"
	$(TRL_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" --editable ".[demo]" --group dev
	touch $@

# Two environments again: vLLM in one, the trainer and the tests in the other.
test-vllm: venv $(VLLM_VENV)/.ready
	LIVEWEIGHT_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m "not soak" tests/vllm

# Tensor parallel, experts, the demo, programs in vLLM's environment, also of Ray, a trainer with another torch: a server or two for each.
soak-vllm: venv $(VLLM_VENV)/.ready $(OTHER_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pip install --quiet "ray==2.60.0"
	LIVEWEIGHT_VLLM_PYTHON=$(VLLM_VENV)/bin/python LIVEWEIGHT_OTHER_PYTHON=$(abspath $(OTHER_VENV))/bin/python \
	  $(BIN)/python -m pytest -m soak tests/vllm

# The oldest torch that is supported, with all that it brings: some gigabytes where it has no build for CPUs alone.
$(OTHER_VENV)/.ready: pyproject.toml setup.py $(wildcard native/*.c native/*.h)
	$(PYTHON) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/python -m pip install --quiet "torch==$(OTHER_TORCH)"
	$(OTHER_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

# The package itself first, without what it asks for: torch's companions for sound and pictures have no CPU build everywhere.
$(VLLM_VENV)/.packages: tests/vllm/requirements.py tests/vllm/pins/$(VLLM).txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" packaging
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --require-hashes -r tests/vllm/pins/$(VLLM).txt
	$(VLLM_VENV)/bin/python tests/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" -r $(VLLM_VENV)/requirements.txt
	touch $@

$(VLLM_VENV)/.ready: $(VLLM_VENV)/.packages pyproject.toml setup.py $(wildcard native/*.c native/*.h)
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable .
	touch $@

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The last one must find torn tokens: a detector that finds nothing there would prove nothing above.
soak: venv
	$(BIN)/python -m pytest -m soak --timeout 3600
	$(BIN)/liveweight torture --kills 1000
	$(BIN)/liveweight torture --target in-place --kills 50

# An environment of its own: what is compared with is not needed for anything else.
bench: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/liveweight bench digest
	$(BENCH_VENV)/bin/liveweight bench engine
	$(BENCH_VENV)/bin/liveweight bench all --out bench

$(BENCH_VENV)/.ready: pyproject.toml setup.py $(wildcard native/*.c native/*.h)
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BENCH_VENV)/bin/python -m pip install --quiet "torch==$(TORCH)"
	$(BENCH_VENV)/bin/python -m pip install --quiet --editable ".[nixl,bench]"
	touch $@

wheel: venv
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) tests/wheel_smoke.py dist

clean:
	rm -rf $(VENV) $(PADDLE_VENV) $(TRL_VENV) $(BENCH_VENV) .venv-vllm .venv-torch build dist src/*.egg-info
