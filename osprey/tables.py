"""What each table holds.

Every function takes `data` as `inputs.gather` made it; `data.tables` holds the tables made before.
"""

import numpy as np
import pandas as pd

from osprey import rates, stats
from osprey.rates import OURS, aggregates

PAPER = "paper_qwen3_8b"  # the column of the paper's numbers, and the target they belong to
MINUS = ["osprey_minus_this", "minus_low", "minus_high"]
GAIN = ["gain", "gain_low", "gain_high"]  # over the recipe's own drafter before distillation
NONE = (None,) * 3


def drafters(params) -> list[tuple[str, str]]:
    return [(drafter.target, drafter.recipe) for drafter in params.drafters.values()]


# Figure 2


def contestants(params, target: str, recipe: str) -> list[tuple[str, str, str]]:
    """(rate, adaptation, run) of a recipe: undistilled, at its own rate, at the common one where that is another, and
    what is left, in no mean over cells."""
    found, own = [("", "none", "undistilled")], rates.grid(params, target).get(recipe, {})
    for rate, recipes in rates.sets(params, target).items():
        found += [(rate, adaptation, run) for adaptation, run in recipes.get(recipe, {}).items()]
    seen = {run for _, _, run in found} | set(own.values())
    return found + [("other", run.domain, name) for name, run in params.runs.items()
                    if (run.target, run.recipe) == (target, recipe) and name not in seen]  # fmt: skip


def figure2_cells(data) -> pd.DataFrame:
    """One row per cell, before and after distillation: AL, interval, the paper's number, OURS at the same kind of rate
    minus this row, and this row minus its drafter before distillation."""
    params, rows = data.params, []
    dropped = data.ledger.assign(dropped=data.ledger.verifications == 0).groupby(stats.CELL).dropped
    counted = dropped.agg(["size", "sum"])
    keys = ["recipe", "adaptation", "evaluation"]
    paper = pd.concat([data.paper_cells[data.paper_cells.lr == 1e-4], data.paper_matched]).drop_duplicates(keys)
    paper = paper.set_index(keys).al
    for target, recipe in drafters(params):
        sets = rates.sets(params, target)
        shown = rates.in_figure(sets["own"])
        for rate, adaptation, run in contestants(params, target, recipe):
            ours = sets.get(rate, {}).get(OURS, {}).get(adaptation) if adaptation != "none" else run
            lr = rates.written(params, [run]) if adaptation != "none" else ""
            for evaluation in params.domains:
                mine = data.cells[target, recipe, run, evaluation]
                theirs = data.cells.get((target, OURS, ours, evaluation))
                minus = NONE if theirs is None or recipe == OURS else stats.estimate(theirs - mine)
                gain = NONE
                if adaptation != "none":
                    gain = stats.estimate(mine - data.cells[target, recipe, "undistilled", evaluation])
                size, dropped = counted.loc[(target, recipe, run, evaluation)]
                rows.append((target, recipe, run, adaptation, rate, lr, evaluation, *stats.estimate(mine),
                             size - dropped, dropped, paper.get((recipe, adaptation, evaluation)), *minus, *gain,
                             "yes" if rate == "own" and recipe in shown else "no"))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "run", "adaptation", "rate", "lr", "evaluation", "al", "low",
                                       "high", "requests", "dropped", PAPER, *MINUS, *GAIN, "in_figure"])  # fmt: skip


def means(data, target: str, recipe: str, runs: dict[str, str], domains=None) -> dict[str, np.ndarray]:
    """Macro means over the cells of {adaptation: run}, as bootstrapped quantities; on all domains or on `domains`."""
    return aggregates(
        {
            (adaptation, evaluation): data.cells[target, recipe, run, evaluation]
            for evaluation in domains or data.params.domains
            for adaptation, run in runs.items()
        }
    )


def pair(data, target: str, recipe: str, recipes: rates.GRID, domains=None) -> tuple[dict, dict]:
    """Means of OURS and of another recipe over the adaptation domains that both have; empty where there are none."""
    both = [adaptation for adaptation in recipes.get(recipe, {}) if adaptation in recipes.get(OURS, {})]
    if recipe == OURS or not both:
        return {}, {}
    return tuple(means(data, target, name, {adaptation: recipes[name][adaptation] for adaptation in both}, domains)
                 for name in (OURS, recipe))  # fmt: skip


def figure2_aggregate(data) -> pd.DataFrame:
    """ID, OOD, all cells and OOD/ID of every recipe; OURS minus it over the adaptation domains that both have; and what
    distillation added on the same cells."""
    params, rows = data.params, []
    paper = data.paper_aggregates.set_index(["recipe", "cells"]).al
    for target, recipe in drafters(params):
        before = {other: {"none": "undistilled"} for t, other in drafters(params) if t == target}
        for rate, recipes in [("", before), *rates.sets(params, target).items()]:
            runs = recipes.get(recipe, {})
            theirs, mine = pair(data, target, recipe, recipes)
            start = means(data, target, recipe, {adaptation: "undistilled" for adaptation in runs})
            for name, mean in means(data, target, recipe, runs).items():
                minus = stats.estimate(theirs[name] - mine[name]) if name in mine else NONE
                gain = stats.estimate(mean - start[name]) if rate and name != "OOD/ID" else NONE
                lr = rates.written(params, runs.values()) if rate else ""
                rows.append((target, recipe, "yes" if rate else "no", rate, lr, name,
                             len(set(runs) & set(params.domains)), *stats.estimate(mean),
                             paper.get((recipe, name)) if rate else None, *minus, *gain))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "distilled", "rate", "lr", "cells", "adaptations", "al",
                                       "low", "high", PAPER, *MINUS, *GAIN])  # fmt: skip


def table6(data) -> pd.DataFrame:
    """The size-matched comparison over the domains that Table 6 covers, at own rates: ours, and the paper's over the
    same cells."""
    rows, printed = [], data.paper_matched.set_index(["recipe", "adaptation", "evaluation"]).al
    covered, recipes_of_paper = set(data.paper_matched.adaptation), set(data.paper_matched.recipe)
    domains = [domain for domain in data.params.domains if domain in covered]
    for target, recipe in drafters(data.params) if domains else []:
        if recipe not in recipes_of_paper:
            continue
        recipes = {name: {a: run for a, run in runs.items() if a in covered}
                   for name, runs in rates.grid(data.params, target).items()}  # fmt: skip
        runs = recipes.get(recipe, {})
        theirs, mine = pair(data, target, recipe, recipes, domains)

        paper = {name: aggregates({(a, e): printed[name, a, e] for a in runs for e in domains})
                 for name in (OURS, recipe)}  # fmt: skip
        for name, mean in means(data, target, recipe, runs, domains).items():
            minus = stats.estimate(theirs[name] - mine[name]) if name in mine else NONE
            printed_minus = paper[OURS][name] - paper[recipe][name] if name in mine else None
            rows.append((target, recipe, rates.written(data.params, runs.values()), name, len(runs), len(domains),
                         *stats.estimate(mean), paper[recipe][name], *minus, printed_minus))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "lr", "cells", "adaptations", "evaluations", "al", "low",
                                       "high", PAPER, *MINUS, "paper_osprey_minus_this"])  # fmt: skip


def table11(data) -> pd.DataFrame:
    """Parameters of every drafter, counted from its checkpoint, and the paper's."""
    paper, rows = data.paper_sizes.set_index("recipe"), []
    for (target, recipe), counted in data.sizes.items():
        frozen = counted["embedding"] if data.params.recipes[recipe].interface == "eagle3" else 0
        printed = paper.loc[recipe, ["layers", "width", "body_millions"]] if recipe in paper.index else NONE
        rows.append((target, recipe, *counted.values(), counted["total"] - frozen, *printed))
    table = pd.DataFrame(rows, columns=["target", "recipe", "layers", "width", "body", "embedding", "head", "total",
                                        "trainable", "paper_layers", "paper_width", "paper_body_millions"])  # fmt: skip
    return table.astype({name: "Int64" for name in table if name.startswith("paper_")})


# Stages 2 to 4


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


# Evaluation


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
    """The same pooled over the in-domain and out-of-domain cells of Figure 2, and over all of them."""
    rows = data.ledger.merge(cell_labels(data), on=stats.CELL)
    rows = pd.concat([rows, rows.assign(cells="All")])
    return stats.acceptance(rows, data.params.evaluate.steps, ["target", "recipe", "cells"])


def conventions(data) -> pd.DataFrame:
    """Every cell's accepted length under every convention."""
    return stats.conventions(data.ledger)


def conventions_aggregate(data) -> pd.DataFrame:
    """The macro mean over the cells in Figure 2 under every convention."""
    rows = data.tables["conventions"].merge(cell_labels(data), on=stats.CELL)
    names = ["al", "with_prefill", "pooled", "vllm", "without_bonus"]
    return rows.groupby(["target", "recipe"], sort=False)[names].mean().reset_index()


def agreement(data) -> pd.DataFrame:
    """Decoding token by token beside replay, per target and domain and over all: how often they differ, and both AL."""
    table, rows = data.agreement, []
    table = table[table.evaluation.isin(list(data.params.domains))]
    for target, here in table.groupby("target", sort=False):
        for domain, some in [*here.groupby("evaluation", sort=False), ("all", here)]:
            same = (some.common == some.tokens) & (some.decoded_tokens == some.tokens)
            steps, equal = some.steps.sum(), some.equal.sum()
            long = some[(some.decoded_verifications > 0) & (some.replayed_verifications > 0)]
            decoded, replayed = (((long[f"{kind}_tokens"] - 1) / long[f"{kind}_verifications"]).mean()
                                 for kind in ("decoded", "replayed"))  # fmt: skip
            rows.append((target, domain, len(some), same.mean(), steps, (steps - equal) / steps if steps else None,
                         decoded, replayed, decoded - replayed))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "evaluation", "requests", "same_tokens", "steps", "disagreeing",
                                       "al_decoded", "al_replayed", "difference"])  # fmt: skip
