"""environment.yml repeats the pins of pyproject.toml, which are their one source."""

import re
import tomllib

import yaml
from walk import ROOT

CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["test"]
    return dict(requirement.split("==") for requirement in listed)


def test_conda_and_pip_agree():
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    there = dict(spec.split("=") for spec in conda if "=" in spec)
    assert there.pop("python") == "3.11"
    there |= dict(spec.split("==") for spec in pip["pip"])
    assert there == {CONDA_NAMES.get(name, name): version for name, version in pins().items()}


def test_every_import_is_pinned():
    known = {"yaml": "pyyaml", "IPython": "ipykernel", "jinja2": "jupyterlab", "huggingface_hub": "transformers"}
    found = set()
    for file in (ROOT / "osprey").rglob("*.py"):
        found |= {match[1] for match in re.finditer(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE)}
    import sys

    outside = {known.get(name, name) for name in found if name not in sys.stdlib_module_names and name != "osprey"}
    assert {name.replace("_", "-") for name in outside} <= set(pins())


def test_makefile_installs_the_pinned_torch():
    line = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "torch==" in line)
    assert re.fullmatch(r'    "(torch==.*)",', line), "the Makefile's sed looks for this form"
