# `make demo` and `make test` need Python 3.11 or newer, and nothing else. PYTHON names another one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: install demo test test-all lint clean

install: .venv/.installed

.venv/.created:
	@test -n "$(PYTHON)" || { echo "mlxbatch needs Python 3.11 or newer; make PYTHON=/path/to/python3"; exit 1; }
	@# Debian keeps ensurepip in a package of its own (python3-venv): without it, pip comes from outside.
	$(PYTHON) -m venv .venv 2>/dev/null || { \
		$(PYTHON) -m venv --clear --without-pip .venv && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check pip; }
	@touch $@

.venv/.installed: pyproject.toml .venv/.created
	@echo "Installing mlxbatch and what it needs into .venv"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.dev: pyproject.toml .venv/.created
	@echo "Installing mlxbatch and its test tools into .venv"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ .venv/.installed

demo: .venv/.installed
	@mkdir -p out
	$(BIN)/mlxbatch run --in-process -i examples/prompts.jsonl -o out/demo.jsonl --overwrite

test: .venv/.dev lint
	$(BIN)/python -m pytest

test-all: .venv/.dev lint
	$(BIN)/python -m pytest -m ""

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf build dist out *.egg-info
