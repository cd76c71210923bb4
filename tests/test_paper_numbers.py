"""data/paper against what the paper prints elsewhere: its means, its counts."""

import pandas as pd
import pytest
from walk import ROOT

from osprey import sizes


def test_table_12_and_figure_2():
    """The rows of Table 12 against the Mean and OOD columns that it prints, and against Figure 2's aggregates."""
    cells = pd.read_csv(ROOT / "data/paper/table12.csv")
    assert len(cells) == 100
    printed = {
        (1e-05, "osprey"): "3.639 3.506 3.714 3.687 3.316 3.116 3.779 3.693 3.440 3.032",
        (1e-05, "eagle3-1l"): "1.601 1.597 2.534 2.393 1.938 1.766 2.052 2.031 2.428 1.819",
        (1e-04, "osprey"): "3.850 3.729 3.847 3.773 3.401 3.186 3.966 3.874 3.373 2.903",
        (1e-04, "eagle3-1l"): "3.309 3.198 3.478 3.402 2.896 2.690 3.272 3.205 2.924 2.391",
    }
    for (lr, recipe), numbers in printed.items():
        numbers = iter(map(float, numbers.split()))
        for adaptation in ("chat", "code", "commonsense", "finance", "math"):
            row = cells[(cells.lr == lr) & (cells.recipe == recipe) & (cells.adaptation == adaptation)]
            assert row.al.mean() == pytest.approx(next(numbers), abs=0.0011)
            assert row[row.evaluation != adaptation].al.mean() == pytest.approx(next(numbers), abs=0.0011)
    for recipe, rows in pd.read_csv(ROOT / "data/paper/figure2.csv").groupby("recipe"):
        grid = cells[(cells.lr == 1e-4) & (cells.recipe == recipe)]
        own = grid.adaptation == grid.evaluation
        inside, outside = grid[own].al.mean(), grid[~own].al.mean()
        expected = {"ID": inside, "OOD": outside, "All": grid.al.mean(), "OOD/ID": outside / inside}
        for row in rows.itertuples():  # Osprey's mean over all cells is printed 3.686; its cells give 3.6873
            assert row.al == pytest.approx(expected[row.cells], abs=0.0015)


def test_table_6():
    """Its means as printed, AL and TPS; and what it shares with Table 12 is the same there."""
    table = pd.read_csv(ROOT / "data/paper/table6.csv")
    printed = {
        "eagle3-1l": (4.034, 402, 3.043, 309, 3.291, 332), "eagle3-2l": (4.124, 373, 3.139, 290, 3.385, 311),
        "osprey": (4.517, 406, 3.547, 322, 3.790, 343),
    }  # fmt: skip
    assert len(table) == 48 and set(table.recipe) == set(printed)
    for recipe, numbers in printed.items():
        rows = table[table.recipe == recipe]
        own = rows.adaptation == rows.evaluation
        found = [mean for some in (rows[own], rows[~own], rows) for mean in (some.al.mean(), some.tps.mean())]
        assert found[::2] == pytest.approx(numbers[::2], abs=0.00051)
        assert found[1::2] == pytest.approx(numbers[1::2], abs=0.51)
    other = pd.read_csv(ROOT / "data/paper/table12.csv").query("lr == 1e-4")
    both = table.merge(other, on=["recipe", "adaptation", "evaluation"])
    assert len(both) == 32 and (both.al_x == both.al_y).all()


def drafter(
    layers: int, width: int, heads: int, kv_heads: int, head: int, inner: int, taps: int, norms: bool, wide: int
):
    """The shapes of a drafter's body; `wide` layers read both streams."""
    found = {"fc.weight": (width, 3 * taps)}
    for layer in range(layers):
        read, queries, keys = width * (2 if layer < wide else 1), heads * head, kv_heads * head
        parts = {
            "self_attn.q_proj": (queries, read), "self_attn.k_proj": (keys, read), "self_attn.v_proj": (keys, read),
            "self_attn.o_proj": (width, queries), "mlp.up_proj": (inner, width), "mlp.gate_proj": (inner, width),
            "mlp.down_proj": (width, inner), "input_layernorm": (width,), "hidden_norm": (width,),
            "post_attention_layernorm": (width,),
        }  # fmt: skip
        if norms:
            parts |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        found |= {f"layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return found


def test_table_11_by_our_count():
    """Our way of counting, on the shapes of the paper's drafters (Qwen3-8B's taps are 4,096 wide), gives its numbers.

    Its 269 M is 268.5 M rounded up, and its 487 M needs every layer to read both streams, where stock multi-layer
    EAGLE-3 has only the first one do so (osprey/drafter.py).
    """
    qwen3_4b, qwen3_8b = (2560, 32, 8, 128, 9728, 4096, True), (4096, 32, 8, 128, 12288, 4096, True)
    shapes = {
        "osprey": drafter(2, *qwen3_4b, wide=2), "eagle3-1l": drafter(1, *qwen3_8b, wide=1),
        "eagle3-2l": drafter(2, *qwen3_8b, wide=2),
        "layerskip": drafter(4, 2048, 32, 8, 64, 8192, 4096, False, wide=4),
    }  # fmt: skip
    table = pd.read_csv(ROOT / "data/paper/table11.csv").set_index("recipe")
    assert set(table.index) == set(shapes)
    for recipe, found in shapes.items():
        counted = sizes.parameters(found)
        assert (counted["layers"], counted["width"]) == tuple(table.loc[recipe, ["layers", "width"]])
        assert counted["body"] / 1e6 == pytest.approx(table.body_millions[recipe], abs=0.56)
    stock = sizes.parameters(drafter(2, *qwen3_8b, wide=1))["body"] / 1e6
    assert abs(stock - table.body_millions["eagle3-2l"]) > 20
