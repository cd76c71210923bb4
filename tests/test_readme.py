"""What the README promises exists, and its numbers are those of results/."""

import json
import re
import sys

import mistune
import pytest
import yaml
from walk import ROOT

from osprey import readme, report
from osprey.params import UserError

README = (ROOT / "README.md").read_text()


def test_no_placeholder_is_left():
    assert not re.findall(r"@[A-Z]+@|TODO|TBD", README)


def test_every_file_it_names_exists():
    named = set(
        re.findall(r"`((?:osprey|presets|notebooks|tests|results/(?:figures|tables|notebooks))/[\w./-]+)`", README)
    )
    named |= set(re.findall(r"\]\((results/[\w./-]+)\)", README))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_module_is_in_the_reading_order():
    order = README[README.index("## Reading order") :]
    modules = {path.name for path in (ROOT / "osprey").glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if not re.search(rf"\b{re.escape(name)}`", order)} == set()


def test_every_command_is_a_target_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def test_every_link_of_the_committed_index_exists():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "results/INDEX.md").read_text())
    assert sum(link.startswith("notebooks/") for link in links) > 5
    assert [link for link in links if not (ROOT / "results" / link).is_file()] == []


# Its numbers


def test_its_numbers_are_those_of_the_committed_results():
    readme.check()


def test_its_keys_are_those_of_the_list():
    assert {key for key, _ in readme.marked(README)} == set(readme.numbers())


def test_the_index_lists_every_number():
    index = (ROOT / "results/INDEX.md").read_text().splitlines()
    assert len(readme.index_lines()) == len(readme.numbers()) + 2
    assert [line for line in readme.index_lines() if line not in index] == []
    tables = {item.name for item in report.REGISTRY}  # whose rows in the index have stage and inputs
    assert {f"tables/{number.table}" for number in readme.numbers().values() if number.table} <= tables


def test_its_markup_does_not_show():
    shown = mistune.html(README)
    assert shown.count("<!-- n:") == shown.count("<!-- /n -->") == len(readme.marked(README)) > 0
    assert "&lt;!--" not in shown and "--&gt;" not in shown  # as they would be inside code


def test_the_index_does_not_depend_on_values(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/readme.yaml").write_bytes((ROOT / "data/readme.yaml").read_bytes())
    assert readme.index_lines(tmp_path) == readme.index_lines()


CELLS = """target,recipe,cells,al,gain
a,osprey,ID,1.5834,
a,osprey,OOD,1.2996,
a,eagle3,ID,1.3222,0.26
a,eagle3,OOD,1.1867,-0.01
a,eagle3,All,1.2500,0.10
"""
NUMBERS = """
id: {metrics: a.osprey.ID, format: .2f}
ratio: {metrics: a.osprey.OOD/ID, format: .0%}
al: {table: cells, where: {recipe: osprey, cells: ID}, column: al, format: .3f}
gain: {table: cells, where: {recipe: osprey, cells: ID}, column: al, minus: {recipe: eagle3}, format: +.2f}
rows: {table: cells, where: {recipe: eagle3}, take: count, format: .0f}
ahead: {table: cells, where: {recipe: eagle3}, column: gain, take: positive, format: .0f}
minutes: {timing: summary, column: seconds, take: sum, divide: 60, format: ".1f"}
stage: {timing: summary, where: {stage: corpus}, column: seconds, format: ",.0f"}
"""
VALUES = {"id": "1.58", "ratio": "82%", "al": "1.583", "gain": "+0.26", "rows": "3", "ahead": "2", "minutes": "20.6",
          "stage": "1,234"}  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A repository of results, list and README, whose numbers are still to be inserted."""
    for folder in ("results/tables", "results/timings", "data", "presets"):
        (tmp_path / folder).mkdir(parents=True)
    metrics = {"a": {"osprey": {"ID": 1.5834, "OOD/ID": 0.8208, "note": "text"}}}
    (tmp_path / "results/metrics.json").write_text(json.dumps(metrics))
    (tmp_path / "results/tables/cells.csv").write_text(CELLS)
    (tmp_path / "results/timings/summary.csv").write_text("stage,seconds\nprune,4.4\ncorpus,1234.0\n")
    (tmp_path / "data/readme.yaml").write_text(NUMBERS)
    (tmp_path / "README.md").write_text("".join(f"- {key}: <!-- n: {key} -->?<!-- /n -->.\n" for key in VALUES))
    return tmp_path


def test_numbers_are_read_where_the_list_says(root):
    assert readme.update(root)
    assert dict(readme.marked((root / "README.md").read_text())) == VALUES
    assert (root / "README.md").read_text() == "".join(
        f"- {key}: <!-- n: {key} -->{value}<!-- /n -->.\n" for key, value in VALUES.items()
    )
    readme.check(root)
    assert not readme.update(root)  # and nothing changes any more
    assert not list(root.glob(".README*"))


@pytest.mark.parametrize("key", VALUES)
def test_a_stale_number_is_named(root, key, monkeypatch):
    readme.update(root)
    text = (root / "README.md").read_text()
    (root / "README.md").write_text(text.replace(f"{key} -->{VALUES[key]}", f"{key} -->9"))
    monkeypatch.setattr(readme.check, "__defaults__", (root,))
    monkeypatch.setattr(sys, "argv", ["readme", "--check"])
    with pytest.raises(SystemExit) as stopped:
        readme.main()
    said = rf"{key} reads 9, results/[\w/.]+ gives {re.escape(VALUES[key])}; run python -m osprey.readme"
    assert re.fullmatch(f"osprey: README.md: {said}", stopped.value.code)


def test_a_result_that_moved_makes_it_stale(root):
    readme.update(root)
    (root / "results/tables/cells.csv").write_text(CELLS.replace("1.5834", "1.6834"))
    with pytest.raises(UserError, match="al reads 1.583, results/tables/cells.csv gives 1.683"):
        readme.check(root)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("data/readme.yaml", "a.osprey.ID", "a.eagle3.ID", "id: results/metrics.json has no a.eagle3.ID; make repro"),
        ("data/readme.yaml", "a.osprey.ID", "a.osprey.note", "id: a.osprey.note in .* is not a number"),
        ("data/readme.yaml", "a.osprey.ID", "a.osprey", "id: a.osprey in .* is not a number"),
        ("data/readme.yaml", "table: cells", "table: other", "al: no results/tables/other.csv; make repro writes it"),
        (
            "data/readme.yaml",
            "timing: summary",
            "timing: benchmark",
            "minutes: no results/timings/benchmark.csv; make b",
        ),
        ("data/readme.yaml", "column: gain", "column: gains", "ahead: results/tables/cells.csv has no column gains"),
        (
            "data/readme.yaml",
            "cells: ID",
            "cells: In",
            "al: .*cells.csv has no rows where recipe = osprey, cells = In;",
        ),
        ("data/readme.yaml", ", cells: ID", "", "al: .*cells.csv has 2 rows where recipe = osprey;"),
        ("data/readme.yaml", "recipe: eagle3}, column", "recipe: osprey}, column", "ahead: .*no number in gain where"),
        ("data/readme.yaml", "format: .2f", "format: .2q", "id: format: '.2q' is not a number's in Python"),
        ("data/readme.yaml", "metrics: a.osprey.ID, ", "", "id: give exactly one of metrics, table, timing"),
        (
            "data/readme.yaml",
            "ID, format: .2f",
            "ID, where: {a: b}, format: .2f",
            "id: metrics is a path to one number",
        ),
        ("data/readme.yaml", "column: al, ", "", "al: column is needed"),
        ("data/readme.yaml", "cells: ID", "cells: no", "al.where.cells: .*valid string"),
        ("data/readme.yaml", "id:", "new: {metrics: a.b, format: .1f}\nid:", "new: not used in README.md; remove it"),
        ("README.md", "n: id -->", "n: idd -->", "^README.md: idd: no such number in data/readme.yaml; add it"),
        ("README.md", "<!-- /n -->.", "<!-- n -->.", "README.md, line 1: not `<!-- n: KEY -->number<!-- /n -->`"),
        ("README.md", "?<!--", "?\n<!--", "README.md, line 1: not"),
        ("README.md", "n: id -->", "n: Id -->", "README.md, line 1: not"),
        ("README.md", "- id: ", "- ", "README.md, line 1: a line that begins with a comment is not read as Markdown"),
        ("README.md", "- id: ", "", "README.md, line 1: a line that begins with a comment is not read as Markdown"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(root, file, old, new, message):
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))
    before = (root / "README.md").read_bytes()
    for act in (readme.update, readme.check):
        with pytest.raises(UserError, match=message) as error:
            act(root)
        assert "\n" not in str(error.value)
    assert (root / "README.md").read_bytes() == before


def test_only_the_laptop_preset_s_results_are_inserted(root):
    (root / "presets/laptop.yaml").write_text("a: 1\n")
    (root / "params.yaml").write_text("a: 2\n")
    before = (root / "README.md").read_bytes()
    readme.refresh(root)
    assert (root / "README.md").read_bytes() == before
    (root / "params.yaml").write_text("a: 1\n")
    readme.refresh(root)
    readme.check(root)


@pytest.mark.parametrize(
    "sentence",
    [
        "Osprey reaches 1.58 in domain.", "| `osprey` | 1.58 |", "it is **1.3** times", "ahead by 21%", "ahead by 21 %",
        "about 6 times faster", "in 4 min cold", "takes 1 s", "16.5 min", "a gain of +0.27", "(1,234.5)", "3×",
        "Table 2 has 1.58", "it has <!-- n: id -->1.58<!-- /n --> and 1.32",
    ],
)  # fmt: skip
def test_a_typed_result_is_found(root, sentence):
    readme.update(root)
    with open(root / "README.md", "a") as file:
        file.write(f"\n{sentence}\n")
    with pytest.raises(UserError, match="is typed; insert it by a key of data/readme.yaml"):
        readme.check(root)


@pytest.mark.parametrize(
    "sentence",
    [
        "<!-- n: id -->1.58<!-- /n --> times", "Python 3.11 to 3.13", "`lr: 1.5`", "```\nmake 1.5\n```", "two minutes",
        "97,500 updates, 512 prompts", "SmolLM2-135M, Llama-3.1, 8,192 rows", "[x](results/v1.5/a.png)",
        "Section 3.3, eq. 1-4",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_result_is_let_through(sentence):
    assert readme.typed(sentence) == []


def test_the_list_is_sorted_out():
    """No key stands twice: YAML would silently take the last."""
    keys = re.findall(r"^([\w-]+):", (ROOT / "data/readme.yaml").read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys)) == len(yaml.safe_load((ROOT / "data/readme.yaml").read_text()))
