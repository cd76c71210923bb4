"""What the README promises exists."""

import re

from walk import ROOT

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
