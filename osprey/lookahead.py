"""The introduction's claim, which the paper does not print: that the gain grows with the lookahead position."""

import numpy as np
import pandas as pd

from osprey import rates, stats
from osprey.rates import OURS


def acceptance_gain(data) -> pd.DataFrame:
    """OURS against every baseline by draft position, in domain, out of it and over all cells that both have.

    measure: OURS minus the baseline in unconditional or conditional acceptance (stats.acceptance), or the ratio of the
    unconditional ones; pooled over cells and requests as in acceptance_aggregate, with intervals paired by request.
    change: the measure there minus that at position 1.
    """
    params, rows = data.params, []
    steps = params.evaluate.steps
    counts = stats.cell_counts(data.ledger, steps, params.report.resamples, params.seed)
    for target in params.targets:
        recipes = rates.grid(params, target)
        for baseline in rates.baselines(params, target) if OURS in recipes else []:
            both = [adaptation for adaptation in recipes.get(baseline, {}) if adaptation in recipes[OURS]]
            cells = [(adaptation, evaluation) for adaptation in both for evaluation in params.domains]
            for name, chosen in rates.kinds(cells).items():
                ours, theirs = (
                    stats.acceptances(sum(counts[target, recipe, recipes[recipe][a], e] for a, e in chosen))
                    for recipe in (OURS, baseline)
                )
                with np.errstate(divide="ignore", invalid="ignore"):  # where the baseline never gets that far
                    ratio_BK = ours[0] / theirs[0]
                measures = {"unconditional": ours[0] - theirs[0], "conditional": ours[1] - theirs[1], "ratio": ratio_BK}
                for measure, gain_BK in measures.items():
                    for k in range(steps):
                        change = stats.estimate(gain_BK[:, k] - gain_BK[:, 0]) if k else (None,) * 3
                        rows.append((target, baseline, name, measure, k + 1, *stats.estimate(gain_BK[:, k]), *change))
    return pd.DataFrame(rows, columns=["target", "baseline", "cells", "measure", "position", "gain", "low", "high",
                                       "change", "change_low", "change_high"])  # fmt: skip
