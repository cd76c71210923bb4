"""The report on synthetic stage outputs: numbers against slow loops, equal bytes, honest sentences, clear errors."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic import al, files, load, made, preset, tabled

from osprey import captions, claims, figures, params, report
from osprey.params import UserError

PAIR = ("osprey", "eagle3-1l")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Three domains, two targets, three recipes, rendered once."""
    root = tmp_path_factory.mktemp("report")
    p = made(root, preset())
    report.render(p, root=root)
    return p, root


def test_same_inputs_same_bytes(rendered, tmp_path):
    """Also under somebody's own matplotlib settings."""
    p, root = rendered
    import matplotlib

    with matplotlib.rc_context({"font.size": 20, "figure.dpi": 300, "savefig.facecolor": "red", "axes.grid": False}):
        report.render(p, tmp_path / "again", root)
    assert files(tmp_path / "again") == files(root / "results")
    for path in (root / "results/figures").glob("*.png"):
        assert b"tEXt" not in path.read_bytes()
    for path in (root / "results/figures").glob("*.svg"):
        assert "<dc:date>" not in path.read_text() and "Matplotlib v" not in path.read_text()


def test_removed_things_vanish_and_other_files_stay(tmp_path):
    content = preset(domains=("chat", "math"), targets=("small",), recipes=PAIR)
    p = made(tmp_path, content)
    results = tmp_path / "results"
    (results / "tables").mkdir(parents=True)
    (results / "tables" / "old.csv").write_text("of an entry that is no more")
    (results / "paper.html").write_text("someone else's")
    (results / ".rendering" / "tables").mkdir(parents=True)  # a run was killed here
    report.render(p, root=tmp_path)
    assert "small-eagle3-1l-math" in (results / "tables/figure2.csv").read_text()
    del content["runs"]["small-eagle3-1l-math"]
    report.render(load(content, tmp_path), root=tmp_path)  # the ledger still holds the run's rows
    for path in results.rglob("*.csv"):
        assert "small-eagle3-1l-math" not in path.read_text()
    assert {path.name for path in results.iterdir()} == {"INDEX.md", "figures", "metrics.json", "paper.html", "tables"}
    stems = {str(path.relative_to(results).with_suffix("")) for path in results.glob("*/*")}
    assert stems == {item.name for item in report.REGISTRY}


def test_a_missing_input_is_one_line_and_keeps_the_old_report(rendered, tmp_path):
    p, root = rendered
    shutil.copytree(root, tmp_path / "copy")
    before = files(tmp_path / "copy/results")
    lost = tmp_path / "copy/data/drafters/small/osprey/small-osprey-math/history.csv"
    lost.rename(lost.with_name("lost.csv"))
    with pytest.raises(UserError, match="data/drafters/small/osprey/small-osprey-math/history.csv: no such file"):
        report.render(p, root=tmp_path / "copy")
    lost.with_name("lost.csv").rename(lost)
    ledger = tmp_path / "copy/data/evaluations/small-osprey.csv"
    rows = pd.read_csv(ledger, keep_default_na=False)
    rows[(rows.run != "small-osprey-math") | (rows.evaluation != "chat")].to_csv(ledger, index=False)
    with pytest.raises(UserError, match="small-osprey.csv: nothing measured for run small-osprey-math on chat"):
        report.render(p, root=tmp_path / "copy")
    assert files(tmp_path / "copy/results") == before


def test_a_failure_while_writing_keeps_the_old_report(rendered, tmp_path, monkeypatch):
    p, root = rendered
    shutil.copytree(root / "results", tmp_path / "results")

    def fail(figure, stem):
        raise OSError("disk full")

    monkeypatch.setattr(figures, "save", fail)
    with pytest.raises(OSError):
        report.render(p, tmp_path / "results", root)
    assert files(tmp_path / "results") == files(root / "results")
    assert not (tmp_path / "results/.rendering").exists()


def test_captions_say_how_it_came_out(rendered):
    p, root = rendered
    table = pd.read_csv(root / "results/tables/figure2.csv")
    caption = (root / "results/figures/figure2.md").read_text()
    for target in p.targets:
        for baseline in ("eagle3-1l", "eagle3-2l"):
            pair = table[(table.target == target) & (table.recipe == baseline) & (table.run != "undistilled")]
            ahead, won = sum(pair.osprey_minus_this > 0), sum(pair.minus_low > 0)
            lost = sum(pair.minus_high < 0)
            assert (f"On {target}, osprey is ahead of {baseline} in {ahead} of 9 cells; the paired intervals put it "
                    f"ahead in {won}, behind in {lost} and leave {9 - won - lost} open.") in caption  # fmt: skip
    means = pd.read_csv(root / "results/tables/figure2_aggregate.csv")
    row = means.query("target == 'large' and recipe == 'osprey' and cells == 'ID'").iloc[0]
    assert (f"On large, in domain, distillation adds {row.gain:+.3f} [{row.gain_low:+.3f}, {row.gain_high:+.3f}] to "
            f"the undistilled backbone's AL on the same domains, and reaches {row.al:.3f}.") in caption  # fmt: skip
    assert "Source and target small are the same model" in caption
    assert caption.strip() in (root / "results/INDEX.md").read_text()


def test_the_sentence_turns_when_the_result_does(tmp_path):
    """Swap the two recipes' ledgers: what was ahead is now behind, and the caption says so."""
    p = made(tmp_path, preset(domains=("chat", "math"), targets=("small",), recipes=PAIR), requests=60)
    text = claims.cells(tabled(p, tmp_path))
    one, two = (tmp_path / f"data/evaluations/small-{recipe}.csv" for recipe in PAIR)
    a, b = one.read_text(), two.read_text()
    mark = "small,osprey,small-osprey", "small,eagle3-1l,small-eagle3-1l"
    one.write_text(b.replace(mark[1], mark[0]).replace("small,eagle3-1l,", "small,osprey,"))
    two.write_text(a.replace(mark[0], mark[1]).replace("small,osprey,", "small,eagle3-1l,"))
    swapped = claims.cells(tabled(p, tmp_path))

    def numbers(text):
        return [int(n) for n in re.findall(r"in (\d+)|leave (\d+)", text) for n in n if n]

    ahead, won, lost, left = numbers(text)
    assert won > 0 and "Not ahead" not in text
    assert numbers(swapped) == [4 - ahead, lost, won, left]
    assert swapped.count("adapted on ") == 4 and "Not ahead: adapted on chat, evaluated on chat (-0." in swapped


def test_other_sources_other_limits(tmp_path):
    content = preset(domains=("chat", "math"), targets=("large", "small"))
    content["targets"] = {"small": {}}
    for kind in ("drafters", "runs"):
        content[kind] = {name: item for name, item in content[kind].items() if item["target"] == "small"}
    data = tabled(made(tmp_path, content, requests=6), tmp_path)
    assert "same model" not in captions.limits(data)
    assert "On small, eagle3-2l is the size-matched row." in captions.limits(data)
    data.params = data.params.model_copy(update={"source": data.params.source.model_copy(update={"model": "small"})})
    assert "Source and target small are the same model" in captions.limits(data)
    data.tables["table11"].loc[data.tables["table11"].recipe == "eagle3-2l", "body"] *= 2
    assert "size-matched" not in captions.limits(data)


def test_one_domain_has_no_ood(tmp_path):
    p = made(tmp_path, preset(domains=("math",), targets=("small",), recipes=PAIR))
    report.render(p, root=tmp_path)
    assert set(pd.read_csv(tmp_path / "results/tables/figure2_aggregate.csv").cells) == {"ID", "All"}
    assert re.search("in [01] of 1 cells", (tmp_path / "results/figures/figure2.md").read_text())


@pytest.mark.filterwarnings("error")
def test_a_drafter_that_is_never_right_still_has_a_report(tmp_path):
    content = preset(domains=("chat", "math"), targets=("small",), recipes=PAIR)
    report.render(made(tmp_path, content, luck=0.0), root=tmp_path)
    table = pd.read_csv(tmp_path / "results/tables/figure2.csv")
    assert (table[["al", "low", "high"]] == 1).all(axis=None)
    caption = (tmp_path / "results/figures/figure2.md").read_text()
    assert "in 0 of 4 cells; the paired intervals put it ahead in 0, behind in 0 and leave 4 open." in caption


def test_uneven_grids(tmp_path):
    """A recipe on one domain and a second learning rate: in the tables, not in the figure, not in the means."""
    content = preset(domains=("chat", "math"), targets=("small",))
    del content["runs"]["small-eagle3-2l-chat"]
    content["runs"]["sweep"] = {"target": "small", "recipe": "osprey", "domain": "math", "lr": 1e-5}
    p = made(tmp_path, content)
    report.render(p, root=tmp_path)
    table = pd.read_csv(tmp_path / "results/tables/figure2.csv").set_index("run")
    shown = set(table.index[table.in_figure == "yes"])
    assert shown == {f"small-{recipe}-{domain}" for recipe in ("osprey", "eagle3-1l") for domain in ("chat", "math")}
    assert list(table.lr["sweep"]) == [1e-05] * 2
    means = pd.read_csv(tmp_path / "results/tables/figure2_aggregate.csv").query("distilled == 'yes'")
    means = means.set_index(["recipe", "cells"])
    pairs = [(adaptation, evaluation) for adaptation in ("chat", "math") for evaluation in ("chat", "math")]
    cells = [al(tmp_path, "small", "osprey", f"small-osprey-{a}", e) for a, e in pairs]
    assert means.al["osprey", "All"] == pytest.approx(sum(cells) / 4, abs=6e-5)
    assert means.adaptations["eagle3-2l", "All"] == 1
    twice = [al(tmp_path, "small", "eagle3-2l", "small-eagle3-2l-math", domain) for domain in ("chat", "math")]
    lead = sum(cells[2:]) / 2 - sum(twice) / 2  # over the one adaptation domain that both have
    assert means.osprey_minus_this["eagle3-2l", "All"] == pytest.approx(lead, abs=1.1e-4)
    caption = (tmp_path / "results/figures/figure2.md").read_text()
    assert "Runs in the table only (fewer domains than osprey, or a further learning rate): 2." in caption


def test_without_the_pair_there_is_nothing_to_compare(tmp_path):
    p = made(tmp_path, preset(domains=("chat",), targets=("small",), recipes=("eagle3-1l",)))
    report.render(p, root=tmp_path)
    assert "On small there is nothing to compare" in (tmp_path / "results/figures/figure2.md").read_text()
    assert pd.read_csv(tmp_path / "results/tables/acceptance_gain.csv").empty
    empty = preset(domains=("chat",), targets=("small",)) | {"runs": {}, "drafters": {}}
    with pytest.raises(UserError, match="^runs: empty"):
        report.render(load(empty, tmp_path), root=tmp_path)


def test_markdown_tables():
    table = pd.DataFrame({"name": ["a", "b"], "count": [1200, 3], "value": [0.5, np.nan]})
    assert report.markdown(table) == (
        "| name | count | value |\n| --- | ---: | ---: |\n| a | 1,200 | 0.500 |\n| b | 3 |  |\n"
    )


def test_colours_survive_a_grey_print(rendered):
    rgb = [[int(code[place : place + 2], 16) for place in (1, 3, 5)] for code in figures.COLOURS.values()]
    assert min(np.diff(sorted(np.dot(rgb, [0.299, 0.587, 0.114])))) > 20  # of 255
    p, _ = rendered
    assert len({figures.colour(p, recipe) for recipe in p.recipes}) == len(p.recipes)


def test_timings_are_enumerated_and_apart(rendered, tmp_path):
    stages = {"corpus": {"cmd": "x"}, "distill": {"foreach": "${runs}", "do": {"cmd": "x"}}, "paper": {"cmd": "x"}}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(preset()))
    folder = tmp_path / "results/timings"
    folder.mkdir(parents=True)
    for name in ("distill-small-osprey-math", "distill-gone", "corpus"):
        timing = {"stage": name, "seconds": 1.5, "peak_gib": 2.0}
        (folder / f"{name}.json").write_text(json.dumps(timing))
    report.timings(tmp_path)
    assert (folder / "summary.csv").read_text() == (
        "stage,seconds,peak_gib\ncorpus,1.5,2.0\ndistill-small-osprey-math,1.5,2.0\n"
    )
    assert not (rendered[1] / "results/timings").exists()


def test_the_notebook_shows_what_the_registry_makes():
    notebook = json.loads((params.ROOT / "notebooks/10_paper.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec"} and notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert [cell["id"] for cell in notebook["cells"]] == [f"cell-{n}" for n in range(len(notebook["cells"]))]
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1
    shown = re.findall(r'"((?:tables|figures)/\w+)"', "".join(line for cell in code for line in cell["source"]))
    assert shown and set(shown) <= {item.name for item in report.REGISTRY}


def test_show_displays_written_files(rendered, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    report.show("figures/figure3", "tables/pretraining", out=rendered[1] / "results")
    assert shown[0].data == (rendered[1] / "results/figures/figure3.png").read_bytes()
    assert [text.data for text in shown[1:]] == [
        (rendered[1] / f"results/{name}.md").read_text() for name in ("figures/figure3", "tables/pretraining")
    ]
