"""Figure 2: aggregate bars, accepted length of every cell, and the differences. Drawn from the tables."""

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from osprey import rates, tables
from osprey.figures import COLOURS, colour, panels
from osprey.rates import OURS

AL_MAP = LinearSegmentedColormap.from_list("al", ["#ffffff", "#bcd3e8", "#2c6197"])
AHEAD_MAP = LinearSegmentedColormap.from_list("ahead", [COLOURS["eagle3-1l"], "#ffffff", "#6f9cc8"])


def bars(axes, data, rows: pd.DataFrame, bottom: float, form: str) -> None:
    """One group of bars per level of the index (group, recipe), one bar a recipe, with intervals and numbers."""
    axes.set_axis_on()
    groups, recipes = rows.index.unique(0), rows.index.unique(1)
    width = 0.84 / len(recipes)
    for number, recipe in enumerate(recipes):
        x_G = np.arange(len(groups)) + (number - (len(recipes) - 1) / 2) * width
        here = rows.xs(recipe, level=1)
        axes.bar(x_G, here.al - bottom, width * 0.92, bottom=bottom, color=colour(data.params, recipe), label=recipe)
        axes.vlines(x_G, here.low, here.high, color="white", linewidth=3)  # or the black line is lost on a dark bar
        axes.vlines(x_G, here.low, here.high, color="black", linewidth=1.2)
        for x, al, high in zip(x_G, here.al, here.high, strict=True):
            axes.annotate(form.format(al), (x, high), (0, 3), textcoords="offset points", ha="center", fontsize=7,
                          rotation=90 if len(groups) * len(recipes) > 12 else 0)  # fmt: skip
    top = max(rows.high.max(), bottom + 0.05)  # an axis needs some height even where nothing is ever accepted
    axes.set(xticks=range(len(groups)), xticklabels=groups, ylim=(bottom, bottom + (top - bottom) * 1.13))
    if len(groups) == 1:
        axes.set(xlim=(-1, 1), xticks=[])
    axes.grid(axis="x", visible=False)


def al_bars(axes, data, target: str, recipes: list[str], rate: str, title: str) -> None:
    """Mean AL over ID, OOD and all cells, from AL = 1, where no draft token is accepted."""
    table = data.tables["figure2_aggregate"]
    table = table[(table.target == target) & table.recipe.isin(recipes)]
    rows = table[(table.rate == rate) & (table.cells != "OOD/ID")].set_index(["cells", "recipe"])
    bars(axes, data, rows, 1, "{:.2f}")
    before = table[(table.distilled == "no") & (table.cells == "All")].set_index("recipe").al
    marks = [bar.get_x() + bar.get_width() / 2 for group in axes.containers for bar in group.patches[-1:]]
    axes.plot(marks, before[recipes], "D", color="white", markeredgecolor="black", markersize=4, clip_on=False,
              label="undistilled (All)")  # fmt: skip
    axes.set(ylabel="mean AL", title=title)


def ratio_bars(axes, data, target: str, recipes: list[str]) -> None:
    """OOD/ID, at both kinds of rate where they are different runs."""
    table = data.tables["figure2_aggregate"]
    table = table[(table.target == target) & table.recipe.isin(recipes) & (table.cells == "OOD/ID")]
    if table.empty:
        return
    names = {"own": "own rates", "common": f"common rate {rates.common(data.params, target) or 0:g}"}
    groups = table.rate.map(names) if table.rate.nunique() > 1 else ""
    bars(axes, data, table.assign(group=groups).set_index(["group", "recipe"]), 0, "{:.3f}")
    axes.set(ylabel="ratio of mean AL", title="OOD/ID")


def matrix(axes, title: str, table: pd.DataFrame, marks: pd.DataFrame, colours, norm, form: str) -> None:
    """Numbers on coloured cells, adaptation domains down, evaluation domains across; bold in domain."""
    axes.set_axis_on()
    axes.imshow(table, cmap=colours, norm=norm, aspect="auto")
    axes.set_xticks([])
    axes.set_yticks(range(table.shape[0]), table.index)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for (r, c), value in np.ndenumerate(table.to_numpy()):
        red, green, blue, _ = colours(norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.48
        text = form.format(value).replace("-", "−") + ("*" if marks.iloc[r, c] else "")
        axes.text(c, r, text, ha="center", va="center", color="white" if dark else "black", fontsize=8,
                  fontweight="bold" if table.index[r] == table.columns[c] else "normal")  # fmt: skip
    axes.set(ylabel="adapted on", title=title)


def name_columns(axes, domains: list[str]) -> None:
    """Under the lowest matrix of each column."""
    axes.set_xticks(range(len(domains)), domains, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_xlabel("evaluated on")


def square(cells: pd.DataFrame, column: str, domains: list[str]) -> pd.DataFrame:
    """A column of one recipe's cells as adaptation x evaluation domains, both in the order of params.yaml."""
    wide = cells.pivot(index="adaptation", columns="evaluation", values=column).astype(float)
    return wide.reindex(index=[domain for domain in domains if domain in wide.index], columns=domains)


def difference(axes, title: str, cells: pd.DataFrame, columns: list[str], domains: list[str], largest: float) -> None:
    """A matrix of differences (estimate, low, high); an asterisk where the interval excludes 0."""
    table, low, high = (square(cells, column, domains) for column in columns)
    matrix(axes, title, table, (low > 0) | (high < 0), AHEAD_MAP, TwoSlopeNorm(0, -largest, largest), "{:+.2f}")


def draw(data) -> Figure:
    """Per target, a row a recipe: the aggregates at the left, every cell, and beside it OURS minus the baseline.

    Beside OURS, what distillation added; further recipes have no difference.
    """
    params, domains = data.params, list(data.params.domains)
    cells = data.tables["figure2"]
    cells = cells[cells.in_figure == "yes"]
    shown = {target: list(here.recipe.unique()) for target, here in cells.groupby("target", sort=False)}
    separate = {target: "common" in rates.sets(params, target) for target in shown}
    down = {target: max(len(recipes), 2 + separate[target]) for target, recipes in shown.items()}
    cells_wide = max(len(domains), 4)
    figure, axes_RC = panels(sum(down.values()), 3, 1.2 + 0.5 * cells_wide, 0.9 + 0.35 * cells_wide)
    rows = iter(axes_RC)
    for target, recipes in shown.items():
        block = [next(rows) for _ in range(down[target])]
        where = f", {target}" if len(shown) > 1 else ""
        left = iter(block)
        al_bars(next(left)[0], data, target, recipes, "own",
                f"{target}: own rates" if separate[target] else target)  # fmt: skip
        if separate[target]:
            title = f"{target}: all at rate {rates.common(params, target):g}"
            al_bars(next(left)[0], data, target, recipes, "common", title)
        ratio_bars(next(left)[0], data, target, recipes)
        here = cells[cells.target == target]
        scale = Normalize(1, max(1.05, here.al.max()))  # one for all of the target's matrices
        baselines = rates.baselines(params, target) if OURS in recipes else []
        columns_of = dict.fromkeys(baselines, tables.MINUS) | {OURS: tables.GAIN}
        for recipe, axes_C in zip(recipes, block, strict=False):
            mine = here[here.recipe == recipe]
            table = square(mine, "al", domains)
            matrix(axes_C[1], recipe + where, table, table < 0, AL_MAP, scale, "{:.2f}")
            drawn = [axes_C[1]]
            if recipe in columns_of:
                columns, name = columns_of[recipe], "undistilled" if recipe == OURS else recipe
                others = here[here.recipe.isin([r for r in columns_of if columns_of[r] == columns])]
                largest = max(others[columns[0]].abs().max(), 0.01)  # one scale for all baselines
                difference(axes_C[2], f"{OURS} − {name}{where}", mine, columns, domains, largest)
                drawn.append(axes_C[2])
            for axes in drawn if recipe == recipes[-1] else []:
                name_columns(axes, domains)
        free = next(left, [None])[0]
    handles = [handle for axes in axes_RC[:1, 0] for handle in (*axes.containers, *axes.lines)]
    if free is not None and len(shown) == 1:
        free.legend(handles=handles, loc="center left", fontsize=9)
    else:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return figure
