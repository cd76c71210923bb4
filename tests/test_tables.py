"""Figure 2's tables, learning rates, sizes and agreement against slow loops over the ledgers' lines."""

import numpy as np
import pandas as pd
import pytest
from synthetic import DOMAINS, al, lines, load, made, preset, second_rate, tabled

from osprey import captions, claims, rates, report, stats
from osprey.params import UserError

LATER = "-0_001"  # the second run of a name, at the rate that the others have from the start


@pytest.fixture(scope="module")
def two_rates(tmp_path_factory):
    """osprey at 5e-4 and again at 1e-3, which the EAGLE-3 recipes have: one target, three domains."""
    root = tmp_path_factory.mktemp("tables")
    p = made(root, second_rate(preset(targets=("small",)), 1e-3))
    return p, root, tabled(p, root)


def name(recipe: str, adaptation: str, rate: str = "own") -> str:
    later = LATER if (recipe, rate) == ("osprey", "common") else ""
    return "undistilled" if adaptation == "none" else f"small-{recipe}-{adaptation}{later}"


def test_every_cell(two_rates):
    p, root, data = two_rates
    table = data.tables["figure2"]
    assert list(table.rate.value_counts().loc[["own", "common", ""]]) == [27, 27, 9] and len(table) == 63
    paper = pd.concat([pd.read_csv(root / "data/paper/table12.csv").query("lr == 1e-4"),
                       pd.read_csv(root / "data/paper/table6.csv").query("recipe == 'eagle3-2l'")])  # fmt: skip
    for row in table.itertuples():
        assert row.run == name(row.recipe, row.adaptation, row.rate)
        assert row.lr == {"": "", "own": "0.0005" if row.recipe == "osprey" else "0.001", "common": "0.001"}[row.rate]
        mine = al(root, "small", row.recipe, row.run, row.evaluation)
        assert row.al == pytest.approx(mine)
        assert row.low < row.al < row.high and (row.requests, row.dropped) == (23, 1)
        same = paper[(paper.recipe == row.recipe) & (paper.adaptation == row.adaptation)
                     & (paper.evaluation == row.evaluation)].al  # fmt: skip
        assert len(same) == (row.adaptation != "none")
        assert row.paper_qwen3_8b == pytest.approx(same.iloc[0] if len(same) else np.nan, nan_ok=True)
        if row.recipe == "osprey":
            assert pd.isna(row.osprey_minus_this)
        else:
            ours = al(root, "small", "osprey", name("osprey", row.adaptation, row.rate), row.evaluation)
            assert row.osprey_minus_this == pytest.approx(ours - mine)
            assert row.minus_low < row.osprey_minus_this < row.minus_high
        if row.adaptation == "none":
            assert pd.isna(row.gain)
        else:
            assert row.gain == pytest.approx(mine - al(root, "small", row.recipe, "undistilled", row.evaluation))
        assert (row.in_figure == "yes") == (row.rate == "own")


def test_aggregates_and_their_paired_intervals(two_rates):
    """Means, differences and gains of the sample and of every resample, written out."""
    p, root, data = two_rates
    table = data.tables["figure2_aggregate"].set_index(["recipe", "rate", "cells"])
    values = {}  # (recipe, run, evaluation) -> AL of every request
    for recipe in p.recipes:
        for row in lines(root, "small", recipe):
            if int(row["verifications"]):
                of_cell = values.setdefault((recipe, row["run"], row["evaluation"]), [])
                of_cell.append((int(row["tokens"]) - 1) / int(row["verifications"]))
    draws = {d: stats.resample(23, 300, p.seed, f"small/{d}") for d in p.domains}

    def means(recipe, rate, drawn):
        """ID, OOD, All and OOD/ID of resample number `drawn`, and ID, OOD, All of the undistilled on the same cells."""
        found = {}
        for start in (False, True):
            cells = {"ID": [], "OOD": []}
            for a in p.domains:
                for e in p.domains:
                    run = "undistilled" if start else name(recipe, a, rate)
                    counts = draws[e][drawn]
                    total = sum(count * value for count, value in zip(counts, values[recipe, run, e]))
                    cells["ID" if a == e else "OOD"].append(total / 23)
            inside, outside = (sum(cells[kind]) / len(cells[kind]) for kind in ("ID", "OOD"))
            found |= {(start, "ID"): inside, (start, "OOD"): outside, (start, "OOD/ID"): outside / inside,
                      (start, "All"): (sum(cells["ID"]) + sum(cells["OOD"])) / 9}  # fmt: skip
        return found

    for rate in ("own", "common"):
        drawn = {recipe: [means(recipe, rate, b) for b in range(301)] for recipe in ("osprey", "eagle3-2l")}
        for recipe in drawn:
            for cells in ("ID", "OOD", "All", "OOD/ID"):
                row = table.loc[recipe, rate, cells]
                mine = np.array([of[False, cells] for of in drawn[recipe]])
                assert [row.al, row.low, row.high] == pytest.approx([mine[0], *np.percentile(mine[1:], [2.5, 97.5])])
                gain = mine - [of[True, cells] for of in drawn[recipe]]
                expected = [gain[0], *np.percentile(gain[1:], [2.5, 97.5])] if cells != "OOD/ID" else [np.nan] * 3
                assert [row.gain, row.gain_low, row.gain_high] == pytest.approx(expected, nan_ok=True)
                if recipe != "osprey":
                    lead = np.array([of[False, cells] for of in drawn["osprey"]]) - mine
                    assert [row.osprey_minus_this, row.minus_low, row.minus_high] == pytest.approx(
                        [lead[0], *np.percentile(lead[1:], [2.5, 97.5])]
                    )
    assert table.paper_qwen3_8b["osprey", "own", "ID"] == 4.465 and pd.isna(
        table.paper_qwen3_8b["eagle3-2l", "own", "ID"]
    )
    assert table.lr["osprey", "common", "ID"] == "0.001" and table.lr["osprey", "own", "ID"] == "0.0005"
    before = [al(root, "small", "osprey", "undistilled", d) for d in p.domains]
    assert table.al["osprey", "", "All"] == pytest.approx(sum(before) / 3)


def test_table_6_is_over_its_own_domains(tmp_path):
    """commonsense is not among them; the paper's means are over the same cells."""
    p = made(tmp_path, preset(("chat", "commonsense", "math"), ("small",)), requests=6)
    table = tabled(p, tmp_path).tables["table6"].set_index(["recipe", "cells"])
    cells = {(a, e): [al(tmp_path, "small", r, f"small-{r}-{a}", e) for r in ("osprey", "eagle3-2l")]
             for a in ("chat", "math") for e in ("chat", "math")}  # fmt: skip
    ours, theirs = (sum(pair[side] for pair in cells.values()) / 4 for side in (0, 1))
    row = table.loc["eagle3-2l", "All"]
    assert (row.al, row.osprey_minus_this) == pytest.approx((theirs, ours - theirs))
    paper = {"osprey": (4.335, 4.057, 3.109, 5.253), "eagle3-2l": (3.661, 3.553, 2.634, 5.160)}  # fmt: skip
    assert row.paper_qwen3_8b == pytest.approx(sum(paper["eagle3-2l"]) / 4)
    assert row.paper_osprey_minus_this == pytest.approx((sum(paper["osprey"]) - sum(paper["eagle3-2l"])) / 4)
    assert table.paper_qwen3_8b["eagle3-2l", "ID"] == pytest.approx((3.661 + 5.160) / 2)


def test_table_6_without_its_domains_is_empty(tmp_path):
    data = tabled(made(tmp_path, preset(("poems",), ("small",)), requests=6), tmp_path)
    assert data.tables["table6"].empty and "covers" in captions.table6(data)


def test_table_11(two_rates):
    table = two_rates[2].tables["table11"].set_index("recipe")
    assert list(table.columns[1:7]) == ["layers", "width", "body", "embedding", "head", "total"]
    # two layers of 4 x 8 + 4, fc of 4 x 12; 20 and 8 rows of 4; a final norm of 4; nothing for t2d and d2t
    assert list(table.loc["osprey"])[1:8] == [2, 4, 120, 80, 32, 236, 236]
    assert list(table.loc["eagle3-1l"])[1:8] == [1, 4, 84, 80, 32, 200, 120]
    assert list(table.paper_body_millions) == [265, 269, 487]
    text = captions.bodies(two_rates[2])
    assert "osprey 120, eagle3-1l 84, eagle3-2l 120." in text and text.endswith("eagle3-2l is the size-matched row.")
    assert "eagle3-1l on small 0.70 (the paper's 1.02), eagle3-2l on small 1.00 (the paper's 1.84)" in captions.table11(
        two_rates[2]
    )


# Learning rates


def test_which_rates_are_shown(tmp_path):
    """Own and common where they differ, one set where they do not, own alone where no rate is common."""
    apart = load(preset(targets=("small",)), tmp_path)
    assert rates.common(apart, "small") is None and set(rates.sets(apart, "small")) == {"own"}
    same = load(preset(targets=("small",), rates=(1e-3, 1e-3)), tmp_path)
    assert rates.common(same, "small") == 1e-3 and set(rates.sets(same, "small")) == {"own"}
    both = load(second_rate(preset(targets=("small",)), 1e-3), tmp_path)
    assert rates.common(both, "small") == 1e-3
    sets = rates.sets(both, "small")
    assert sets["own"]["osprey"]["math"] == "small-osprey-math"
    assert sets["common"]["osprey"]["math"] == "small-osprey-math" + LATER
    assert sets["common"]["eagle3-1l"] == sets["own"]["eagle3-1l"]
    content = second_rate(preset(targets=("small",)), 1e-3)
    del content["runs"]["small-osprey-math" + LATER]  # no longer on every domain
    assert set(rates.sets(load(content, tmp_path), "small")) == {"own"}
    three = second_rate(second_rate(preset(targets=("small",)), 5e-4), 2e-3)  # 5e-4 and 2e-3 on all
    assert rates.common(load(three, tmp_path), "small") == 5e-4


def test_captions_say_which_rates_are_shown(two_rates, tmp_path):
    text = captions.learning_rates_of(two_rates[2])
    assert text == ("Learning rates on small: own osprey 0.0005, eagle3-1l 0.001, eagle3-2l 0.001; "
                    "the common one is 0.001.")  # fmt: skip
    data = tabled(made(tmp_path, preset(("math",), ("small",), rates=(1e-3, 1e-3)), requests=6), tmp_path)
    assert captions.learning_rates_of(data) == (
        "On small all recipes' own learning rates are the same, 0.001, so there is one set."
    )
    assert set(data.tables["figure2_aggregate"].rate) == {"", "own"}
    data.params = load(preset(("math",), ("small",)), tmp_path)
    assert captions.learning_rates_of(data).endswith("no rate is common to all.")


def test_learning_rates(two_rates):
    p, root, data = two_rates
    table = data.tables["learning_rates"].set_index(["recipe", "lr"])
    assert list(table.index) == [
        ("osprey", "0.0005"),
        ("osprey", "0.001"),
        ("eagle3-1l", "0.001"),
        ("eagle3-2l", "0.001"),
    ]
    later = {(a, e): al(root, "small", "osprey", f"small-osprey-{a}{LATER}", e) for a in p.domains for e in p.domains}
    row = table.loc["osprey", "0.001"]
    assert row.ID == pytest.approx(sum(later[d, d] for d in p.domains) / 3)
    assert row.All == pytest.approx(sum(later.values()) / 9) and row.adaptations == 3
    assert row.OOD_low < row.OOD < row.OOD_high
    best = max(("0.0005", "0.001"), key=lambda lr: table.ID["osprey", lr])
    assert [table.best["osprey", lr] == "yes" for lr in ("0.0005", "0.001")] == [
        lr == best for lr in ("0.0005", "0.001")
    ]
    assert table.edge["osprey", best] == "yes"  # of two rates, either is
    assert table.best["eagle3-1l", "0.001"] == "yes" and table.edge["eagle3-1l", "0.001"] == ""


@pytest.mark.parametrize("best, edge", [(2e-4, "yes"), (5e-4, "no"), (1e-3, "yes")])
def test_the_best_rate_and_the_edge(tmp_path, best, edge):
    """Of three rates; a fourth on one domain only does not compete, however good."""
    content = preset(("chat", "math"), ("small",), ("osprey",))
    content["runs"] = {f"{lr:g}-{d}".replace(".", "_"): {"target": "small", "recipe": "osprey", "domain": d, "lr": lr}
                       for lr in (2e-4, 5e-4, 1e-3) for d in ("chat", "math")}  # fmt: skip
    content["runs"]["narrow"] = {"target": "small", "recipe": "osprey", "domain": "math", "lr": 2e-3}
    p = load(content, tmp_path)
    al_of = {lr: 2.0 if lr == best else 1.5 for lr in (2e-4, 5e-4, 1e-3)} | {2e-3: 9.0}
    cells = {("small", "osprey", run, d): np.full(4, al_of[spec.lr]) for run, spec in p.runs.items() for d in p.domains}
    table = rates.learning_rates(type("Data", (), {"params": p, "cells": cells})).set_index("lr")
    assert list(table.index[table.best == "yes"]) == [f"{best:g}"]
    assert list(table.edge[table.best == "yes"]) == [edge] and (table.edge[table.best != "yes"] == "").all()
    assert table.adaptations["0.002"] == 1


def test_a_sweep_is_shown_and_compared(tmp_path):
    """The table of one run, committed as another's data/sweep: the same bytes again, and an honest sentence."""
    content = second_rate(preset(("chat", "math"), ("small",)), 1e-3)
    content["evaluate"]["split"] = "validation"
    content["rollouts"]["prompts"] = {"adaptation": 8, "validation": 8}
    for folder in ("sweep", "run"):
        (tmp_path / folder).mkdir()
    swept = made(tmp_path / "sweep", content, requests=6)
    data = tabled(swept, tmp_path / "sweep")
    assert data.tables["sweep"].empty and "is a sweep itself" in captions.sweep(data)
    assert "On validation prompts the best rates are osprey on small" in captions.learning_rates(data)
    best = data.tables["learning_rates"].query("recipe == 'osprey' and best == 'yes'").lr.item()

    p = made(tmp_path / "run", preset(("chat", "math"), ("small",)), requests=6)
    data = tabled(p, tmp_path / "run")
    assert list(data.tables["sweep"].columns) == list(data.tables["learning_rates"].columns)
    assert data.tables["sweep"].empty and "No sweep was made" in captions.sweep(data)
    committed = tmp_path / "run/data/sweep/small.csv"
    committed.parent.mkdir()
    report.render(swept, tmp_path / "swept", tmp_path / "sweep")
    committed.write_bytes((tmp_path / "swept/tables/learning_rates.csv").read_bytes())
    report.render(p, root=tmp_path / "run")
    assert (tmp_path / "run/results/tables/sweep.csv").read_bytes() == committed.read_bytes()
    text = (tmp_path / "run/results/tables/sweep.md").read_text()
    if best == "0.0005":
        assert "rates that are the sweep's best: osprey 0.0005, eagle3-1l 0.001, eagle3-2l 0.001." in text
    else:
        assert "Not the best: osprey uses 0.0005, its best is 0.001." in text
    assert "Best at the edge of its grid: osprey." in text
    committed.write_text(committed.read_text().replace(",yes,yes", ",,"))  # swap the best rate of osprey's two
    rows = pd.read_csv(committed)
    rows.loc[(rows.recipe == "osprey") & (rows.lr != float(best)), "best"] = "yes"
    rows.to_csv(committed, index=False)
    other = captions.sweep(tabled(p, tmp_path / "run"))
    assert ("Not the best: osprey uses 0.0005, its best is 0.001." in other) == (best == "0.0005")
    assert "Best at the edge of its grid: none." in other
    committed.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="data/sweep/small.csv: not a sweep of small; copy "):
        tabled(p, tmp_path / "run")


# Agreement


def test_agreement(two_rates):
    p, root, data = two_rates
    table = data.tables["agreement"].set_index("evaluation")
    header, *rest = (root / "data/agreement/small.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","))) for line in rest]
    for evaluation in (*p.domains, "all"):
        here = [row for row in rows if evaluation in (row["evaluation"], "all")]
        steps, equal = (sum(int(row[key]) for row in here) for key in ("steps", "equal"))
        whole = [int(row["common"]) == int(row["tokens"]) == int(row["decoded_tokens"]) for row in here]
        decoded, replayed = (
            [(int(row[f"{kind}_tokens"]) - 1) / int(row[f"{kind}_verifications"]) for row in here]
            for kind in ("decoded", "replayed")
        )
        row = table.loc[evaluation]
        assert (row.requests, row.steps) == (len(here), steps) and len(here) == (12 if evaluation == "all" else 4)
        assert row.disagreeing == pytest.approx(1 - equal / steps)
        assert row.same_tokens == pytest.approx(sum(whole) / len(here))
        assert row.difference == pytest.approx((sum(decoded) - sum(replayed)) / len(here))
    row = table.loc["all"]
    assert f"On small: {row.disagreeing:.2%} of {row.steps} steps" in captions.agreement(data)


def test_agreement_of_responses_that_part_at_once(tmp_path):
    p = made(tmp_path, preset(("math",), ("small",)), requests=6)
    path = tmp_path / "data/agreement/small.csv"
    pd.read_csv(path).assign(steps=0, equal=0, common=0).to_csv(path, index=False)
    data = tabled(p, tmp_path)
    assert data.tables["agreement"].disagreeing.isna().all()
    assert "no step could be compared; 0% of 4 requests" in captions.agreement(data)
    assert "disagreement" not in report.metrics(data)["small"]


def test_headline_metrics(two_rates):
    p, root, data = two_rates
    headline = report.metrics(data)["small"]
    table = data.tables["figure2_aggregate"].set_index(["recipe", "rate", "cells"])
    assert headline["osprey"]["ID-gain"] == round(table.gain["osprey", "own", "ID"], 4)
    cells = data.tables["figure2"].query("recipe == 'eagle3-2l' and rate == 'own'")
    assert headline["osprey-minus-eagle3-2l"] == {
        kind: round(table.osprey_minus_this["eagle3-2l", "own", kind], 4) for kind in ("ID", "OOD", "All", "OOD/ID")
    } | {"cells": 9, "ahead": sum(cells.osprey_minus_this > 0), "interval-above-0": sum(cells.minus_low > 0)}
    covered = pd.concat(pd.read_csv(root / f"data/converted/small-{r}/coverage.csv") for r in p.recipes)
    assert headline["coverage-min"] == round(covered[covered.split == "held-out"].covered.min(), 4)
    agreed = pd.read_csv(root / "data/agreement/small.csv")
    assert headline["disagreement"] == pytest.approx(1 - agreed.equal.sum() / agreed.steps.sum(), abs=1e-6)


def test_claims_follow_the_intervals(two_rates):
    data = two_rates[2]
    row = data.tables["figure2_aggregate"].query("recipe == 'eagle3-1l' and rate == 'own' and cells == 'OOD/ID'").index
    for low, high, word in ((0.01, 0.03, "holds"), (-0.03, -0.01, "does not hold"), (-0.01, 0.03, "is open")):
        table = data.tables["figure2_aggregate"].copy()
        table.loc[row, ["osprey_minus_this", "minus_low", "minus_high"]] = (0.02, low, high)
        changed = type("Data", (), {"params": data.params, "tables": {"figure2_aggregate": table}})
        text = claims.aggregates(changed)
        assert f"higher OOD/ID {word} (+0.020 [{low:+.3f}, {high:+.3f}])" in text.split("common rate")[0]


def test_the_full_grid_has_25_cells_a_pair(tmp_path):
    data = tabled(made(tmp_path, preset(DOMAINS, ("small",)), requests=6), tmp_path)
    for baseline in ("eagle3-1l", "eagle3-2l"):
        rows = data.tables["figure2"].query(f"recipe == '{baseline}' and in_figure == 'yes'")
        assert rows.osprey_minus_this.notna().sum() == 25
        assert f"is ahead of {baseline} in {sum(rows.osprey_minus_this > 0)} of 25 cells" in claims.cells(data)
