"""The pictures. They draw the tables and curves that `report.gather` collected and compute nothing.

A recipe has one colour everywhere; colours differ in lightness, so a grey print still tells them apart.
"""

from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from osprey.tables import BASELINE, OURS

COLOURS = {"osprey": "#14406b", "eagle3-2l": "#9c4a12", "osprey-short-pretrain": "#4384bd", "eagle3-1l": "#eb9a33",
           "osprey-no-pretrain": "#b5d5ef"}  # fmt: skip
SPARE = ["#5b3a78", "#8fbf8b", "#3f7d4e", "#c9a9dd", "#7f7f7f", "#d9d2c0"]  # recipes with other names, in their order
GREY = "#777777"
DASHES = ["-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1))]

STYLE = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8,
    "lines.linewidth": 1.5, "svg.hashsalt": "osprey",
}  # fmt: skip
AL_MAP = LinearSegmentedColormap.from_list("al", ["#ffffff", "#bcd3e8", "#2c6197"])
AHEAD_MAP = LinearSegmentedColormap.from_list("ahead", [COLOURS[BASELINE], "#ffffff", "#6f9cc8"])


@contextmanager
def style():
    """Our settings on top of matplotlib's own, whatever the reader's matplotlibrc or a notebook has set."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def save(figure: Figure, stem: Path) -> None:
    """Write stem.png and stem.svg without dates or versions, so that equal figures are equal files."""
    figure.savefig(stem.with_suffix(".png"), dpi=160, metadata={"Software": None})
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def colour(params, recipe: str) -> str:
    others = [name for name in params.recipes if name not in COLOURS]
    return COLOURS[recipe] if recipe in COLOURS else SPARE[others.index(recipe) % len(SPARE)]


def panels(rows: int, columns: int, width: float, height: float):
    """A grid of axes, all switched off until one is drawn on."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes_RC = figure.subplots(rows, columns, squeeze=False)
    for axes in axes_RC.flat:
        axes.set_axis_off()
    return figure, axes_RC


def legend_below(figure, axes_RC) -> None:
    """One legend for all panels."""
    handles = {}
    for axes in axes_RC.flat:
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


# Figure 2


def bars(axes, data, target: str, recipes: list[str]) -> None:
    """Mean AL over ID, OOD and all cells, one bar a recipe, from AL = 1, where no draft token is accepted."""
    axes.set_axis_on()
    table = data.tables["figure2_aggregate"]
    table = table[table.target == target].set_index(["recipe", "distilled", "cells"]).sort_index()
    groups = [name for name in ("ID", "OOD", "All") if (recipes[0], "yes", name) in table.index]
    width = 0.8 / len(recipes)
    handles, top = [], 1.05  # an axis needs some height even where nothing is ever accepted
    for number, recipe in enumerate(recipes):
        x_G = np.arange(len(groups)) + (number - (len(recipes) - 1) / 2) * width
        rows = table.loc[[(recipe, "yes", group) for group in groups]]
        top = max(top, rows.high.max())
        ratio = f" (OOD/ID {table.al[recipe, 'yes', 'OOD/ID']:.3f})" if "OOD" in groups else ""
        handles.append(axes.bar(x_G, rows.al - 1, width * 0.92, bottom=1, color=colour(data.params, recipe),
                                label=recipe + ratio))  # fmt: skip
        axes.vlines(x_G, rows.low, rows.high, color="white", linewidth=3)  # or the black line is lost on a dark bar
        axes.vlines(x_G, rows.low, rows.high, color="black", linewidth=1.2)
        for x, al, high in zip(x_G, rows.al, rows.high, strict=True):
            axes.annotate(f"{al:.2f}", (x, high), (0, 3), textcoords="offset points", ha="center", fontsize=7,
                          rotation=90 if len(recipes) > 2 else 0)  # fmt: skip
        before = axes.plot(x_G[-1], table.al[recipe, "no", "All"], "D", color="white", markeredgecolor="black",
                           markersize=4, clip_on=False, label="before distillation")  # fmt: skip
    room = 1.2 if len(recipes) > 2 else 1.12  # for the numbers above the bars
    axes.set(xticks=range(len(groups)), xticklabels=groups, ylabel="mean AL", ylim=(1, 1 + (top - 1) * room),
             title=target)  # fmt: skip
    axes.grid(axis="x", visible=False)
    axes.legend(handles=handles + before, loc="upper center", bbox_to_anchor=(0.5, -0.08), handlelength=1.2)


def matrix(axes, title: str, table: pd.DataFrame, marks: pd.DataFrame, colours, norm, form: str) -> None:
    """Numbers on coloured cells, adaptation domains down, evaluation domains across; bold in domain."""
    axes.set_axis_on()
    axes.imshow(table, cmap=colours, norm=norm, aspect="equal")
    axes.set_xticks(range(table.shape[1]), table.columns, rotation=40, ha="right", rotation_mode="anchor")
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
    axes.set(xlabel="evaluated on", ylabel="adapted on", title=title)


def square(cells: pd.DataFrame, column: str, domains: list[str]) -> pd.DataFrame:
    """A column of one recipe's cells as adaptation x evaluation domains, both in the order of params.yaml."""
    wide = cells.pivot(index="adaptation", columns="evaluation", values=column).astype(float)
    return wide.reindex(index=[domain for domain in domains if domain in wide.index], columns=domains)


def figure2(data) -> Figure:
    """Per target: aggregate bars, one AL matrix a recipe, and OURS - BASELINE, in rows of at most four panels."""
    cells, domains = data.tables["figure2"], list(data.params.domains)
    cells = cells[cells.in_figure == "yes"]
    recipes = {target: list(here.recipe.unique()) for target, here in cells.groupby("target", sort=False)}
    compared = {target: {OURS, BASELINE} <= set(names) for target, names in recipes.items()}
    most = max(1 + len(recipes[target]) + compared[target] for target in recipes)
    across = -(-most // -(-most // 4))  # evenly filled rows
    down = {target: -(-(1 + len(recipes[target]) + compared[target]) // across) for target in recipes}
    size = 1.5 + 0.42 * max(len(domains), 3)
    figure, axes_RC = panels(sum(down.values()), across, size + 0.1, size)
    rows = iter(axes_RC)
    for target, names in recipes.items():
        free = iter(np.concatenate([next(rows) for _ in range(down[target])]))
        bars(next(free), data, target, names)
        here = cells[cells.target == target].set_index("recipe", drop=False)
        where = f", {target}" if len(recipes) > 1 else ""
        scale = Normalize(1, max(1.05, here.al.max()))  # one for all of the target's matrices
        for recipe in names:
            table = square(here.loc[[recipe]], "al", domains)
            matrix(next(free), recipe + where, table, table < 0, AL_MAP, scale, "{:.2f}")
        if compared[target]:
            table, low, high = (square(here.loc[[BASELINE]], column, domains)
                                for column in ("osprey_minus_this", "minus_low", "minus_high"))  # fmt: skip
            largest = max(table.abs().max(axis=None), 0.01)
            matrix(next(free), f"{OURS} − {BASELINE}{where}", table, (low > 0) | (high < 0), AHEAD_MAP,
                   TwoSlopeNorm(0, -largest, largest), "{:+.2f}")  # fmt: skip
    return figure


# Figures 3 and 4


def paper_lines(axes, data, number: int, curve: pd.Series) -> None:
    """The paper's end points as dashed levels: another model and corpus, so no curve is drawn through them."""
    for point in data.paper_curves[data.paper_curves.figure == number].itertuples():
        gap_first, gap_last = abs(np.log(curve.iloc[[0, -1]] / point.value))
        left = gap_first > gap_last  # the label goes where the curve is far away
        when = f"step {int(point.step):,}" if point.step > 0 else "start"
        axes.axhline(point.value, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(f"paper, {when}: ~{point.value:g}", (0 if left else 1, point.value), (3 if left else -3, 2),
                      textcoords="offset points", xycoords=("axes fraction", "data"), ha="left" if left else "right",
                      fontsize=7, color="#555555")  # fmt: skip


def figure3(data) -> Figure:
    """Stage 2's training loss against steps."""
    figure, ((axes,),) = panels(1, 1, 5.2, 3.1)
    axes.set_axis_on()
    axes.plot(data.train.step, data.train.loss, color=COLOURS[OURS], linewidth=1.1)
    paper_lines(axes, data, 3, data.train.loss)
    axes.set(xlabel="step", ylabel="cross entropy (nats)", ylim=(0, None), title="Stage 2: training loss")
    axes.margins(x=0.02)
    return figure


def figure4(data) -> Figure:
    """Stage 2's held-out perplexity against steps, both axes logarithmic; step 0 has a place of its own."""
    figure, ((axes,),) = panels(1, 1, 5.2, 3.1)
    axes.set_axis_on()
    axes.plot(data.held_out.step, data.held_out.perplexity, "o-", color=COLOURS[OURS], markersize=3)
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # linear from 0 to 1
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    for step, perplexity in data.held_out[["step", "perplexity"]].iloc[[0, -1]].to_numpy():
        axes.annotate(f"{perplexity:,.0f}", (step, perplexity), (4, 4), textcoords="offset points", fontsize=7)
    paper_lines(axes, data, 4, data.held_out.perplexity)
    axes.set(xlabel="step", ylabel="held-out perplexity", title="Stage 2: held-out perplexity")
    return figure


# Acceptance by position, distillation curves


def acceptance(data) -> Figure:
    """Acceptance by draft position per target: conditional left, unconditional right; in domain full, out dashed."""
    table = data.tables["acceptance_aggregate"]
    targets = list(table.target.unique())
    figure, axes_RC = panels(len(targets), 2, 3.6, 2.6)
    for target, axes_C in zip(targets, axes_RC, strict=True):
        for axes, kind in zip(axes_C, ("conditional", "unconditional"), strict=True):
            axes.set_axis_on()
            for (recipe, cells), line in table[table.target == target].groupby(["recipe", "cells"], sort=False):
                axes.plot(line.position, line[kind], color=colour(data.params, recipe), marker="os"[cells == "OOD"],
                          markersize=3.5, linestyle=DASHES[cells == "OOD"], label=f"{recipe}, {cells}")  # fmt: skip
            axes.set(xlabel="draft position", ylim=(0, None), title=f"{target}: {kind}", xticks=table.position.unique())
        axes_C[0].set_ylabel("share accepted")
    legend_below(figure, axes_RC)
    return figure


def distillation(data) -> Figure:
    """Stage 4's loss per target (rows) and adaptation domain: single updates faint, their running mean on top."""
    params, runs = data.params, data.params.runs
    targets = [target for target in params.targets if any(run.target == target for run in runs.values())]
    domains = [domain for domain in params.domains if any(run.domain == domain for run in runs.values())]
    rates = {}  # recipe -> learning rates in their order; a second one gets another dash
    for run in runs.values():
        rates.setdefault(run.recipe, {})[run.lr] = None
    figure, axes_RC = panels(len(targets), len(domains), 2.5 if len(domains) > 1 else 4.4, 2.5)
    for name, run in runs.items():
        axes = axes_RC[targets.index(run.target), domains.index(run.domain)]
        axes.set_axis_on()
        history, shade = data.histories[name], colour(params, run.recipe)
        smooth = history.loss.rolling(max(1, len(history) // 20), min_periods=1).mean()
        axes.plot(history.step, history.loss, color=shade, linewidth=0.5, alpha=0.25)
        axes.plot(history.step, smooth, color=shade, label=f"{run.recipe}, lr {run.lr:g}",
                  linestyle=DASHES[list(rates[run.recipe]).index(run.lr) % len(DASHES)])  # fmt: skip
        axes.set(title=f"{run.target}: {run.domain}", xlabel="update")
    for axes_C in axes_RC:
        axes_C[0].set_ylabel("loss (nats, eq. 5)")
    legend_below(figure, axes_RC)
    return figure
