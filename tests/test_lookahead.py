"""Acceptance by position as bootstrapped quantities, and OURS against the baselines, against slow loops."""

import numpy as np
import pandas as pd
import pytest
from synthetic import lines, made, preset, tabled
from test_stats import CELLS, STEPS, simulated

from osprey import captions, claims, report, stats


def test_drawn_acceptances_count_the_steps_of_the_drawn_requests():
    ledger, traces = simulated(CELLS)
    counts = stats.cell_counts(ledger, STEPS, 30, 7)
    assert set(counts) == set(CELLS)
    for cell in CELLS:
        unconditional, conditional = stats.acceptances(counts[cell])
        of = [trace for key, trace in traces.items() if key[:-1] == cell and trace]
        for drawn, times in enumerate(stats.resample(len(of), 30, 7, f"{cell[0]}/{cell[3]}")):
            steps = [step for trace, count in zip(of, times) for _ in range(count) for step in trace]
            for k in range(1, STEPS + 1):
                inside = [run for left, run in steps if left >= k]
                before = [run for _, run in steps if run >= k - 1]
                assert unconditional[drawn, k - 1] == pytest.approx(sum(run >= k for run in inside) / len(inside))
                if before:
                    assert conditional[drawn, k - 1] == pytest.approx(sum(run >= k for run in before) / len(before))
                else:
                    assert np.isnan(conditional[drawn, k - 1])


def test_the_sample_itself_is_the_acceptance_table():
    ledger, _ = simulated(CELLS)
    table = stats.acceptance(ledger, STEPS, stats.CELL).set_index(stats.CELL)
    for cell, counts in stats.cell_counts(ledger, STEPS, 2, 1).items():
        unconditional, conditional = stats.acceptances(counts)
        assert unconditional[0] == pytest.approx(table.loc[cell].unconditional.to_numpy(), nan_ok=True)
        assert conditional[0] == pytest.approx(table.loc[cell].conditional.to_numpy(), nan_ok=True)


def test_undefined_resamples_are_beyond_both_ends():
    drawn = np.r_[0.5, np.linspace(0, 1, 1000)]
    assert stats.estimate(drawn) == pytest.approx((0.5, 0.025, 0.975))
    few, many = drawn.copy(), drawn.copy()
    few[1 + np.arange(0, 1000, 100)] = np.nan  # 1 %: the ends move outwards
    value, low, high = stats.estimate(few)
    assert 0.01 < low < 0.022 and 0.978 < high < 0.99
    many[1 + np.arange(0, 1000, 20)] = np.nan  # 5 %: no end is known
    assert np.isnan(stats.estimate(many)[1:]).all() and stats.estimate(many)[0] == 0.5
    unbounded = drawn.copy()
    unbounded[900:] = np.inf
    assert np.isnan(stats.estimate(unbounded)[2]) and stats.estimate(unbounded)[1] == pytest.approx(0.025)


@pytest.fixture(scope="module")
def gain(tmp_path_factory):
    root = tmp_path_factory.mktemp("gain")
    p = made(root, preset(("chat", "math"), ("small",)), requests=16)
    return p, root, tabled(p, root)


def test_the_gain_over_each_baseline(gain):
    """Every value and interval from the ledgers' lines: pooled over cells, the same draws for both recipes."""
    p, root, data = gain
    table = data.tables["acceptance_gain"].set_index(["baseline", "cells", "measure", "position"])
    assert len(table) == 2 * 3 * 3 * STEPS
    draws = {d: stats.resample(15, 300, p.seed, f"small/{d}") for d in p.domains}  # request 0 has one token
    rows = {r: [row for row in lines(root, "small", r) if int(row["verifications"])] for r in p.recipes}

    def shares(recipe, kind, drawn, k):
        total = {"offered": 0, "accepted": 0, "before": 0}
        for row in rows[recipe]:
            own = row["run"].endswith(row["evaluation"])
            if row["run"] != "undistilled" and kind in ("All", "ID" if own else "OOD"):
                times = draws[row["evaluation"]][drawn][int(row["request"]) - 1]
                total["offered"] += times * int(row[f"offered_{k}"])
                total["accepted"] += times * int(row[f"accepted_{k}"])
                total["before"] += times * int(row[f"accepted_{k - 1}" if k > 1 else "verifications"])
        return total["accepted"] / total["offered"], total["accepted"] / total["before"] if total["before"] else np.nan

    for kind, k in (("ID", 2), ("OOD", 3), ("All", 1), ("All", 2), ("All", 3)):
        ours, theirs = ([shares(recipe, kind, b, k) for b in range(301)] for recipe in ("osprey", "eagle3-2l"))
        found = {"unconditional": np.array([a[0] - b[0] for a, b in zip(ours, theirs)]),
                 "conditional": np.array([a[1] - b[1] for a, b in zip(ours, theirs)]),
                 "ratio": np.array([a[0] / b[0] for a, b in zip(ours, theirs)])}  # fmt: skip
        for measure, values in found.items():
            row = table.loc["eagle3-2l", kind, measure, k]
            assert not np.isnan(values).any()
            assert [row.gain, row.low, row.high] == pytest.approx([values[0], *np.percentile(values[1:], [2.5, 97.5])])
            if (kind, k) == ("All", 1):
                first = found
                assert pd.isna(row.change)
            if kind == "All" and k > 1:
                change = values - first[measure]
                expected = [change[0], *np.percentile(change[1:], [2.5, 97.5])]
                assert [row.change, row.change_low, row.change_high] == pytest.approx(expected)


def test_the_caption_says_whether_it_grows(gain):
    p, _, data = gain
    table = data.tables["acceptance_gain"]
    last = (table.baseline == "eagle3-1l") & (table.cells == "All") & (table.position == STEPS)
    words = {"it grows": (0.1, 0.3), "it shrinks": (-0.3, -0.1), "whether it grows is open": (-0.1, 0.2)}
    for word, (low, high) in words.items():
        changed = table.copy()
        changed.loc[last, ["gain", "change", "change_low", "change_high"]] = (0.5, 0.2, low, high)
        text = claims.lookahead(type("Data", (), {"params": p, "tables": {"acceptance_gain": changed}}))
        one = text.split("On small against eagle3-2l")[0]
        assert one.count(f"at {STEPS}: {word}") == 3 and one.count(f"[{low:+.3f}, {high:+.3f}]") == 3
    monotone = table.copy()
    here = (monotone.baseline == "eagle3-1l") & (monotone.cells == "All") & (monotone.measure == "ratio")
    monotone.loc[here, "gain"] = np.arange(1, STEPS + 1)
    monotone.loc[here & last, ["change", "change_low", "change_high"]] = (4, 3, 5)
    text = claims.lookahead(type("Data", (), {"params": p, "tables": {"acceptance_gain": monotone}}))
    assert "1.00 at position 1, 5.00 at 5: it grows with every position (change +4.000 [+3.000, +5.000])" in text


def test_the_acceptance_table_has_all_cells_too(gain):
    table = gain[2].tables["acceptance_aggregate"]
    sums = table.groupby(["recipe", "cells", "position"]).accepted.sum()
    for (recipe, cells, position), count in sums.items():
        if cells == "All":
            assert count == sums[recipe, "ID", position] + sums[recipe, "OOD", position]


@pytest.mark.filterwarnings("error")
def test_positions_that_nobody_reaches_are_empty(tmp_path):
    p = made(tmp_path, preset(("chat", "math"), ("small",)), requests=6, luck=0.0)
    report.render(p, root=tmp_path)
    table = pd.read_csv(tmp_path / "results/tables/acceptance_gain.csv")
    later = table[table.position > 1]
    assert later[later.measure == "conditional"].gain.isna().all() and table[table.measure == "ratio"].gain.isna().all()
    assert (table[table.measure == "unconditional"].gain == 0).all()
    assert "+0.000 at position 1, +0.000 at 5: whether it grows is open" in captions.acceptance_gain(
        tabled(p, tmp_path)
    )
