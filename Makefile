PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-all lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: install
	mkdir -p out
	$(BIN)/mlxbatch run -i examples/prompts.jsonl -o out/demo.jsonl --overwrite

test: install lint
	$(BIN)/python -m pytest

test-all: install lint
	$(BIN)/python -m pytest -m ""

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf build dist out *.egg-info
