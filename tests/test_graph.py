"""dvc.yaml declares all that a stage depends on: modules, parameters, notebooks; notebooks are thin and clean."""

import ast
import json

import pytest
import yaml
from walk import ROOT, code, reached

from osprey import params, report

COMMITTED = ("data/packages.yaml", "data/paper", "data/sweep", "data/readme.yaml")  # inputs that no stage makes
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))  # one a stage, and explore.ipynb, which is in none


def body(name):
    return STAGES[name].get("do", STAGES[name])


def notebook_of(name):
    found = [dep for dep in body(name)["deps"] if dep.startswith("notebooks/")]
    assert len(found) == 1 and f" {found[0]} " in body(name)["cmd"]
    return ROOT / found[0]


@pytest.mark.parametrize("name", STAGES)
def test_deps_cover_every_module_that_the_notebook_reaches(name):
    declared = {dep for dep in body(name)["deps"] if dep.startswith("osprey/")}
    assert declared == {f"osprey/{module}.py" for module in reached(notebook_of(name))}


def test_a_module_left_out_would_be_noticed(tmp_path):
    notebook = {"cells": [{"cell_type": "code", "source": ["from osprey import evaluate"]}]}
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    assert {"evaluate", "unroll", "drafter", "checkpoint"} <= reached(tmp_path / "n.ipynb")


@pytest.mark.parametrize("name", STAGES)
def test_the_notebook_asks_for_its_own_stage(name):
    calls = [node for node in ast.walk(ast.parse(code(notebook_of(name)))) if isinstance(node, ast.Call)]
    asked = [call for call in calls if ast.unparse(call.func) == "params.for_stage"]
    assert [call.args[0].value for call in asked] == [name]
    assert not [call for call in calls if ast.unparse(call.func) == "params.load"], "would see undeclared keys"


def test_parameters_are_only_seen_through_for_stage():
    """Modules get the view handed to them: none reads params.yaml behind the back of its stage."""
    for file in (ROOT / "osprey").glob("*.py"):
        if file.name in ("params.py", "repro.py"):
            continue
        tree = ast.parse(file.read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not called & {"params.load", "load_params"}, file.name


def test_for_stage_shows_declared_keys_and_no_others(monkeypatch):
    view = params.for_stage("prune")
    assert set(vars(view)) == {"source", "threads", "seed"}
    with pytest.raises(AttributeError):
        view.pretrain  # noqa: B018
    key = next(iter(params.load().runs))
    view = params.for_stage("distill", key)
    assert list(view.runs) == [key]


def test_for_stage_names_an_unknown_key():
    with pytest.raises(params.UserError, match="runs: no 'nonsense' in params.yaml"):
        params.for_stage("distill", "nonsense")


def test_only_paper_writes_results():
    for name in STAGES:
        outs = [out if isinstance(out, str) else next(iter(out)) for out in body(name)["outs"]]
        assert all(out.startswith("results/") == (name == "paper") for out in outs)


def sections(stage):
    """The sections of params.yaml that a stage's outputs depend on: its own and those of what it reads."""
    made_by = {}
    for name in STAGES:
        for out in body(name)["outs"]:
            made_by[str(out if isinstance(out, str) else next(iter(out))).split("$")[0]] = name
    found = {key.split(".")[0] for key in body(stage)["params"]}
    for dep in body(stage)["deps"]:
        plain = dep.split("$")[0]
        if plain.startswith("data/") and dep not in COMMITTED:
            makers = {name for out, name in made_by.items() if out.startswith(plain) or plain.startswith(out)}
            assert makers, dep
            for name in makers - {stage}:
                found |= sections(name)
    return found


def test_the_index_names_every_key_that_determines_a_stage():
    for stage, keys in report.KEYS.items():
        assert set(keys.split(", ")) | {"threads", "seed"} == sections(stage) | {"threads", "seed"}, stage


def test_params_yaml_is_the_laptop_preset():
    assert (ROOT / "params.yaml").read_bytes() == (ROOT / "presets/laptop.yaml").read_bytes()


@pytest.mark.parametrize("preset", sorted((ROOT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid(preset):
    params.load(preset)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_clean_and_thin(notebook):
    content = json.loads(notebook.read_text())
    assert set(content["metadata"]) == {"kernelspec"} and content["metadata"]["kernelspec"]["name"] == "python3"
    cells = content["cells"]
    assert [cell["metadata"] for cell in cells if cell["metadata"]] == [{"tags": ["parameters"]}]
    assert cells[0]["cell_type"] == cells[-1]["cell_type"] == "markdown" or cells[-2]["cell_type"] == "markdown"
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    tree = ast.parse(code(notebook))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.Lambda))]
