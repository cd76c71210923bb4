"""From the ledger to numbers: accepted length with its interval, the other conventions, acceptance by position.

The ledger (`data/evaluations/*.csv`) has one row per run, evaluation domain, split and request: `tokens` T of the
response, EOS counted; `verifications` V; `accepted` draft tokens; and for each draft position k `offered_k`, the
verification steps in which that position lay inside the response, and `accepted_k`, those whose first k drafts
were all accepted.

A bootstrapped quantity is a vector: element 0 is the estimate from the sample itself, the others are its
resamples. Differences, means and ratios of quantities are therefore plain arithmetic on vectors, and whatever was
resampled with the same draws is paired.
"""

import zlib

import numpy as np
import pandas as pd

from osprey.params import UserError

CELL = ["target", "recipe", "run", "evaluation"]
PERCENTILES = (2.5, 97.5)  # the 95 % interval


def resample(requests: int, resamples: int, seed: int, name: str) -> np.ndarray:
    """How often each request is drawn, (1 + resamples, requests); row 0, the sample itself, has each of them once.

    `name` gives every set of requests its own stream, so adding a domain moves no other domain's interval.
    """
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = random.integers(requests, size=(resamples, requests))
    drawn += np.arange(resamples)[:, None] * requests  # one bincount for all rows: each row has its own bins
    counts = np.bincount(drawn.ravel(), minlength=resamples * requests).reshape(resamples, requests)
    return np.vstack([np.ones(requests, int), counts])


def estimate(quantity: np.ndarray) -> tuple[float, float, float]:
    """(estimate, low, high): the percentile bootstrap interval of a quantity (1 + resamples,).

    A resample in which it is undefined (a share of nothing) counts as beyond both ends; nan where an end is undefined.
    """
    drawn = quantity[1:]
    with np.errstate(invalid="ignore"):  # between infinities
        low = np.percentile(np.where(np.isnan(drawn), -np.inf, drawn), PERCENTILES[0])
        high = np.percentile(np.where(np.isnan(drawn), np.inf, drawn), PERCENTILES[1])
    return tuple(float(value) if np.isfinite(value) else np.nan for value in (quantity[0], low, high))


def measured(ledger: pd.DataFrame) -> pd.DataFrame:
    """The rows with at least one verification step, with their accepted length `al` = (T - 1) / V (design, 7)."""
    ledger = ledger[ledger.verifications > 0]
    return ledger.assign(al=(ledger.tokens - 1) / ledger.verifications)


def draws(ledger: pd.DataFrame, columns: list[str], resamples: int, seed: int):
    """Every (target, recipe, run, evaluation) with the resamples of its requests, (1 + resamples, requests), and the
    requests' `columns`, (requests, columns).

    All cells of one target and evaluation domain answer the same requests, so a resample draws those once for
    all of them: differences between drafters are paired, and a mean over cells does not take one hard prompt,
    met by five drafters, for five independent ones. Raises UserError when the cells' requests differ.
    """
    for (target, evaluation), group in measured(ledger).groupby(["target", "evaluation"]):
        wide = group.pivot(index="request", columns=["recipe", "run"], values=columns)
        if wide.isna().any(axis=None) or (group.groupby("request").tokens.nunique() > 1).any():
            raise UserError(f"data/evaluations: the drafters of {target} answered different {evaluation} rollouts; "
                            "bring the files up to date with dvc repro")  # fmt: skip
        counts_BR = resample(len(wide), resamples, seed, f"{target}/{evaluation}").astype(float)
        for recipe, run in group[["recipe", "run"]].drop_duplicates().itertuples(index=False):
            values_RC = wide[[(column, recipe, run) for column in columns]].to_numpy(float)
            yield (target, recipe, run, evaluation), counts_BR, values_RC


def cell_means(ledger: pd.DataFrame, resamples: int, seed: int) -> dict[tuple, np.ndarray]:
    """Mean AL over requests of every (target, recipe, run, evaluation), as a bootstrapped quantity; see draws."""
    return {cell: counts_BR @ al_R1[:, 0] / len(al_R1)
            for cell, counts_BR, al_R1 in draws(ledger, ["al"], resamples, seed)}  # fmt: skip


def cell_counts(ledger: pd.DataFrame, steps: int, resamples: int, seed: int) -> dict[tuple, np.ndarray]:
    """What `acceptances` needs of every cell, summed over requests, (1 + resamples, 1 + 2 steps); see draws."""
    return {cell: counts_BR @ values_RC
            for cell, counts_BR, values_RC in draws(ledger, count_columns(steps), resamples, seed)}  # fmt: skip


def count_columns(steps: int) -> list[str]:
    positions = range(1, steps + 1)
    return ["verifications", *(f"offered_{k}" for k in positions), *(f"accepted_{k}" for k in positions)]


def acceptances(counts_BC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unconditional and conditional acceptance by draft position, each (1 + resamples, steps), of a (sum of) cells'
    counts: as `acceptance` defines them; nan for a share of nothing."""
    steps = counts_BC.shape[1] // 2
    offered_BK, accepted_BK = counts_BC[:, 1 : 1 + steps], counts_BC[:, 1 + steps :]
    before_BK = np.hstack([counts_BC[:, :1], accepted_BK[:, :-1]])
    with np.errstate(invalid="ignore"):
        return accepted_BK / offered_BK, accepted_BK / before_BK


def conventions(ledger: pd.DataFrame) -> pd.DataFrame:
    """The accepted length of every cell as different people count it (design, 7), one row per cell.

    `al` mean of (T - 1) / V, the headline; `with_prefill` mean of T / V, the authors' script; `pooled`
    sum of T - 1 over sum of V; `vllm` 1 + accepted / drafts over all requests, as vLLM logs it; `without_bonus`
    mean of accepted / V, draft tokens alone.
    """
    rows = measured(ledger)
    rows = rows.assign(emitted=rows.tokens - 1, with_prefill=rows.tokens / rows.verifications,
                       without_bonus=rows.accepted / rows.verifications)  # fmt: skip
    groups = rows.groupby(CELL, sort=False)
    table = groups[["al", "with_prefill", "without_bonus"]].mean()
    sums = groups[["emitted", "accepted", "verifications"]].sum()
    table.insert(2, "pooled", sums.emitted / sums.verifications)
    table.insert(3, "vllm", 1 + sums.accepted / sums.verifications)
    return table.reset_index()


def acceptance(ledger: pd.DataFrame, steps: int, by: list[str]) -> pd.DataFrame:
    """Acceptance by draft position, pooled over the requests of each group of `by`: one row per group and position.

    `unconditional` = accepted_k / offered_k, the share of steps that got as far as k; `conditional` =
    accepted_k / accepted_{k-1} (V for k = 1), the share among those that got as far as k - 1; empty where nobody did.
    """
    sums = measured(ledger).groupby(by, sort=False)[count_columns(steps)].sum().astype(float)
    parts = []
    for k in range(1, steps + 1):
        before = sums.verifications if k == 1 else sums[f"accepted_{k - 1}"]
        offered, accepted = sums[f"offered_{k}"], sums[f"accepted_{k}"]
        parts.append(pd.DataFrame({"position": k, "offered": offered.astype(int), "accepted": accepted.astype(int),
                                   "unconditional": accepted / offered.where(offered > 0),
                                   "conditional": accepted / before.where(before > 0)}))  # fmt: skip
    table = pd.concat(parts).reset_index()
    return table.iloc[np.arange(len(table)).reshape(steps, -1).T.ravel()].reset_index(drop=True)
