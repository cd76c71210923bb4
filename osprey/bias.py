"""What taking the first prompts of a file, instead of a sample, does to AL."""

import numpy as np
import pandas as pd

from osprey import rates, stats

PROMPTS = (8, 16, 32)


def first_n(data) -> pd.DataFrame:
    """AL on the first N prompts in their own order, on the first N of the sample (whose order is random), and their
    difference with its unpaired interval: undistilled and in domain, per domain and on average over domains.

    Only for N that both have, so at a large N the mean may be over fewer domains. Draws are shared by all drafters.
    """
    params, rows = data.params, []
    sides = {"first": dict(list(data.first.groupby(stats.CELL))), "sample": dict(list(data.ledger.groupby(stats.CELL)))}

    def mean(side: str, cell: tuple, prompts: int) -> np.ndarray | None:
        """Mean AL of a cell's first `prompts` requests, as a bootstrapped quantity; None where it has fewer."""
        requests = sides[side].get(cell, data.first.head(0)).sort_values("request").head(prompts)
        al_R = stats.measured(requests).al.to_numpy()
        if len(requests) < prompts or not len(al_R):
            return None
        name = f"{cell[0]}/{cell[3]}/{side}/{prompts}"
        return stats.resample(len(al_R), params.report.resamples, params.seed, name) @ al_R / len(al_R)

    for target, recipe in [(drafter.target, drafter.recipe) for drafter in params.drafters.values()]:
        runs = rates.grid(params, target).get(recipe, {})
        for distilled in ("no", "yes"):
            for prompts in PROMPTS:
                found = {}
                for domain in params.domains if distilled == "no" else runs:
                    cell = (target, recipe, "undistilled" if distilled == "no" else runs[domain], domain)
                    pair = [mean(side, cell, prompts) for side in sides]
                    if pair[0] is not None and pair[1] is not None:
                        found[domain] = pair
                if found:
                    found["mean"] = [sum(side) / len(side) for side in zip(*found.values(), strict=True)]
                for domain, (first, sample) in found.items():
                    rows.append((target, recipe, distilled, domain, len(found) - 1 if domain == "mean" else 1, prompts,
                                 first[0], sample[0], *stats.estimate(first - sample)))  # fmt: skip
    return pd.DataFrame(rows, columns=["target", "recipe", "distilled", "evaluation", "domains", "prompts", "first",
                                       "sample", "bias", "low", "high"])  # fmt: skip
