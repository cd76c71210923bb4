# The commands of README.md. The environment is .venv, made from pyproject.toml, the one source of pins.
PYTHON ?= python3
BIN := .venv/bin
# On Linux a plain `pip install torch` takes a CUDA build of several GB; TORCH_INDEX names where to get another, e.g.
# make repro TORCH_INDEX="--index-url <the CPU index named on pytorch.org>"
TORCH_INDEX ?=

.PHONY: repro test lab benchmark clean-notebooks check

# rebuilt whenever the pins change; the mark comes last, so that an interrupted install is not mistaken for one
.venv/ready: pyproject.toml
	rm -rf .venv
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "Osprey needs Python 3.11 to 3.13; name one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH_INDEX) "$$(sed -n 's/^    "\(torch==.*\)",$$/\1/p' pyproject.toml)"
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

repro: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m osprey.repro

test: .venv/ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

lab: .venv/ready
	$(BIN)/jupyter lab --notebook-dir=notebooks

benchmark: .venv/ready
	$(BIN)/python -m osprey.benchmark

# params.yaml is sound, and dvc.lock and results/ are what the code as it stands would make
check: .venv/ready
	$(BIN)/python -m osprey.params
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m dvc repro --dry --allow-missing

# opening a stage's notebook in JupyterLab dirties its stage; this makes it byte-identical to a clean one again
clean-notebooks: .venv/ready
	$(BIN)/nbstripout --keep-id --extra-keys "metadata.language_info metadata.papermill cell.metadata.papermill cell.metadata.execution" notebooks/*.ipynb
	sed -i.saved 's/^\( *"display_name": \)".*"/\1"Python 3"/' notebooks/*.ipynb
	rm notebooks/*.saved
