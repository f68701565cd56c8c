# Everything runs from two virtual environments made here; nothing else on the machine is touched.
# Needed beforehand: python3.11 with pip and venv, git, make, gcc.

PYTHON ?= python3.11
VENV := .venv
PROTO_VENV := .proto-venv
# The generator's version is the floor of the stubs' grpcio and protobuf, so it is pinned, and apart from the run-time versions.
GRPC_TOOLS := grpcio-tools==1.76.0
# What the drafter must be equal to, in tests and bars. Its own dependencies (a benchmark's) are not installed.
REFERENCE := dflash==0.1.0
# Where `make proto` writes the stubs; the contract test points it at a scratch folder.
OUT ?= .
ONLY ?=
PROMPTS ?= bench/prompts
DRAFTER ?=
# What `make bars ONLY=train` trains on, and from where; without them it does not train.
FEATURES ?=
START ?=

READY := $(VENV)/.ready
PROTO_READY := $(PROTO_VENV)/.ready
RUN := $(VENV)/bin/python
PROTOS = $(wildcard protos/kadence/*/*.proto)

.PHONY: help env demo test check proto lint-proto bars clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        set up, fetch the model, start a cluster on local Ray, stream three prompts, measure, stop"
	@echo "make test        the whole test suite"
	@echo "make check       ruff, mypy, and buf where npx is installed"
	@echo "make proto       regenerate the gRPC stubs"
	@echo "make bars        measurements against their bars; ONLY=group, PROMPTS=folder, DRAFTER=folder"
	@echo "make clean       remove both virtual environments and all caches"

env: $(READY)

$(READY): pyproject.toml Makefile
	@echo "==> environment in $(VENV): about 3 GB, a few minutes; the next time this is instant"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --disable-pip-version-check --progress-bar on -e '.[cluster,dev]'
	@$(RUN) -m pip install --disable-pip-version-check -q --no-deps '$(REFERENCE)'
	@touch $@
	@echo "==> environment ready"

$(PROTO_READY): Makefile
	@echo "==> generator environment in $(PROTO_VENV)"
	@test -x $(PROTO_VENV)/bin/python || $(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/python -m pip install --disable-pip-version-check -q '$(GRPC_TOOLS)'
	@touch $@

demo: $(READY)
	@$(RUN) -m deploy.demo

test: $(READY) $(PROTO_READY)
	@$(RUN) -m pytest

check: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check --quiet .
	@$(RUN) -m mypy
	@if command -v npx >/dev/null; then $(MAKE) --no-print-directory lint-proto; else echo "buf: skipped, npx is not installed"; fi

proto: $(PROTO_READY)
	@$(PROTO_VENV)/bin/python -m grpc_tools.protoc -I protos --python_out=$(OUT) --pyi_out=$(OUT) --grpc_python_out=$(OUT) $(PROTOS)

lint-proto:
	@npx --yes @bufbuild/buf@1.75.0 lint protos && echo "buf: no findings"

bars: $(READY)
	@$(RUN) -m bench.bars $(if $(ONLY),--only $(ONLY)) --prompts $(PROMPTS) $(if $(DRAFTER),--drafter $(DRAFTER)) $(if $(FEATURES),--features $(FEATURES)) $(if $(START),--start $(START))

clean:
	rm -rf $(VENV) $(PROTO_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
