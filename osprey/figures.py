"""The pictures but Figure 2 (figure2.py). They draw the tables and curves that `inputs.gather` collected and compute
nothing.

A recipe has one colour everywhere; colours differ in lightness, so a grey print still tells them apart.
"""

from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from osprey.rates import OURS

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
            here = table[(table.target == target) & (table.cells != "All")]
            for (recipe, cells), line in here.groupby(["recipe", "cells"], sort=False):
                axes.plot(line.position, line[kind], color=colour(data.params, recipe), marker="os"[cells == "OOD"],
                          markersize=3.5, linestyle=DASHES[cells == "OOD"], label=f"{recipe}, {cells}")  # fmt: skip
            axes.set(xlabel="draft position", ylim=(0, None), title=f"{target}: {kind}", xticks=table.position.unique())
        axes_C[0].set_ylabel("share accepted")
    legend_below(figure, axes_RC)
    return figure


def acceptance_gain(data) -> Figure:
    """OURS against every baseline by draft position, per target: differences and ratio, with intervals; an open end
    runs to the edge of the panel."""
    table = data.tables["acceptance_gain"]
    targets = list(table.target.unique())
    figure, axes_RC = panels(max(1, len(targets)), 3, 3.3, 2.7)
    titles = {"unconditional": "unconditional, difference", "conditional": "conditional, difference",
              "ratio": "unconditional, ratio"}  # fmt: skip
    for target, axes_C in zip(targets, axes_RC, strict=False):
        for axes, (measure, title) in zip(axes_C, titles.items(), strict=True):
            axes.set_axis_on()
            axes.axhline(measure == "ratio", color="black", linewidth=0.8)
            here = table[(table.target == target) & (table.measure == measure) & (table.cells != "All")]
            lines, bars = list(here.groupby(["baseline", "cells"], sort=False)), []
            for number, ((baseline, cells), line) in enumerate(lines):
                x_K = line.position + 0.09 * (number - (len(lines) - 1) / 2)  # side by side, not on top of each other
                shade = colour(data.params, baseline)
                axes.vlines(x_K, line.low, line.high, color=shade, linewidth=1)
                bars.append((x_K, line, shade))
                axes.plot(x_K, line.gain, color=shade, marker="os"[cells == "OOD"], markersize=3.5,
                          linestyle=DASHES[cells == "OOD"], label=f"{OURS} against {baseline}, {cells}")  # fmt: skip
            axes.set(xlabel="draft position", title=f"{target}: {title}", xticks=sorted(table.position.unique()))
            if measure == "ratio" and (here.gain > 0).any():
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
                axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            bottom, top = axes.set_ylim(*axes.get_ylim())
            for x_K, line, shade in bars:
                some = line.gain.notna()
                low, high = line.low.fillna(bottom)[some], line.high.fillna(top)[some]
                axes.vlines(x_K[some], low, high, color=shade, linewidth=1)
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
