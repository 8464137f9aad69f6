# demo test test-long check bench clean; PYTHON=python3.12 picks another interpreter, ARGS go to pytest.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --constraint constraints.txt
EXTRAS := all

.DEFAULT_GOAL := test
.PHONY: demo test test-long check bench clean

# The stamp makes the second `make test` install nothing. The build back end is installed first and used
# without isolation, so that it is pinned like everything else.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]' --group test
	@touch $@

demo: $(VENV)/.installed
	$(RUN) examples/tiny_grpo/demo.py

test: $(VENV)/.installed
	$(RUN) -m pytest -n 2 --dist loadfile -m "not long and not soak" $(ARGS)

test-long: $(VENV)/.installed
	$(RUN) -m pytest -n 2 --dist loadfile -m "long and not soak" $(ARGS)

check: $(VENV)/.installed
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)

# One JSON object a line on stdout; a benchmark is a file that can be run.
bench: $(VENV)/.installed
	@set -e; for file in $$(grep -l '__main__' benchmarks/*.py); do $(RUN) $$file; done

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
