"""Every table and figure: which stage outputs it reads, how it is made, and the sentence under it.

REGISTRY is the whole report. Sentences about results are computed from the tables.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from osprey import bias, captions, figure2, figures, inputs, lookahead, rates, readme, tables
from osprey.inputs import places
from osprey.params import ROOT


class Item(NamedTuple):
    """One table or figure, written to `<name>.csv` and `.md`, or `<name>.png`, `.svg` and `.md` (the caption)."""

    name: str
    paper: str  # its number in the paper
    stage: str  # that made its inputs
    inputs: tuple[str, ...]
    make: Callable
    caption: Callable


LEDGER, HISTORY = inputs.LEDGER, inputs.HISTORY

REGISTRY = [
    Item("tables/figure2", "Table 12, Figure 2; Table 6", "evaluate",
         (LEDGER, inputs.PAPER_CELLS, inputs.PAPER_MATCHED), tables.figure2_cells, captions.figure2_cells),
    Item("tables/figure2_aggregate", "Figure 2, left", "evaluate", (LEDGER, inputs.PAPER_AGGREGATES),
         tables.figure2_aggregate, captions.figure2_aggregate),
    Item("tables/table11", "Table 11", "convert", (inputs.WEIGHTS, inputs.PAPER_SIZES),
         tables.table11, captions.table11),
    Item("tables/table6", "Table 6", "evaluate", (LEDGER, inputs.PAPER_MATCHED), tables.table6, captions.table6),
    Item("figures/figure2", "Figure 2", "evaluate", (LEDGER, inputs.WEIGHTS), figure2.draw, captions.figure2),
    Item("tables/learning_rates", "none", "evaluate", (LEDGER,), rates.learning_rates, captions.learning_rates),
    Item("tables/sweep", "none", "paper", (inputs.SWEEP,), rates.sweep, captions.sweep),
    Item("tables/pretraining", "Figures 3 and 4", "pretrain", (inputs.TRAIN, inputs.HELD_OUT, inputs.PAPER_CURVES),
         tables.pretraining, captions.pretraining),
    Item("figures/figure3", "Figure 3", "pretrain", (inputs.TRAIN, inputs.PAPER_CURVES),
         figures.figure3, captions.figure3),
    Item("figures/figure4", "Figure 4", "pretrain", (inputs.HELD_OUT, inputs.PAPER_CURVES),
         figures.figure4, captions.figure4),
    Item("tables/acceptance", "none", "evaluate", (LEDGER,), tables.acceptance, captions.acceptance),
    Item("tables/acceptance_aggregate", "none", "evaluate", (LEDGER,),
         tables.acceptance_aggregate, captions.acceptance),
    Item("figures/acceptance", "none", "evaluate", (LEDGER,), figures.acceptance, captions.acceptance),
    Item("tables/acceptance_gain", "Section 1, claim without numbers", "evaluate", (LEDGER,),
         lookahead.acceptance_gain, captions.acceptance_gain),
    Item("figures/acceptance_gain", "Section 1, claim without numbers", "evaluate", (LEDGER,),
         figures.acceptance_gain, captions.acceptance_gain),
    Item("tables/conventions", "none", "evaluate", (LEDGER,), tables.conventions, captions.conventions),
    Item("tables/conventions_aggregate", "none", "evaluate", (LEDGER,),
         tables.conventions_aggregate, captions.conventions),
    Item("tables/first_n", "none", "evaluate", (LEDGER, inputs.PAPER_FIRST), bias.first_n, captions.first_n),
    Item("tables/agreement", "none", "agreement", (inputs.AGREEMENT,), tables.agreement, captions.agreement),
    Item("tables/rollouts", "none", "rollouts", (inputs.ROLLOUTS,), tables.rollouts, captions.rollouts),
    Item("tables/coverage", "none", "convert", (inputs.COVERAGE,), tables.coverage, captions.coverage),
    Item("tables/distillation", "none", "distill", (HISTORY,), tables.distillation, captions.distillation),
    Item("figures/distillation", "none", "distill", (HISTORY,), figures.distillation, captions.distillation),
]  # fmt: skip


def cell(value) -> str:
    """A value as a Markdown table shows it."""
    if pd.isna(value):
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


# INDEX.md

PRETRAIN = "seed, threads, models, source, corpus, pretrain"
ROLLOUTS = "seed, threads, models, targets, domains, rollouts"
CONVERT = f"{PRETRAIN}, targets, domains, rollouts, vocabulary, recipes, drafters"
DISTILL = f"{CONVERT}, distill, runs"
EVALUATE = f"{DISTILL}, evaluate"
KEYS = {  # stage -> the keys of params.yaml that determine its outputs
    "models": "seed, threads, models", "corpus": "seed, threads, models, source, corpus",
    "prune": "seed, threads, models, source", "pretrain": PRETRAIN, "rollouts": ROLLOUTS, "convert": CONVERT,
    "distill": DISTILL, "evaluate": EVALUATE, "agreement": f"{EVALUATE}, agreement",
    "paper": f"{EVALUATE}, agreement, report",
}  # fmt: skip


def index(data, root: Path = ROOT) -> str:
    """INDEX.md: what every file below results/ shows, where it comes from and what determines it."""
    lines = [
        "# Tables and figures", "",
        "Made by the stage `paper` (REGISTRY in `osprey/report.py`) from the outputs of the stages named here; their "
        "keys of params.yaml are below. Braces: one file per target, drafter or run of params.yaml.", "",
        "| file | number in the paper | stage | inputs |", "|---|---|---|---|",
    ]  # fmt: skip
    for item in REGISTRY:
        endings = ("png", "svg", "md") if item.name.startswith("figures/") else ("md", "csv")
        links = ", ".join(f"[{ending}]({item.name}.{ending})" for ending in endings)
        sources = "<br>".join(f"`{t}`" + f" × {len(places(t, data.params))}" * ("{" in t) for t in item.inputs)
        lines.append(f"| {item.name}: {links} | {item.paper} | `{item.stage}` | {sources} |")
    lines += [
        "", "`data/sweep/{target}.csv` is tables/learning_rates of a run of `presets/sweep.yaml`, committed; not every "
        "target has one. `data/paper/*.csv` are the paper's numbers.", "", "## Stages", "",
        "Keys of params.yaml that determine a stage's outputs, and so every table and figure made from them (intervals "
        "depend on `report` too), and its executed notebooks:", "", "| stage | keys | notebooks |", "|---|---|---|",
    ]  # fmt: skip
    names = executions(root)
    for stage, keys in KEYS.items():
        links = ", ".join(f"[{name}](notebooks/{name}.ipynb)" for name in names.get(stage, []))
        lines.append(f"| `{stage}` | {keys} | {links} |")
    lines += [
        "", "## Other files", "", "| file | what | made by |", "|---|---|---|",
        "| [metrics.json](metrics.json) | headline numbers for `dvc metrics`: of tables/figure2, figure2_aggregate, "
        "pretraining, coverage and agreement | `paper` |",
        "| [INDEX.md](INDEX.md) | this list | `paper` |",
        "| `timings/*.json` | seconds and peak memory of each stage; not repeatable | every stage |",
        "| `timings/summary.csv` | the same in one table; not repeatable | `paper` |",
        "| `timings/benchmark.csv` | `make benchmark`; not repeatable | no stage |",
        "", "## Numbers in README.md", "", *readme.index_lines(root),
    ]  # fmt: skip
    for item in REGISTRY:
        if item.name.startswith("figures/"):
            lines += ["", f"## {item.name.removeprefix('figures/')}", "", f"![{item.name}]({item.name}.png)", "",
                      item.caption(data)]  # fmt: skip
    return "\n".join(lines) + "\n"


def metrics(data) -> dict:
    """The headline numbers, for `dvc metrics`: at own learning rates."""
    made = data.tables
    found = {"pretraining": {row.quantity: round(row.last, 4) for row in made["pretraining"].itertuples()}}
    for row in made["figure2_aggregate"].query("rate == 'own'").itertuples():
        target = found.setdefault(row.target, {})
        target.setdefault(row.recipe, {})[row.cells] = round(row.al, 4)
        if row.cells == "ID":
            target[row.recipe]["ID-gain"] = round(row.gain, 4)
        if row.recipe in rates.baselines(data.params, row.target) and not pd.isna(row.osprey_minus_this):
            target.setdefault(f"osprey-minus-{row.recipe}", {})[row.cells] = round(row.osprey_minus_this, 4)
    pairs = made["figure2"].query("in_figure == 'yes'").dropna(subset="osprey_minus_this")
    for (target, recipe), rows in pairs.groupby(["target", "recipe"], sort=False):
        if recipe in rates.baselines(data.params, target):
            found[target][f"osprey-minus-{recipe}"] |= {
                "cells": len(rows), "ahead": int((rows.osprey_minus_this > 0).sum()),
                "interval-above-0": int((rows.minus_low > 0).sum()),
            }  # fmt: skip
    judged = made["coverage"][made["coverage"].split == data.params.evaluate.split]
    for target, lowest in judged.groupby("target", sort=False).covered.min().items():
        found[target]["coverage-min"] = round(float(lowest), 4)
    for row in made["agreement"].query("evaluation == 'all' and steps > 0").itertuples():
        found[row.target]["disagreement"] = round(float(row.disagreeing), 6)
    return found


def write(data, folder: Path, root: Path = ROOT) -> None:
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
    (folder / "INDEX.md").write_text(index(data, root))
    (folder / "metrics.json").write_text(json.dumps(metrics(data), indent=1) + "\n")


def render(params, out: Path | None = None, root: Path = ROOT) -> None:
    """Write tables/, figures/, INDEX.md and metrics.json to `out` (by default `root`/results), all or nothing.

    Inputs are read below `root`. What the registry no longer makes disappears; anything else in `out` stays.
    Raises UserError when an input is missing or lacks a run of params.
    """
    out = out or root / "results"
    data = inputs.gather(params, root)
    fresh = out / ".rendering"
    shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed
    try:
        write(data, fresh, root)
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


def executions(root: Path = ROOT) -> dict[str, list[str]]:
    """Stage -> what its executed notebooks are called: all of dvc.yaml with the keys of params.yaml, in order."""
    grid, names = yaml.safe_load((root / "params.yaml").read_text()), {}
    for stage, entry in yaml.safe_load((root / "dvc.yaml").read_text())["stages"].items():
        keys = grid[entry["foreach"].strip("${}")] if "foreach" in entry else None
        names[stage] = [stage] if keys is None else [f"{stage}-{key}" for key in keys]
    return names


def gather_notebooks(root: Path = ROOT) -> None:
    """Copy the executed notebook of every stage but this one to results/notebooks."""
    folder = root / "results" / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    for name in [name for stage, names in executions(root).items() if stage != "paper" for name in names]:
        shutil.copyfile(root / "data" / "notebooks" / f"{name}.ipynb", folder / f"{name}.ipynb")


def timings(root: Path = ROOT) -> None:
    """results/timings/summary.csv: seconds and peak memory of every stage of dvc.yaml that has been timed.

    No part of `render`: timings are the one thing here that two runs do not share.
    """
    names = [name for names in executions(root).values() for name in names]
    files = [root / "results" / "timings" / f"{name}.json" for name in names]
    rows = [json.loads(file.read_text()) for file in files if file.exists()]
    table = pd.DataFrame(rows, columns=["stage", "seconds", "peak_gib"])
    fresh = root / "results" / "timings" / ".summary.csv"
    fresh.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(fresh, index=False, float_format="%.1f", lineterminator="\n")
    os.replace(fresh, fresh.with_name("summary.csv"))
