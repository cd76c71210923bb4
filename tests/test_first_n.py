"""AL of the first N prompts against a sample's, against slow loops over the ledgers' lines."""

import numpy as np
import pandas as pd
import pytest
from synthetic import al, lines, made, preset, tabled

from osprey import bias, captions, stats

FIRST = ("chat", "finance")  # math has no order of its own


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    p = made(root, preset(targets=("small",), recipes=("osprey", "eagle3-1l")), requests=16, first=FIRST)
    return p, root, tabled(p, root)


def test_both_sides_and_the_unpaired_interval(measured):
    p, root, data = measured
    table = data.tables["first_n"].set_index(["recipe", "distilled", "evaluation", "prompts"])
    assert len(table) == 2 * 2 * 3 * 2 and set(table.index.get_level_values(3)) == {8, 16}  # 32 are not there
    assert set(table.index.get_level_values(2)) == {*FIRST, "mean"}
    for recipe in p.recipes:
        for distilled in ("no", "yes"):
            for prompts in (8, 16):
                drawn = {}
                for domain in FIRST:
                    run = f"small-{recipe}-{domain}" if distilled == "yes" else "undistilled"
                    row = table.loc[recipe, distilled, domain, prompts]
                    sides = {side: al(root, "small", recipe, run, domain, split, prompts)
                             for side, split in (("first", "first"), ("sample", "held-out"))}  # fmt: skip
                    assert (row["first"], row["sample"]) == pytest.approx((sides["first"], sides["sample"]))
                    assert row.bias == pytest.approx(sides["first"] - sides["sample"])
                    drawn[domain] = [
                        np.array([np.dot(counts, values) / len(values) for counts in stats.resample(
                            len(values), 300, p.seed, f"small/{domain}/{side}/{prompts}")])
                        for side, values in of_requests(root, recipe, run, domain, prompts).items()
                    ]  # fmt: skip
                    apart = drawn[domain][0] - drawn[domain][1]
                    assert [row.low, row.high] == pytest.approx(list(np.percentile(apart[1:], [2.5, 97.5])))
                row = table.loc[recipe, distilled, "mean", prompts]
                together = sum(first - sample for first, sample in drawn.values()) / 2
                assert [row.bias, row.low, row.high] == pytest.approx(
                    [together[0], *np.percentile(together[1:], [2.5, 97.5])]
                )
                assert row.domains == 2


def of_requests(root, recipe, run, domain, prompts) -> dict:
    """side -> AL of every request that has one, among the first so many."""
    found = {"first": [], "sample": []}
    for row in lines(root, "small", recipe):
        if (
            (row["run"], row["evaluation"]) == (run, domain)
            and int(row["request"]) < prompts
            and int(row["verifications"])
        ):
            side = "first" if row["split"] == "first" else "sample"
            found[side].append((int(row["tokens"]) - 1) / int(row["verifications"]))
    return found


def test_other_tables_do_not_see_the_first_prompts(measured):
    p, root, data = measured
    cells = data.tables["figure2"].set_index(["recipe", "run", "evaluation"])
    assert cells.al["osprey", "small-osprey-chat", "chat"] == pytest.approx(
        al(root, "small", "osprey", "small-osprey-chat", "chat")
    )
    assert (cells.requests + cells.dropped == 16).all()


def test_the_caption_names_the_largest_bias(measured):
    data = measured[2]
    table = data.tables["first_n"]
    single = table[table.evaluation != "mean"]
    worst = max(single.itertuples(), key=lambda row: abs(row.bias))
    apart = sum((single.low > 0) | (single.high < 0))
    text = captions.first_n(data)
    assert f"The largest bias is {worst.bias:+.3f} [{worst.low:+.3f}, {worst.high:+.3f}] (small, {worst.recipe}" in text
    assert f"{apart} of {len(single)} intervals exclude 0" in text
    assert "commonsense AL is 4.70 at 32, 4.56 at 64, 4.34 at 512" in text


def test_a_real_bias_is_found(measured):
    """First prompts that are all twice as easy: every interval is above 0."""
    p, _, data = measured
    easier = data.first.assign(verifications=np.ceil(data.first.verifications / 2).astype(int))
    table = bias.first_n(type("Data", (), {"params": p, "first": easier, "ledger": data.ledger}))
    assert (table[table.prompts == 16].low > 0).all()


def test_no_first_prompts_no_rows(tmp_path):
    p = made(tmp_path, preset(("math",), ("small",)), requests=6)
    data = tabled(p, tmp_path)
    assert data.tables["first_n"].empty and "has no rollouts of first prompts" in captions.first_n(data)
    assert list(data.tables["first_n"].columns)[:4] == ["target", "recipe", "distilled", "evaluation"]
    assert pd.DataFrame.equals(data.first, data.first.head(0))
