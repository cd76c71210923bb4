"""What each table holds.

Every function takes `data` as `report.gather` made it; `data.tables` holds the tables made before.
"""

import numpy as np
import pandas as pd

from osprey import stats

OURS, BASELINE = "osprey", "eagle3-1l"  # the pair that the paper's Figure 2 compares
PAPER = "paper_qwen3_8b"  # the column of the paper's numbers, and the target they belong to


def grid(params, target: str) -> dict[str, dict[str, str]]:
    """recipe -> adaptation domain -> run of the target's grid.

    Where a recipe has several learning rates on one domain, the one listed first in params.yaml stands for it; the
    others have rows in the tables and no part in means over cells (choosing by result would favour whoever has more).
    """
    found = {}
    for name, run in params.runs.items():
        if run.target == target:
            found.setdefault(run.recipe, {}).setdefault(run.domain, name)
    return found


def in_figure(recipes: dict) -> list[str]:
    """The recipes whose means are comparable: adapted on the same domains as OURS, or as the first recipe."""
    domains = set(recipes.get(OURS, next(iter(recipes.values()), {})))
    return [recipe for recipe in recipes if set(recipes[recipe]) == domains]


def figure2_cells(data) -> pd.DataFrame:
    """One row per cell, before and after distillation: AL, interval, the paper's number, and OURS minus this row."""
    params, rows = data.params, []
    dropped = data.ledger.assign(dropped=data.ledger.verifications == 0).groupby(stats.CELL).dropped
    counted = dropped.agg(["size", "sum"])
    paper = data.paper_cells[data.paper_cells.lr == 1e-4].set_index(["recipe", "adaptation", "evaluation"]).al
    for drafter in params.drafters.values():
        target, recipe = drafter.target, drafter.recipe
        recipes = grid(params, target)
        runs = [(n, r.domain, f"{r.lr:g}") for n, r in params.runs.items() if (r.target, r.recipe) == (target, recipe)]
        for run, adaptation, lr in [("undistilled", "none", ""), *runs]:
            ours = "undistilled" if adaptation == "none" else recipes.get(OURS, {}).get(adaptation)
            chosen = recipes.get(recipe, {}).get(adaptation) == run and recipe in in_figure(recipes)
            for evaluation in params.domains:
                mine = data.cells[target, recipe, run, evaluation]
                theirs = data.cells.get((target, OURS, ours, evaluation))
                minus = (None,) * 3 if theirs is None or recipe == OURS else stats.estimate(theirs - mine)
                size, dropped = counted.loc[(target, recipe, run, evaluation)]
                rows.append((target, recipe, run, adaptation, lr, evaluation, *stats.estimate(mine), size - dropped,
                             dropped, paper.get((recipe, adaptation, evaluation)), *minus,
                             "yes" if chosen else "no"))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "run", "adaptation", "lr", "evaluation", "al", "low", "high",
                                       "requests", "dropped", PAPER, "osprey_minus_this", "minus_low", "minus_high",
                                       "in_figure"])  # fmt: skip


def aggregates(cells: dict) -> dict[str, np.ndarray]:
    """Macro means of {(adaptation, evaluation): quantity} in and out of domain and over all, and their ratio."""
    means = {}
    for name, chosen in (("ID", [a == e for a, e in cells]), ("OOD", [a != e and a != "none" for a, e in cells]),
                         ("All", [True for _ in cells])):  # fmt: skip
        if any(chosen):
            means[name] = np.mean([cell for cell, keep in zip(cells.values(), chosen, strict=True) if keep], axis=0)
    if {"ID", "OOD"} <= set(means):
        means["OOD/ID"] = means["OOD"] / means["ID"]
    return means


def figure2_aggregate(data) -> pd.DataFrame:
    """ID, OOD, all cells and OOD/ID of every recipe, and OURS minus it over the adaptation domains that both have."""
    params, rows = data.params, []
    paper = data.paper_aggregates.set_index(["recipe", "cells"]).al

    def means(target, recipe, runs):
        return aggregates({(adaptation, evaluation): data.cells[target, recipe, run, evaluation]
                           for adaptation, run in runs.items() for evaluation in params.domains})  # fmt: skip

    for target, recipe in [(drafter.target, drafter.recipe) for drafter in params.drafters.values()]:
        for distilled in ("no", "yes"):
            runs_of = grid(params, target)
            if distilled == "no":
                runs_of = {d.recipe: {"none": "undistilled"} for d in params.drafters.values() if d.target == target}
            runs, ours = runs_of.get(recipe, {}), runs_of.get(OURS, {})
            common = [adaptation for adaptation in runs if adaptation in ours and recipe != OURS]
            theirs = means(target, OURS, {adaptation: ours[adaptation] for adaptation in common})
            mine = means(target, recipe, {adaptation: runs[adaptation] for adaptation in common})
            for name, mean in means(target, recipe, runs).items():
                minus = stats.estimate(theirs[name] - mine[name]) if name in mine else (None,) * 3
                printed = paper.get((recipe, name)) if distilled == "yes" else None
                rows.append((target, recipe, distilled, name, len(set(runs) & set(params.domains)),
                             *stats.estimate(mean), printed, *minus))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "distilled", "cells", "adaptations", "al", "low", "high",
                                       PAPER, "osprey_minus_this", "minus_low", "minus_high"])  # fmt: skip


def pretraining(data) -> pd.DataFrame:
    """First and last point of the two curves, next to the paper's."""
    rows = []
    curves = ((3, "training loss (nats)", data.train, "loss"), (4, "held-out perplexity", data.held_out, "perplexity"))
    for number, quantity, curve, column in curves:
        first, last = curve.iloc[0], curve.iloc[-1]
        paper = data.paper_curves[data.paper_curves.figure == number].value
        rows.append((quantity, int(first.step), first[column], int(last.step), last[column], int(last.tokens),
                     paper.iloc[0], paper.iloc[-1]))  # fmt: skip
    return pd.DataFrame(rows, columns=["quantity", "first_step", "first", "last_step", "last", "tokens",
                                       "paper_first", "paper_last"])  # fmt: skip


def cell_labels(data) -> pd.DataFrame:
    """The cells in Figure 2 and whether each is ID or OOD."""
    cells = data.tables["figure2"]
    cells = cells[cells.in_figure == "yes"]
    own = cells.adaptation == cells.evaluation
    return cells.assign(cells=np.where(own, "ID", "OOD"))[[*stats.CELL, "cells"]]


def acceptance(data) -> pd.DataFrame:
    """Every cell's acceptance by draft position."""
    return stats.acceptance(data.ledger, data.params.evaluate.steps, stats.CELL)


def acceptance_aggregate(data) -> pd.DataFrame:
    """The same pooled over the in-domain and out-of-domain cells of Figure 2."""
    rows = data.ledger.merge(cell_labels(data), on=stats.CELL)
    return stats.acceptance(rows, data.params.evaluate.steps, ["target", "recipe", "cells"])


def conventions(data) -> pd.DataFrame:
    """Every cell's accepted length under every convention."""
    return stats.conventions(data.ledger)


def conventions_aggregate(data) -> pd.DataFrame:
    """The macro mean over the cells in Figure 2 under every convention."""
    rows = data.tables["conventions"].merge(cell_labels(data), on=stats.CELL)
    names = ["al", "with_prefill", "pooled", "vllm", "without_bonus"]
    return rows.groupby(["target", "recipe"], sort=False)[names].mean().reset_index()


def rollouts(data) -> pd.DataFrame:
    """Lengths, endings and repetition per target, domain and split, as the stage counted them."""
    return data.rollouts[data.rollouts.domain.isin(list(data.params.domains))]


def coverage(data) -> pd.DataFrame:
    """What the draft vocabulary covers per drafter, domain and split, as the stage counted it."""
    return data.coverage[data.coverage.domain.isin(list(data.params.domains))]


def distillation(data) -> pd.DataFrame:
    """One row a run: updates, chain starts taught, and the mean loss of its first and last tenth."""
    rows = []
    for name, run in data.params.runs.items():
        history = data.histories[name]
        last, loss, tenth = history.iloc[-1], history.loss, max(1, len(history) // 10)
        rows.append((run.target, run.recipe, name, run.domain, f"{run.lr:g}", int(last.step), int(last.tokens),
                     loss.head(tenth).mean(), loss.tail(tenth).mean()))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "run", "adaptation", "lr", "updates", "tokens",
                                       "first_tenth", "last_tenth"])  # fmt: skip
