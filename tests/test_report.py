"""The report on synthetic stage outputs: numbers against slow loops, equal bytes, honest sentences, clear errors."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from test_stats import STEPS, ledger_row, speculate

from osprey import captions, figures, params, report
from osprey.params import UserError


def preset(domains=("chat", "finance", "math"), targets=("small", "large"), recipes=("osprey", "eagle3-1l")) -> dict:
    """A complete parameter file; the first target is the source itself."""
    made = {
        "osprey": {"interface": "osprey", "body": "backbone"},
        "osprey-no-pretrain": {"interface": "osprey", "body": "pruned"},
        "eagle3-1l": {"interface": "eagle3", "body": "random", "layers": 1},
        "eagle3-2l": {"interface": "eagle3", "body": "random", "layers": 2},
    }
    model = {"random": {"layers": 8, "width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocabulary": 300}}
    return {
        "seed": 1,
        "threads": 1,
        "models": {target: model for target in targets},
        "source": {"model": targets[0]},
        "corpus": {"texts": {"text": {"path": "a.txt", "share": 1.0}}, "characters": 1000},
        "pretrain": {"steps": 100, "window": 8, "batch": 1, "lr": 1e-3},
        "targets": {target: {} for target in targets},
        "domains": {domain: {"records": [{"path": "a.jsonl"}]} for domain in domains},
        "rollouts": {"adaptation_prompts": 8, "held_out_prompts": 8, "max_new_tokens": 60, "batch": 1},
        "vocabulary": {"draft": "full"},
        "recipes": {recipe: made[recipe] for recipe in recipes},
        "drafters": {f"{t}-{r}": {"target": t, "recipe": r} for t in targets for r in recipes},
        "runs": {
            f"{t}-{r}-{d}": {"target": t, "recipe": r, "domain": d, "lr": 5e-4 if r.startswith("osprey") else 1e-3}
            for t in targets for r in recipes for d in domains
        },
        "distill": {"tokens": 1000, "steps": STEPS},
        "evaluate": {"steps": STEPS},
        "report": {"resamples": 300},
    }  # fmt: skip


def load(content: dict, root: Path):
    (root / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return params.load(root / "params.yaml")


def outputs(p, root: Path, requests: int = 24, seed: int = 0, luck: float = 1.0) -> None:
    """Everything that the stages before `paper` would have written."""
    rng = np.random.default_rng(seed)
    shutil.copytree(params.ROOT / "data" / "paper", root / "data" / "paper", dirs_exist_ok=True)

    def write(path: str, rows) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(root / path, index=False)

    domains = list(p.domains)
    lengths = {(t, d): rng.integers(2, 97, requests) for t in p.targets for d in domains}
    ease = {(t, d): rng.normal(0, 0.08, requests) for t in p.targets for d in domains}
    for t in p.targets:
        for d in domains:
            lengths[t, d][0] = 1  # one request without a verification step
        write(f"data/rollouts/{t}/summary.csv",
              [dict(domain=d, split=s, prompts=requests, skipped=1, tokens=int(rng.integers(2000, 9000)),
                    mean_tokens=70.25, ended=rng.uniform(0.4, 0.9), repetition=rng.uniform(0, 0.3))
               for d in domains for s in ("adaptation", "held-out")])  # fmt: skip
    for drafter in p.drafters.values():
        t, r = drafter.target, drafter.recipe
        rows = []
        runs = [(n, run.domain, run.lr) for n, run in p.runs.items() if (run.target, run.recipe) == (t, r)]
        for name, adaptation, lr in [("undistilled", "none", 0.0), *runs]:
            for d in domains:
                level = 0.12 if adaptation == "none" else 0.42 if d == adaptation else 0.3
                level += 0.06 * r.startswith("osprey") - 0.05 * (d == "math") * (adaptation != "math")
                for request in range(requests):
                    tokens = int(lengths[t, d][request])
                    trace = speculate(rng, luck * np.clip(level + ease[t, d][request], 0, 1), tokens)
                    rows.append(dict(target=t, recipe=r, run=name, adaptation=adaptation, lr=lr, evaluation=d,
                                     request=request) | ledger_row(trace, tokens))  # fmt: skip
        write(f"data/evaluations/{t}-{r}.csv", rows)
        write(f"data/converted/{t}-{r}/coverage.csv",
              [dict(domain=d, split=s, tokens=4000, covered=rng.uniform(0.9, 1))
               for d in domains for s in ("adaptation", "held-out")])  # fmt: skip
    for name, run in p.runs.items():
        step = np.arange(1, 241)
        loss = 8 * step**-0.12 + rng.normal(0, 0.5, 240) + (run.recipe == "eagle3-1l")
        write(f"data/drafters/{run.target}/{run.recipe}/{name}/history.csv",
              dict(step=step, tokens=step * 34, lr=run.lr, loss=loss))  # fmt: skip
    step = np.arange(1, p.pretrain.steps + 1)
    loss = 6 + 12 * np.exp(-((step / 25) ** 0.6)) + rng.normal(0, 0.08, len(step))
    write("data/pretrained/train.csv", dict(step=step, tokens=step * 2048, lr=1e-3, loss=loss))
    step = np.unique(np.r_[0, np.geomspace(1, p.pretrain.steps, 20).astype(int)])
    loss = 6.2 + 11.8 * np.exp(-((step / 25) ** 0.6))
    write("data/pretrained/held_out.csv", dict(step=step, tokens=step * 2048, loss=loss, perplexity=np.exp(loss)))


def made(root: Path, content: dict, **how):
    p = load(content, root)
    outputs(p, root, **how)
    return p


def tabled(p, root: Path):
    """What the report gathers, with its tables and without its pictures."""
    data = report.gather(p, root)
    for item in report.REGISTRY:
        if item.name.startswith("tables/"):
            data.tables[item.name.removeprefix("tables/")] = item.make(data)
    return data


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """Three domains, two targets, two recipes, rendered once."""
    root = tmp_path_factory.mktemp("report")
    p = made(root, preset())
    report.render(p, root=root)
    return p, root


def al(root: Path, target: str, recipe: str, run: str, evaluation: str) -> float:
    """Mean AL of a cell, read line by line from the ledger's file."""
    header, *lines = (root / f"data/evaluations/{target}-{recipe}.csv").read_text().splitlines()
    values = []
    for line in lines:
        row = dict(zip(header.split(","), line.split(",")))
        if (row["run"], row["evaluation"]) == (run, evaluation) and int(row["verifications"]):
            values.append((int(row["tokens"]) - 1) / int(row["verifications"]))
    return sum(values) / len(values)


def test_paper_numbers_are_the_printed_ones():
    """The rows of Table 12 against the Mean and OOD columns that it prints, and against Figure 2's aggregates."""
    cells = pd.read_csv(params.ROOT / "data/paper/table12.csv")
    assert len(cells) == 100
    printed = {
        (1e-05, "osprey"): "3.639 3.506 3.714 3.687 3.316 3.116 3.779 3.693 3.440 3.032",
        (1e-05, "eagle3-1l"): "1.601 1.597 2.534 2.393 1.938 1.766 2.052 2.031 2.428 1.819",
        (1e-04, "osprey"): "3.850 3.729 3.847 3.773 3.401 3.186 3.966 3.874 3.373 2.903",
        (1e-04, "eagle3-1l"): "3.309 3.198 3.478 3.402 2.896 2.690 3.272 3.205 2.924 2.391",
    }
    for (lr, recipe), numbers in printed.items():
        numbers = iter(map(float, numbers.split()))
        for adaptation in ("chat", "code", "commonsense", "finance", "math"):
            row = cells[(cells.lr == lr) & (cells.recipe == recipe) & (cells.adaptation == adaptation)]
            assert row.al.mean() == pytest.approx(next(numbers), abs=0.0011)
            assert row[row.evaluation != adaptation].al.mean() == pytest.approx(next(numbers), abs=0.0011)
    for recipe, rows in pd.read_csv(params.ROOT / "data/paper/figure2.csv").groupby("recipe"):
        grid = cells[(cells.lr == 1e-4) & (cells.recipe == recipe)]
        own = grid.adaptation == grid.evaluation
        inside, outside = grid[own].al.mean(), grid[~own].al.mean()
        expected = {"ID": inside, "OOD": outside, "All": grid.al.mean(), "OOD/ID": outside / inside}
        for row in rows.itertuples():  # Osprey's mean over all cells is printed 3.686; its cells give 3.6873
            assert row.al == pytest.approx(expected[row.cells], abs=0.0015)


def test_figure2_cells(rendered):
    p, root = rendered
    table = pd.read_csv(root / "results/tables/figure2.csv", keep_default_na=False, na_values=[""])
    assert len(table) == 2 * 2 * (1 + 3) * 3
    paper = pd.read_csv(root / "data/paper/table12.csv")
    for row in table.itertuples():
        assert row.al == pytest.approx(al(root, row.target, row.recipe, row.run, row.evaluation), abs=6e-5)
        assert row.low < row.al < row.high
        assert (row.requests, row.dropped) == (23, 1)
        same = paper[(paper.lr == 1e-4) & (paper.recipe == row.recipe) & (paper.adaptation == row.adaptation)
                     & (paper.evaluation == row.evaluation)].al  # fmt: skip
        assert len(same) == (row.adaptation != "none")
        assert row.paper_qwen3_8b == (same.iloc[0] if len(same) else pytest.approx(np.nan, nan_ok=True))
        if row.recipe == "eagle3-1l":
            ours = row.run.replace("eagle3-1l", "osprey")
            lead = al(root, row.target, "osprey", ours, row.evaluation) - row.al
            assert row.osprey_minus_this == pytest.approx(lead, abs=1.1e-4)
            assert row.minus_low < row.osprey_minus_this < row.minus_high
        else:
            assert np.isnan(row.osprey_minus_this)


def test_figure2_aggregate(rendered):
    p, root = rendered
    table = pd.read_csv(root / "results/tables/figure2_aggregate.csv")
    table = table.set_index(["target", "recipe", "distilled", "cells"])
    found = {}
    for target in p.targets:
        for recipe in p.recipes:
            inside, outside = [], []
            for run, spec in p.runs.items():
                if (spec.target, spec.recipe) == (target, recipe):
                    for domain in p.domains:
                        (inside if domain == spec.domain else outside).append(al(root, target, recipe, run, domain))
            before = [al(root, target, recipe, "undistilled", domain) for domain in p.domains]
            found[target, recipe, "no", "All"] = sum(before) / 3
            found[target, recipe, "yes", "ID"] = sum(inside) / 3
            found[target, recipe, "yes", "OOD"] = sum(outside) / 6
            found[target, recipe, "yes", "All"] = sum(inside + outside) / 9
            found[target, recipe, "yes", "OOD/ID"] = sum(outside) / 6 / (sum(inside) / 3)
    assert set(found) == set(table.index)
    for key, value in found.items():
        assert table.al[key] == pytest.approx(value, abs=6e-5)
        if key[1] == "eagle3-1l":
            assert table.osprey_minus_this[key] == pytest.approx(found[key[0], "osprey", *key[2:]] - value, abs=1.1e-4)
    assert table.paper_qwen3_8b["small", "osprey", "yes", "ID"] == 4.465
    headline = json.loads((root / "results/metrics.json").read_text())
    assert headline["large"]["eagle3-1l"]["OOD"] == table.al["large", "eagle3-1l", "yes", "OOD"]


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
    content = preset(domains=("chat", "math"), targets=("small",))
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
        pair = table[(table.target == target) & (table.recipe == "eagle3-1l") & (table.run != "undistilled")]
        ahead, won = sum(pair.osprey_minus_this > 0), sum(pair.minus_low > 0)
        lost = sum(pair.minus_high < 0)
        assert (f"On {target}, osprey is ahead of eagle3-1l in {ahead} of 9 cells; the paired intervals put it ahead "
                f"in {won}, behind in {lost} and leave {9 - won - lost} open.") in caption  # fmt: skip
    assert "Source and target small are the same model" in caption
    assert "The bodies differ in size (osprey: 2 layers of the source's width, eagle3-1l: 1 layer" in caption
    assert "size-matched" not in caption
    index = (root / "results/INDEX.md").read_text()
    assert caption.strip() in index


def test_the_sentence_turns_when_the_result_does(tmp_path):
    """Swap the two recipes' ledgers: what was ahead is now behind, and the caption says so."""
    p = made(tmp_path, preset(domains=("chat", "math"), targets=("small",)), requests=60)
    text = captions.outcome(tabled(p, tmp_path))
    one, two = (tmp_path / f"data/evaluations/small-{recipe}.csv" for recipe in ("osprey", "eagle3-1l"))
    a, b = one.read_text(), two.read_text()
    mark = "small,osprey,small-osprey", "small,eagle3-1l,small-eagle3-1l"
    one.write_text(b.replace(mark[1], mark[0]).replace("small,eagle3-1l,", "small,osprey,"))
    two.write_text(a.replace(mark[0], mark[1]).replace("small,osprey,", "small,eagle3-1l,"))
    swapped = captions.outcome(tabled(p, tmp_path))

    def numbers(text):
        return [int(n) for n in re.findall(r"in (\d+)|leave (\d+)", text) for n in n if n]

    ahead, won, lost, left = numbers(text)
    assert won > 0
    assert numbers(swapped) == [4 - ahead, lost, won, left]


def test_other_sources_other_limits(tmp_path):
    content = preset(domains=("chat", "math"), targets=("large", "small"), recipes=("osprey", "eagle3-1l", "eagle3-2l"))
    content["targets"] = {"small": {}}
    for kind in ("drafters", "runs"):
        content[kind] = {name: item for name, item in content[kind].items() if item["target"] == "small"}
    data = tabled(made(tmp_path, content), tmp_path)
    assert "same model" not in captions.limits(data) and "size-matched" not in captions.limits(data)
    same = data.params.model_copy(update={"source": data.params.source.model_copy(update={"model": "small"})})
    data.params = same
    assert "same model" in captions.limits(data)
    assert "On small, eagle3-2l is the size-matched row." in captions.limits(data)


def test_one_domain_has_no_ood(tmp_path):
    p = made(tmp_path, preset(domains=("math",), targets=("small",)))
    report.render(p, root=tmp_path)
    assert set(pd.read_csv(tmp_path / "results/tables/figure2_aggregate.csv").cells) == {"ID", "All"}
    assert re.search("in [01] of 1 cells", (tmp_path / "results/figures/figure2.md").read_text())


@pytest.mark.filterwarnings("error")
def test_a_drafter_that_is_never_right_still_has_a_report(tmp_path):
    report.render(made(tmp_path, preset(domains=("chat", "math"), targets=("small",)), luck=0.0), root=tmp_path)
    table = pd.read_csv(tmp_path / "results/tables/figure2.csv")
    assert (table[["al", "low", "high"]] == 1).all(axis=None)
    caption = (tmp_path / "results/figures/figure2.md").read_text()
    assert "in 0 of 4 cells; the paired intervals put it ahead in 0, behind in 0 and leave 4 open." in caption


def test_uneven_grids(tmp_path):
    """A recipe on one domain and a second learning rate: in the tables, not in the figure, not in the means."""
    content = preset(domains=("chat", "math"), targets=("small",), recipes=("osprey", "eagle3-1l", "eagle3-2l"))
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
    empty = preset(domains=("chat",), targets=("small",)) | {"runs": {}, "drafters": {}}
    with pytest.raises(UserError, match="^runs: empty"):
        report.render(load(empty, tmp_path), root=tmp_path)


def test_index_names_what_exists(rendered):
    p, root = rendered
    index = (root / "results/INDEX.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", index)
    for link in links:  # executed notebooks are gathered by the stage, after the report
        assert link.startswith("notebooks/") or (root / "results" / link).is_file()
    for name in p.runs:
        assert f"notebooks/distill-{name}.ipynb" in links
    for item in report.REGISTRY:
        assert f"| {item.name}: " in index
        assert item.stage in report.KEYS
        for template in item.inputs:
            for place in report.places(template, p):
                assert (root / template.format(**place)).is_file()
    fields = set(type(p).model_fields)
    assert all(set(keys.split(", ")) <= fields for keys in report.KEYS.values())


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
    notebook = json.loads((params.ROOT / "notebooks/09_paper.ipynb").read_text())
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
