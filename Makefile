# make demo   install and train a tiny image policy on this machine's CPU
# make test   install and run every test that needs no GPU
VENV := .venv
READY := $(VENV)/.installed
# Two workers share the suite by file; what takes long begins first (tests/conftest.py).
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test fast lint types clean

demo: $(READY)
	$(VENV)/bin/agentrl train --env screenshot_math --algo reinforce_pp

test: lint types
	$(PYTEST) -m "not gpu"

fast: $(READY)
	$(PYTEST) -m "not gpu and not slow"

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Types are checked on the built wheel: the folders become sub-packages of agentrl only there.
types: $(READY)
	scripts/check_types.sh $(VENV)

$(READY): pyproject.toml scripts/install.sh
	scripts/install.sh $(VENV) cpu,test,docs
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
