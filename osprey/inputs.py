"""What the report reads. Files are enumerated from the parameters and never globbed, so what was removed from
params.yaml cannot linger in a table."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from osprey import sizes, stats
from osprey.params import UserError

LEDGER = "data/evaluations/{target}-{recipe}.csv"
HISTORY = "data/drafters/{target}/{recipe}/{run}/history.csv"
TRAIN, HELD_OUT = "data/pretrained/train.csv", "data/pretrained/held_out.csv"
ROLLOUTS = "data/rollouts/{target}/summary.csv"
COVERAGE = "data/converted/{target}-{recipe}/coverage.csv"
WEIGHTS = "data/converted/{target}-{recipe}/model.safetensors"
AGREEMENT = "data/agreement/{target}.csv"
SWEEP = "data/sweep/{target}.csv"  # committed, not made here; a target need not have one
PAPER_CELLS, PAPER_AGGREGATES = "data/paper/table12.csv", "data/paper/figure2.csv"
PAPER_MATCHED, PAPER_SIZES = "data/paper/table6.csv", "data/paper/table11.csv"
PAPER_CURVES, PAPER_FIRST = "data/paper/figures3_4.csv", "data/paper/first_n.csv"


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


def read_ledger(params, root: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ledger's rows of the runs in params: those of evaluate.split, which the tables are about, and those of the
    records' first prompts. Raises UserError when a run was not measured on some domain."""
    parts = []
    for place in places(LEDGER, params):
        path = LEDGER.format(**place)
        runs = ["undistilled", *(n for n, r in params.runs.items() if place == dict(target=r.target, recipe=r.recipe))]
        rows = read(path, params, root)
        rows = rows[rows.run.isin(runs) & rows.evaluation.isin(list(params.domains))]
        measured = stats.measured(rows[rows.split == params.evaluate.split])
        have = set(zip(measured.run, measured.evaluation, strict=True))
        for run, domain in [(run, domain) for run in runs for domain in params.domains]:
            if (run, domain) not in have:
                raise UserError(
                    f"{path}: nothing measured for run {run} on {domain}; bring the file up to date with "
                    "dvc repro, or raise rollouts.max_new_tokens if no response is longer than one token"
                )
        parts.append(rows)
    ledger = pd.concat(parts, ignore_index=True)
    return ledger[ledger.split == params.evaluate.split], ledger[ledger.split == "first"]


def read_sweep(params, root: Path) -> pd.DataFrame:
    """The learning-rate sweep behind the runs' rates, of the targets that have one; empty where this run is a sweep.

    Raises UserError for a file that is not a sweep's tables/learning_rates.csv.
    """
    parts = []
    for target in params.targets if params.evaluate.split != "validation" else []:
        path = SWEEP.format(target=target)
        if (root / path).is_file():
            table = pd.read_csv(root / path, keep_default_na=False, na_values=[""])
            table = table[table.target == target] if "target" in table else table
            if not {"target", "recipe", "lr", "best", "edge"} <= set(table.columns) or table.empty:
                raise UserError(f"{path}: not a sweep of {target}; copy results/tables/learning_rates.csv of a run of "
                                "presets/sweep.yaml, or remove it")  # fmt: skip
            parts.append(table.assign(lr=[f"{lr:g}" for lr in table.lr]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def gather(params, root: Path) -> SimpleNamespace:
    """Everything the report reads, and `tables`, which the registry's functions fill in order."""
    if not params.runs:
        raise UserError("runs: empty, so there is nothing to report; add one to params.yaml")
    ledger, first = read_ledger(params, root)
    histories = read(HISTORY, params, root)
    weights = {tuple(place.values()): sizes.count(root / WEIGHTS.format(**place)) for place in places(WEIGHTS, params)}
    return SimpleNamespace(
        params=params, tables={}, ledger=ledger, first=first,
        cells=stats.cell_means(ledger, params.report.resamples, params.seed),
        train=read(TRAIN, params, root), held_out=read(HELD_OUT, params, root), rollouts=read(ROLLOUTS, params, root),
        coverage=read(COVERAGE, params, root), histories={name: rows for name, rows in histories.groupby("run")},
        sizes=weights, agreement=read(AGREEMENT, params, root), sweep=read_sweep(params, root),
        paper_cells=read(PAPER_CELLS, params, root), paper_aggregates=read(PAPER_AGGREGATES, params, root),
        paper_matched=read(PAPER_MATCHED, params, root), paper_sizes=read(PAPER_SIZES, params, root),
        paper_curves=read(PAPER_CURVES, params, root), paper_first=read(PAPER_FIRST, params, root),
    )  # fmt: skip
