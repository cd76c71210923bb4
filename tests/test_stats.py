"""The metric and its intervals against slow loops that share no code with them."""

import random

import numpy as np
import pandas as pd
import pytest

from osprey import stats
from osprey.params import UserError

STEPS = 5


def speculate(rng, chance: float, tokens: int) -> list[tuple[int, int]]:
    """One response of `tokens` tokens, step by step: (tokens left before the step, drafts accepted)."""
    left, trace = tokens - 1, []  # the prefill emits the first token
    while left > 0:
        run = 0
        while run < min(STEPS, left) and rng.random() < chance:
            run += 1
        trace.append((left, run))
        left -= min(run + 1, left)
    return trace


def ledger_row(trace: list[tuple[int, int]], tokens: int) -> dict:
    """What `evaluate` writes about such a response."""
    row = {"tokens": tokens, "verifications": len(trace), "accepted": sum(run for _, run in trace)}
    row |= {f"offered_{k}": sum(left >= k for left, _ in trace) for k in range(1, STEPS + 1)}
    return row | {f"accepted_{k}": sum(run >= k for _, run in trace) for k in range(1, STEPS + 1)}


def simulated(cells: dict, requests: int = 25) -> tuple[pd.DataFrame, dict]:
    """A ledger of {(target, recipe, run, evaluation): chance}, and the traces behind it by (*cell, request)."""
    rows, traces = [], {}
    for number, (cell, chance) in enumerate(cells.items()):
        rng = random.Random(number)
        for request in range(requests):
            tokens = 1 if request == 3 else 2 + (request * 7) % 40  # request 3 needs no verification
            trace = traces[*cell, request] = speculate(rng, chance, tokens)
            rows.append(dict(zip(stats.CELL, cell)) | {"request": request} | ledger_row(trace, tokens))
    return pd.DataFrame(rows), traces


CELLS = {("t", "osprey", "a", "math"): 0.6, ("t", "eagle3-1l", "b", "math"): 0.5, ("t", "osprey", "a", "chat"): 0.4,
         ("t", "eagle3-1l", "b", "chat"): 0.4, ("u", "osprey", "c", "math"): 0.7}  # fmt: skip


def lengths(traces: dict, cell: tuple) -> dict[int, float]:
    """request -> tokens emitted per verification step."""
    return {key[-1]: sum(min(run + 1, left) for left, run in trace) / len(trace)
            for key, trace in traces.items() if key[:-1] == cell and trace}  # fmt: skip


def test_requests_are_drawn_with_replacement():
    counts_BR = stats.resample(10, 2000, 3, "t/math")
    assert counts_BR.shape == (2001, 10)
    assert (counts_BR[0] == 1).all() and (counts_BR.sum(1) == 10).all()
    assert abs(counts_BR[1:].var() - 0.9) < 0.05  # binomial: n p (1 - p)
    assert (counts_BR == stats.resample(10, 2000, 3, "t/math")).all()
    assert (counts_BR[1:] != stats.resample(10, 2000, 4, "t/math")[1:]).any()
    assert (counts_BR[1:] != stats.resample(10, 2000, 3, "t/chat")[1:]).any()


def test_cell_means_are_the_means_of_the_drawn_requests():
    ledger, traces = simulated(CELLS)
    cells = stats.cell_means(ledger, 50, 7)
    assert set(cells) == set(CELLS)
    for cell in CELLS:
        al = lengths(traces, cell)
        assert 3 not in al
        assert cells[cell][0] == pytest.approx(sum(al.values()) / len(al))
        for drawn, counts in enumerate(stats.resample(len(al), 50, 7, f"{cell[0]}/{cell[3]}")):
            picked = [value for value, count in zip(al.values(), counts) for _ in range(count)]
            assert len(picked) == len(al)
            assert cells[cell][drawn] == pytest.approx(sum(picked) / len(picked))


def test_row_order_does_not_matter():
    ledger, _ = simulated(CELLS)
    shuffled = ledger.sample(frac=1, random_state=1)
    cells, again = stats.cell_means(ledger, 20, 7), stats.cell_means(shuffled, 20, 7)
    assert all((cells[cell] == again[cell]).all() for cell in CELLS)


def test_interval_agrees_with_a_bootstrap_written_out():
    ledger, traces = simulated(CELLS)
    cell = ("t", "osprey", "a", "math")
    values, rng = list(lengths(traces, cell).values()), random.Random(0)
    slow = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(20_000))
    mean, low, high = stats.estimate(stats.cell_means(ledger, 20_000, 1)[cell])
    assert mean == pytest.approx(sum(values) / len(values))
    assert low == pytest.approx(slow[500], abs=0.02)
    assert high == pytest.approx(slow[19_500], abs=0.02)


def test_differences_are_paired_by_request():
    """A constant lead over very uneven requests: the two intervals overlap, that of the difference is a point."""
    ease = np.linspace(1.5, 4, 20)

    def drafter(recipe, al):
        return pd.DataFrame(dict(target="t", recipe=recipe, run="a", evaluation="math", request=range(20), tokens=1001,
                                 verifications=1000 / al))  # fmt: skip

    cells = stats.cell_means(pd.concat([drafter("ahead", ease), drafter("behind", ease - 0.1)]), 500, 1)
    ahead, behind = cells["t", "ahead", "a", "math"], cells["t", "behind", "a", "math"]
    assert stats.estimate(ahead)[1] < stats.estimate(behind)[2]
    assert stats.estimate(ahead - behind) == pytest.approx((0.1, 0.1, 0.1))


def test_cells_with_the_same_requests_are_no_independent_evidence():
    """Five drafters that behave alike give the mean over them no narrower interval; five other prompt sets do."""
    one, _ = simulated({("t", "osprey", "a", "math"): 0.6})
    same = pd.concat([one.assign(run=str(copy)) for copy in range(5)])
    other = pd.concat([one.assign(evaluation=str(copy)) for copy in range(5)])

    def width(ledger):
        _, low, high = stats.estimate(np.mean(list(stats.cell_means(ledger, 4000, 1).values()), axis=0))
        return high - low

    assert width(same) == pytest.approx(width(one), rel=1e-9)
    assert width(other) == pytest.approx(width(one) / 5**0.5, rel=0.1)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """AL of 40 requests, skewed: the 95 % percentile interval should hold the true mean in 90 to 98 % of samples."""
    rng = np.random.default_rng(0)
    trials, requests, hits = 600, 40, 0
    for trial in range(trials):
        sample = 1 + rng.exponential(0.5, requests)
        _, low, high = stats.estimate(stats.resample(requests, 400, trial, "x") @ sample / requests)
        hits += low <= 1.5 <= high
    assert 0.90 < hits / trials < 0.98


def test_different_rollouts_are_refused():
    ledger, _ = simulated(CELLS)
    math = (ledger.target == "t") & (ledger.evaluation == "math")
    missing = ledger.drop(ledger[math & (ledger.run == "b")].index[-1])
    with pytest.raises(UserError, match="drafters of t answered different math rollouts"):
        stats.cell_means(missing, 10, 1)
    longer = ledger.copy()
    longer.loc[ledger[math & (ledger.run == "b")].index[-1], "tokens"] += 1
    with pytest.raises(UserError, match="drafters of t answered different math rollouts"):
        stats.cell_means(longer, 10, 1)


def test_conventions_count_as_they_say():
    ledger, traces = simulated(CELLS)
    table = stats.conventions(ledger).set_index(stats.CELL)
    for cell in CELLS:
        steps = {key[-1]: trace for key, trace in traces.items() if key[:-1] == cell and trace}
        emitted = {request: sum(min(run + 1, left) for left, run in trace) for request, trace in steps.items()}
        accepted = {request: sum(run for _, run in trace) for request, trace in steps.items()}
        v, n = {request: len(trace) for request, trace in steps.items()}, len(steps)
        row = table.loc[cell]
        assert row.al == pytest.approx(sum(emitted[r] / v[r] for r in steps) / n)
        assert row.with_prefill == pytest.approx(sum((emitted[r] + 1) / v[r] for r in steps) / n)
        assert row.pooled == pytest.approx(sum(emitted.values()) / sum(v.values()))
        assert row.vllm == pytest.approx(1 + sum(accepted.values()) / sum(v.values()))
        assert row.without_bonus == pytest.approx(sum(accepted[r] / v[r] for r in steps) / n)
        assert 1 <= row.al <= STEPS + 1 and row.al < row.with_prefill and row.pooled <= row.vllm


def test_acceptance_by_position_counts_steps():
    ledger, traces = simulated(CELLS)
    table = stats.acceptance(ledger, STEPS, stats.CELL)
    assert list(table.position) == list(range(1, STEPS + 1)) * len(CELLS)
    assert list(table.run[::STEPS]) == [cell[2] for cell in CELLS]  # groups in the ledger's order
    for row in table.itertuples():
        cell = (row.target, row.recipe, row.run, row.evaluation)
        steps = [step for key, trace in traces.items() if key[:-1] == cell for step in trace]
        reached = [run for left, run in steps if left >= row.position]
        before = [run for _, run in steps if run >= row.position - 1]
        assert row.offered == len(reached)
        assert row.unconditional == pytest.approx(sum(run >= row.position for run in reached) / len(reached))
        assert row.conditional == pytest.approx(sum(run >= row.position for run in before) / len(before))


def test_positions_nobody_reached_stay_empty():
    ledger, _ = simulated({("t", "osprey", "a", "math"): 0.0})
    table = stats.acceptance(ledger, STEPS, ["recipe"])
    assert list(table.unconditional) == [0] * STEPS
    assert table.conditional.iloc[0] == 0 and table.conditional.iloc[1:].isna().all()
