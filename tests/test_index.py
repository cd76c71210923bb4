"""INDEX.md covers every file below results/, with stage, inputs and parameters; and these checks can fail."""

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from synthetic import made, preset
from walk import ROOT

from osprey import inputs, readme, report

SECTION = "## Numbers in README.md"


def uncovered(results: Path) -> list[str]:
    """The files below `results` that its INDEX.md neither links nor covers by a pattern in backticks."""
    index = (results / "INDEX.md").read_text().split(SECTION)[0]  # which links files, but says nothing about them
    known = re.findall(r"\]\(([^)]+)\)", index) + re.findall(r"`(timings/[^`]+)`", index)
    names = [str(path.relative_to(results)) for path in sorted(results.rglob("*")) if path.is_file()]
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]


def sourceless(results: Path) -> list[str]:
    """The tables and figures whose row in INDEX.md lacks a stage with keys, or inputs."""
    index = (results / "INDEX.md").read_text()
    stages = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", index, re.MULTILINE))
    rows = dict(re.findall(r"^\| ((?:tables|figures)/\w+): \[.*?\) \| [^|]+ \| (.*) \|$", index, re.MULTILINE))
    stems = sorted({str(path.relative_to(results).with_suffix("")) for kind in ("tables", "figures")
                    for path in (results / kind).iterdir()})  # fmt: skip
    good = {stem for stem, rest in rows.items() for match in [re.fullmatch(r"`(\w+)` \| `data/.+", rest)]
            if match and stages.get(match[1], "").startswith("seed, ")}  # fmt: skip
    return [stem for stem in stems if stem not in good]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """params and results as the stage leaves them: rendered, notebooks and timings gathered."""
    root = tmp_path_factory.mktemp("index")
    p = made(root, preset(("chat", "math"), ("small",)), requests=6, first=("chat",))
    report.render(p, root=root)
    for name in [name for names in report.executions(root).values() for name in names]:
        for path in (f"data/notebooks/{name}.ipynb", f"results/timings/{name}.json"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(json.dumps({"stage": name, "seconds": 1.0, "peak_gib": 1.0}))
    report.gather_notebooks(root)
    (root / "results/notebooks/paper.ipynb").write_text("the notebook that runs this")
    report.timings(root)
    (root / "results/timings/benchmark.csv").write_text("name,ratio\n")
    return p, root / "results"


def test_every_file_is_covered(rendered):
    _, results = rendered
    assert len(list(results.rglob("*.*"))) > 80
    assert uncovered(results) == [] and sourceless(results) == []


def test_what_the_index_lacks_is_noticed(rendered, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(rendered[1], results)
    (results / "tables/extra.csv").write_text("a,b\n")
    (results / "notebooks/distill-gone.ipynb").write_text("{}")
    (results / "paper.html").write_text("")
    assert uncovered(results) == ["notebooks/distill-gone.ipynb", "paper.html", "tables/extra.csv"]
    assert sourceless(results) == ["tables/extra"]
    path = results / "INDEX.md"
    path.write_text(path.read_text().replace("| `agreement` | `data/", "| `agreement` | nothing `data/"))
    assert sourceless(results) == ["tables/agreement", "tables/extra"]
    path.write_text(path.read_text().replace("\n| `convert` | seed, ", "\n| `convert` | none, "))
    assert sourceless(results) == ["tables/agreement", "tables/coverage", "tables/extra", "tables/table11"]


def test_links_and_inputs_exist(rendered):
    p, results = rendered
    for link in re.findall(r"\]\(([^)]+)\)", (results / "INDEX.md").read_text()):
        assert (results / link).is_file(), link
    for item in report.REGISTRY:
        for template in item.inputs:
            for place in inputs.places(template, p) if template != inputs.SWEEP else []:
                assert (results.parent / template.format(**place)).is_file()
    assert all(set(keys.split(", ")) <= set(type(p).model_fields) for keys in report.KEYS.values())


def test_the_stages_are_those_of_the_graph():
    assert set(report.KEYS) == set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])


def test_numbers_of_the_readme_have_a_section(rendered):
    _, results = rendered
    section = (results / "INDEX.md").read_text().split(SECTION)[1].split("\n## ")[0]
    assert section.strip().splitlines() == readme.index_lines(results.parent)


def test_the_committed_results_are_covered():
    assert uncovered(ROOT / "results") == [] and sourceless(ROOT / "results") == []
