"""Which runs stand for a recipe: those at its own learning rate, and those at a rate that all recipes have.

A recipe's own rate is that of its first-listed run on each adaptation domain (choosing by result would favour whoever
has more runs); presets/sweep.yaml is where it was chosen.
"""

import pandas as pd

from osprey import stats

OURS = "osprey"
GRID = dict[str, dict[str, str]]  # recipe -> adaptation domain -> run


def baselines(params, target: str) -> list[str]:
    """The EAGLE-3 recipes that draft for the target, in the order of params.yaml."""
    recipes = [drafter.recipe for drafter in params.drafters.values() if drafter.target == target]
    return [recipe for recipe in recipes if params.recipes[recipe].interface == "eagle3"]


def grid(params, target: str, lr: float | None = None) -> GRID:
    """The runs first listed in params.yaml, of all the target's or of those at the rate `lr`."""
    found = {}
    for name, run in params.runs.items():
        if run.target == target and lr in (None, run.lr):
            found.setdefault(run.recipe, {}).setdefault(run.domain, name)
    return found


def in_figure(recipes: GRID) -> list[str]:
    """The recipes whose means are comparable: adapted on the same domains as OURS, or as the first recipe."""
    domains = set(recipes.get(OURS, next(iter(recipes.values()), {})))
    return [recipe for recipe in recipes if set(recipes[recipe]) == domains]


def common(params, target: str) -> float | None:
    """The rate at which all recipes of the figure have runs on all its domains: the own one where they share it, else
    the one listed first; None where there is none."""
    own = grid(params, target)
    shown = {recipe: own[recipe] for recipe in in_figure(own)}
    used = {params.runs[run].lr for runs in shown.values() for run in runs.values()}
    if len(used) == 1:
        return used.pop()
    for lr in dict.fromkeys(run.lr for run in params.runs.values() if run.target == target):
        at = grid(params, target, lr)
        if all(set(at.get(recipe, {})) >= set(shown[recipe]) for recipe in shown):
            return lr
    return None


def sets(params, target: str) -> dict[str, GRID]:
    """own: every recipe at its own rate; common: all at one, only where that is another set of runs."""
    own, lr = grid(params, target), common(params, target)
    if lr is None:
        return {"own": own}
    shared = grid(params, target, lr)
    shared = {recipe: {domain: shared[recipe][domain] for domain in own[recipe]} for recipe in in_figure(own)}
    return {"own": own} if all(shared[r] == own[r] for r in shared) else {"own": own, "common": shared}


def written(params, runs) -> str:
    """The learning rates of some runs as tables show them."""
    return " / ".join(dict.fromkeys(f"{params.runs[run].lr:g}" for run in runs))


# Tables

COLUMNS = ["target", "recipe", "lr", "adaptations", *(f"{cells}{end}" for cells in ("ID", "OOD", "All")
           for end in ("", "_low", "_high")), "best", "edge"]  # fmt: skip


def kinds(cells) -> dict[str, list]:
    """(adaptation, evaluation) cells in domain, out of it, and all; adaptation `none` is neither of the first two."""
    found = {"ID": [c for c in cells if c[0] == c[1]], "OOD": [c for c in cells if c[0] not in (c[1], "none")]}
    return {name: some for name, some in (found | {"All": list(cells)}).items() if some}


def aggregates(cells: dict) -> dict:
    """Macro means of {(adaptation, evaluation): quantity} over each of the `kinds`, and the ratio OOD/ID."""
    means = {name: sum(cells[cell] for cell in some) / len(some) for name, some in kinds(cells).items()}
    if {"ID", "OOD"} <= set(means):
        means["OOD/ID"] = means["OOD"] / means["ID"]
    return means


def learning_rates(data) -> pd.DataFrame:
    """One row per target, recipe and learning rate: mean AL in domain, out of it and over all cells.

    best: the recipe's highest ID; only rates with the most adaptation domains compete. edge: is the best rate the
    lowest or highest of these? Empty for a single one.
    """
    params, rows = data.params, []
    for target, recipe in [(drafter.target, drafter.recipe) for drafter in params.drafters.values()]:
        rates = sorted({run.lr for run in params.runs.values() if (run.target, run.recipe) == (target, recipe)})
        runs_at = {lr: grid(params, target, lr)[recipe] for lr in rates}
        means_at = {lr: aggregates({(adaptation, evaluation): data.cells[target, recipe, run, evaluation]
                                    for adaptation, run in runs.items() for evaluation in params.domains})
                    for lr, runs in runs_at.items()}  # fmt: skip
        widest = max(runs_at.values(), key=len)
        compete = [lr for lr in rates if set(runs_at[lr]) == set(widest)]
        best = max(compete, key=lambda lr: means_at[lr]["ID"][0])
        edge = "" if len(compete) == 1 else "yes" if best in (compete[0], compete[-1]) else "no"
        for lr in rates:
            numbers = [stats.estimate(means_at[lr][name]) if name in means_at[lr] else (None,) * 3
                       for name in ("ID", "OOD", "All")]  # fmt: skip
            rows.append((target, recipe, f"{lr:g}", len(runs_at[lr]), *(value for three in numbers for value in three),
                         "yes" if lr == best else "", edge if lr == best else ""))  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def sweep(data) -> pd.DataFrame:
    """The sweep's own such table."""
    return data.sweep if len(data.sweep) else pd.DataFrame(columns=COLUMNS)
