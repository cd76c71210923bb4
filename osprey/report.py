"""Every table and figure: which stage outputs it reads, how it is made, and the sentence under it.

REGISTRY is the whole report. Files are enumerated from the parameters and never globbed, so what was removed from
params.yaml cannot linger in a table. Sentences about results are computed from the tables.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pandas as pd
import yaml

from osprey import captions, figures, stats, tables
from osprey.params import ROOT, UserError

LEDGER = "data/evaluations/{target}-{recipe}.csv"
HISTORY = "data/drafters/{target}/{recipe}/{run}/history.csv"
TRAIN, HELD_OUT = "data/pretrained/train.csv", "data/pretrained/held_out.csv"
ROLLOUTS = "data/rollouts/{target}/summary.csv"
COVERAGE = "data/converted/{target}-{recipe}/coverage.csv"
PAPER_CELLS, PAPER_AGGREGATES = "data/paper/table12.csv", "data/paper/figure2.csv"
PAPER_CURVES = "data/paper/figures3_4.csv"


# Reading


def places(template: str, params) -> list[dict]:
    """The values that fill a template's braces: one per run, drafter or target, in the order of params.yaml."""
    if "{run}" in template:
        return [dict(target=run.target, recipe=run.recipe, run=name) for name, run in params.runs.items()]
    if "{recipe}" in template:
        return [dict(target=drafter.target, recipe=drafter.recipe) for drafter in params.drafters.values()]
    if "{target}" in template:
        return [dict(target=target) for target in params.targets]
    return [{}]


def read(template: str, params, root: Path) -> pd.DataFrame:
    """All files of a template as one table, the braces' values in front. Raises UserError when one is missing."""
    parts = []
    for place in places(template, params):
        path = template.format(**place)
        try:
            table = pd.read_csv(root / path, keep_default_na=False, na_values=[""])
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; make it with dvc repro") from None
        table = table.drop(columns=list(place), errors="ignore")
        parts.append(pd.concat([pd.DataFrame(place, index=table.index), table], axis=1))
    return pd.concat(parts, ignore_index=True)


def read_ledger(params, root: Path) -> pd.DataFrame:
    """The ledger's rows of the runs in params. Raises UserError when a run was not measured on some domain."""
    parts = []
    for place in places(LEDGER, params):
        path = LEDGER.format(**place)
        runs = ["undistilled", *(n for n, r in params.runs.items() if place == dict(target=r.target, recipe=r.recipe))]
        rows = read(path, params, root)
        rows = rows[rows.run.isin(runs) & rows.evaluation.isin(list(params.domains))]
        measured = stats.measured(rows)
        have = set(zip(measured.run, measured.evaluation, strict=True))
        for run, domain in [(run, domain) for run in runs for domain in params.domains]:
            if (run, domain) not in have:
                raise UserError(
                    f"{path}: nothing measured for run {run} on {domain}; bring the file up to date with "
                    "dvc repro, or raise rollouts.max_new_tokens if no response is longer than one token"
                )
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def gather(params, root: Path) -> SimpleNamespace:
    """Everything the report reads, and `tables`, which the registry's functions fill in order."""
    if not params.runs:
        raise UserError("runs: empty, so there is nothing to report; add one to params.yaml")
    ledger = read_ledger(params, root)
    histories = read(HISTORY, params, root)
    return SimpleNamespace(
        params=params, ledger=ledger, cells=stats.cell_means(ledger, params.report.resamples, params.seed), tables={},
        train=read(TRAIN, params, root), held_out=read(HELD_OUT, params, root), rollouts=read(ROLLOUTS, params, root),
        coverage=read(COVERAGE, params, root), histories={name: rows for name, rows in histories.groupby("run")},
        paper_cells=read(PAPER_CELLS, params, root), paper_aggregates=read(PAPER_AGGREGATES, params, root),
        paper_curves=read(PAPER_CURVES, params, root),
    )  # fmt: skip


# The report


class Item(NamedTuple):
    """One table or figure, written to `<name>.csv` and `.md`, or `<name>.png`, `.svg` and `.md` (the caption)."""

    name: str
    paper: str  # its number in the paper
    stage: str  # that made its inputs
    inputs: tuple[str, ...]
    make: Callable
    caption: Callable


PRETRAIN = "seed, threads, models, source, corpus, pretrain"
CONVERT = f"{PRETRAIN}, targets, domains, rollouts, vocabulary, recipes, drafters"
DISTILL = f"{CONVERT}, distill, runs"
KEYS = {  # stage -> the keys of params.yaml that determine its outputs and, with `report`, what is made from them
    "pretrain": PRETRAIN, "rollouts": "seed, threads, models, targets, domains, rollouts", "convert": CONVERT,
    "distill": DISTILL, "evaluate": f"{DISTILL}, evaluate",
}  # fmt: skip

EXECUTED = {  # stage -> its executed notebooks
    "pretrain": "notebooks/pretrain.ipynb", "rollouts": "notebooks/rollouts-{target}.ipynb",
    "convert": "notebooks/convert-{target}-{recipe}.ipynb", "distill": "notebooks/distill-{run}.ipynb",
    "evaluate": "notebooks/evaluate-{target}-{recipe}.ipynb",
}  # fmt: skip

REGISTRY = [
    Item("tables/figure2", "Table 12, Figure 2", "evaluate", (LEDGER, PAPER_CELLS),
         tables.figure2_cells, captions.figure2_cells),
    Item("tables/figure2_aggregate", "Figure 2, left", "evaluate", (LEDGER, PAPER_AGGREGATES),
         tables.figure2_aggregate, captions.figure2_aggregate),
    Item("figures/figure2", "Figure 2", "evaluate", (LEDGER,), figures.figure2, captions.figure2),
    Item("tables/pretraining", "Figures 3 and 4", "pretrain", (TRAIN, HELD_OUT, PAPER_CURVES),
         tables.pretraining, captions.pretraining),
    Item("figures/figure3", "Figure 3", "pretrain", (TRAIN, PAPER_CURVES), figures.figure3, captions.figure3),
    Item("figures/figure4", "Figure 4", "pretrain", (HELD_OUT, PAPER_CURVES), figures.figure4, captions.figure4),
    Item("tables/acceptance", "none", "evaluate", (LEDGER,), tables.acceptance, captions.acceptance),
    Item("tables/acceptance_aggregate", "none", "evaluate", (LEDGER,),
         tables.acceptance_aggregate, captions.acceptance),
    Item("figures/acceptance", "none", "evaluate", (LEDGER,), figures.acceptance, captions.acceptance),
    Item("tables/conventions", "none", "evaluate", (LEDGER,), tables.conventions, captions.conventions),
    Item("tables/conventions_aggregate", "none", "evaluate", (LEDGER,),
         tables.conventions_aggregate, captions.conventions),
    Item("tables/rollouts", "none", "rollouts", (ROLLOUTS,), tables.rollouts, captions.rollouts),
    Item("tables/coverage", "none", "convert", (COVERAGE,), tables.coverage, captions.coverage),
    Item("tables/distillation", "none", "distill", (HISTORY,), tables.distillation, captions.distillation),
    Item("figures/distillation", "none", "distill", (HISTORY,), figures.distillation, captions.distillation),
]  # fmt: skip


def cell(value) -> str:
    """A value as a Markdown table shows it."""
    if value is None or value != value:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"


def markdown(table: pd.DataFrame) -> str:
    """A pipe table; numbers to the right."""
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]
    lines = [list(table.columns), ["---:" if right else "---" for right in numeric]]
    lines += [[cell(value) for value in row] for row in table.astype(object).itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def index(data) -> str:
    """INDEX.md: what every file shows, where it comes from and what determines it."""
    lines = ["# Tables and figures", "", "Made by the stage `paper` (REGISTRY in `osprey/report.py`) from the outputs "
             "of the stages named here. Braces: one file per target, drafter or run of params.yaml.", "",
             "| file | number in the paper | stage | inputs |", "|---|---|---|---|"]  # fmt: skip
    for item in REGISTRY:
        endings = ("png", "svg") if item.name.startswith("figures/") else ("md", "csv")
        links = ", ".join(f"[{ending}]({item.name}.{ending})" for ending in endings)
        inputs = "<br>".join(f"`{t}`" + f" × {len(places(t, data.params))}" * ("{" in t) for t in item.inputs)
        lines.append(f"| {item.name}: {links} | {item.paper} | `{item.stage}` | {inputs} |")
    lines += ["", "Keys of params.yaml that determine a stage's outputs, and so every table and figure made from them "
              "(intervals depend on `report` too), and its executed notebooks:", "",
              "| stage | keys | notebooks |", "|---|---|---|"]  # fmt: skip
    for stage, keys in KEYS.items():
        files = [EXECUTED[stage].format(**place) for place in places(EXECUTED[stage], data.params)]
        lines.append(f"| `{stage}` | {keys} | {', '.join(f'[{Path(file).stem}]({file})' for file in files)} |")
    for item in REGISTRY:
        if item.name.startswith("figures/"):
            lines += ["", f"## {item.name.removeprefix('figures/')}", "", f"![{item.name}]({item.name}.png)", "",
                      item.caption(data)]  # fmt: skip
    return "\n".join(lines) + "\n"


def metrics(data) -> dict:
    """The headline numbers, for `dvc metrics`."""
    found = {"pretraining": {row.quantity: round(row.last, 4) for row in data.tables["pretraining"].itertuples()}}
    rows = data.tables["figure2_aggregate"].query("distilled == 'yes'")
    for row in rows.itertuples():
        found.setdefault(row.target, {}).setdefault(row.recipe, {})[row.cells] = round(row.al, 4)
    return found


def write(data, folder: Path) -> None:
    """Everything in the registry, INDEX.md and metrics.json, into an empty folder."""
    for kind in ("tables", "figures"):
        (folder / kind).mkdir(parents=True)
    for item in REGISTRY:  # in order: later tables and all captions build on earlier ones
        if item.name.startswith("tables/"):
            data.tables[item.name.removeprefix("tables/")] = item.make(data)
    for item in REGISTRY:
        stem, text = folder / item.name, ""
        if item.name.startswith("tables/"):
            table = data.tables[stem.name]
            table.to_csv(stem.with_suffix(".csv"), index=False, float_format="%.4f", lineterminator="\n")
            text = markdown(table) + "\n"
        else:
            with figures.style():
                figures.save(item.make(data), stem)
        stem.with_suffix(".md").write_text(text + item.caption(data) + "\n")
    (folder / "INDEX.md").write_text(index(data))
    (folder / "metrics.json").write_text(json.dumps(metrics(data), indent=1) + "\n")


def render(params, out: Path | None = None, root: Path = ROOT) -> None:
    """Write tables/, figures/, INDEX.md and metrics.json to `out` (by default `root`/results), all or nothing.

    Inputs are read below `root`. What the registry no longer makes disappears; anything else in `out` stays.
    Raises UserError when an input is missing or lacks a run of params.
    """
    out = out or root / "results"
    data = gather(params, root)
    fresh = out / ".rendering"
    shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed
    try:
        write(data, fresh)
        for made in sorted(fresh.iterdir()):
            if (out / made.name).is_dir():
                shutil.rmtree(out / made.name)
            os.replace(made, out / made.name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def show(*names: str, out: Path = ROOT / "results") -> None:
    """Display written figures and tables in a notebook, by their names in the registry, with their captions."""
    from IPython.display import Image, Markdown, display

    for name in names:
        if name.startswith("figures/"):
            display(Image(filename=out / f"{name}.png"))
        display(Markdown((out / f"{name}.md").read_text()))


def executions(root: Path = ROOT) -> list[str]:
    """What the executed notebooks are called: all stages of dvc.yaml with the keys of params.yaml, in order."""
    grid = yaml.safe_load((root / "params.yaml").read_text())
    names = []
    for name, entry in yaml.safe_load((root / "dvc.yaml").read_text())["stages"].items():
        names += [f"{name}-{key}" for key in grid[entry["foreach"].strip("${}")]] if "foreach" in entry else [name]
    return names


def gather_notebooks(root: Path = ROOT) -> None:
    """Copy the executed notebook of every stage but this one to results/notebooks."""
    folder = root / "results" / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for name in executions(root):
        if name != "paper":
            shutil.copyfile(root / "data" / "notebooks" / f"{name}.ipynb", folder / f"{name}.ipynb")


def timings(root: Path = ROOT) -> None:
    """results/timings/summary.csv: seconds and peak memory of every stage of dvc.yaml that has been timed.

    No part of `render`: timings are the one thing here that two runs do not share.
    """
    files = [root / "results" / "timings" / f"{name}.json" for name in executions(root)]
    rows = [json.loads(file.read_text()) for file in files if file.exists()]
    table = pd.DataFrame(rows, columns=["stage", "seconds", "peak_gib"])
    fresh = root / "results" / "timings" / ".summary.csv"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(fresh, index=False, float_format="%.1f", lineterminator="\n")
    os.replace(fresh, fresh.with_name("summary.csv"))
