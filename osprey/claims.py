"""How the paper's claims came out here: sentences computed from the tables, for the captions.

A comparison holds where its 95 % interval is above 0, does not hold where it is below, and is open otherwise.
"""

from osprey import rates
from osprey.rates import OURS


def prose(text: str) -> str:
    """One line of a text that was broken for reading."""
    return " ".join(text.split())


def interval(estimate: float, low: float, high: float, form: str = "+.3f") -> str:
    """`estimate [low, high]`; an end that is not known (stats.estimate) is called open."""
    low, high = ("open" if end != end else f"{end:{form}}" for end in (low, high))
    return f"{estimate:{form}} [{low}, {high}]"


def verdict(low: float, high: float, yes: str = "holds", no: str = "does not hold", unsure: str = "is open") -> str:
    return yes if low > 0 else no if high < 0 else unsure


def cells(data) -> str:
    """In how many cells OURS is ahead, a sentence per target and baseline."""
    table, text = data.tables["figure2"], []
    table = table[table.in_figure == "yes"]
    for target in data.params.targets:
        found = False
        for baseline in rates.baselines(data.params, target):
            pairs = table[(table.target == target) & (table.recipe == baseline)].dropna(subset="osprey_minus_this")
            if pairs.empty:
                continue
            found, n = True, len(pairs)
            more = (pairs.osprey_minus_this > 0).sum()
            won, lost = (pairs.minus_low > 0).sum(), (pairs.minus_high < 0).sum()
            behind = [f"adapted on {row.adaptation}, evaluated on {row.evaluation} ({row.osprey_minus_this:+.3f})"
                      for row in pairs[pairs.osprey_minus_this <= 0].itertuples()]  # fmt: skip
            text.append(f"""On {target}, {OURS} is ahead of {baseline} in {more} of {n} cells; the paired intervals put
                            it ahead in {won}, behind in {lost} and leave {n - won - lost} open.""")
            if 0 < len(behind) <= 5:
                text.append(f"Not ahead: {'; '.join(behind)}.")
        if not found:
            text.append(f"On {target} there is nothing to compare: {OURS} shares its domains with no EAGLE-3 recipe.")
    return prose(" ".join(text))


def aggregates(data) -> str:
    """The paper's claims about Figure 2's aggregates, a sentence per target, baseline and kind of rate."""
    table, text = data.tables["figure2_aggregate"].dropna(subset="osprey_minus_this"), []
    for target in data.params.targets:
        for baseline in rates.baselines(data.params, target):
            sets = rates.sets(data.params, target)
            for rate in sets:
                rows = table[(table.target == target) & (table.recipe == baseline) & (table.rate == rate)]
                found = [f"higher {row.cells} {verdict(row.minus_low, row.minus_high)} ("
                         f"{interval(row.osprey_minus_this, row.minus_low, row.minus_high)})"
                         for row in rows.itertuples()]  # fmt: skip
                where = f", {'own rates' if rate == 'own' else 'common rate'}" if len(sets) > 1 else ""
                if found:
                    text.append(f"The paper's claims, on {target} against {baseline}{where}: {', '.join(found)}.")
    return prose(" ".join(text))


def gain(data) -> str:
    """What distillation added in domain."""
    table, text = data.tables["figure2_aggregate"], []
    for row in table[(table.recipe == OURS) & (table.rate == "own") & (table.cells == "ID")].itertuples():
        text.append(f"""On {row.target}, in domain, distillation adds {interval(row.gain, row.gain_low, row.gain_high)}
                        to the undistilled backbone's AL on the same domains, and reaches {row.al:.3f}.""")
    return prose(" ".join(text))


def matched(data) -> str:
    """Table 6's comparison, ours beside the paper's."""
    table, text = data.tables["table6"], []
    for row in table[table.cells == "All"].dropna(subset="osprey_minus_this").itertuples():
        text.append(f"""On {row.target}, {OURS} minus {row.recipe} over all these cells is
                        {interval(row.osprey_minus_this, row.minus_low, row.minus_high)}, the paper's
                        {row.paper_osprey_minus_this:+.3f}.""")
    return prose(" ".join(text))


def lookahead(data) -> str:
    """Whether the gain grows from the first position to the last one reached, over all cells."""
    table, text = data.tables["acceptance_gain"], []
    table = table[table.cells == "All"]
    names = {"unconditional": "absolute gain, unconditional", "conditional": "conditional",
             "ratio": "relative gain, the ratio of the unconditional ones"}  # fmt: skip
    for (target, baseline), here in table.groupby(["target", "baseline"], sort=False):
        found = []
        for measure, name in names.items():
            line = here[here.measure == measure].dropna(subset="gain")
            if len(line) < 2:
                continue
            first, last = line.iloc[0], line.iloc[-1]
            form = ".2f" if measure == "ratio" else "+.3f"
            trend = verdict(last.change_low, last.change_high, "it grows", "it shrinks", "whether it grows is open")
            steady = line.gain.is_monotonic_increasing or line.gain.is_monotonic_decreasing
            trend += " with every position" if steady and "open" not in trend else ""
            found.append(f"""{name}: {first.gain:{form}} at position {first.position}, {last.gain:{form}} at
                             {last.position}: {trend} (change
                             {interval(last.change, last.change_low, last.change_high)})""")
        if found:
            text.append(f"On {target} against {baseline}, over all cells: {'; '.join(found)}.")
    return prose(" ".join(text)) or "There is nothing to compare."


def sweep(data) -> str:
    """Are the runs' rates the sweep's best, and is any best at the edge of its grid?"""
    table, params, text = data.tables["sweep"], data.params, []
    if params.evaluate.split == "validation":
        return "This run is a sweep itself: its rates are compared in tables/learning_rates."
    if table.empty:
        return "No sweep was made for these targets."
    for target in [target for target in params.targets if target in set(table.target)]:
        best = table[(table.target == target) & (table.best == "yes")].set_index("recipe")
        same, other, unswept = [], [], []
        for recipe, runs in rates.grid(params, target).items():
            used = rates.written(params, runs.values())
            if recipe not in best.index:
                unswept.append(recipe)
            elif used == best.lr[recipe]:
                same.append(f"{recipe} {used}")
            else:
                other.append(f"{recipe} uses {used}, its best is {best.lr[recipe]}")
        edge = [recipe for recipe in best.index if best.edge[recipe] == "yes"]
        text.append(f"On {target}, rates that are the sweep's best: {', '.join(same) or 'none'}.")
        text += [f"Not the best: {'; '.join(other)}."] if other else []
        text += [f"Not in the sweep: {', '.join(unswept)}."] if unswept else []
        text.append(f"Best at the edge of its grid: {', '.join(edge) or 'none'}.")
    return prose(" ".join(text))


def first_n(data) -> str:
    """The largest bias of taking the first N, and how many of them are beyond chance."""
    table = data.tables["first_n"]
    if table.empty:
        return "This run has no rollouts of first prompts."
    single = table[table.evaluation != "mean"]
    worst = single.loc[single.bias.abs().idxmax()]
    apart = ((single.low > 0) | (single.high < 0)).sum()
    means = table[(table.evaluation == "mean") & (table.distilled == "yes")]
    means = means[means.prompts == means.prompts.max()]
    means = [f"{row.target} {row.recipe} {interval(row.bias, row.low, row.high)}" for row in means.itertuples()]
    text = f"""The largest bias is {interval(worst.bias, worst.low, worst.high)} ({worst.target}, {worst.recipe},
               {"distilled" if worst.distilled == "yes" else "undistilled"}, {worst.evaluation}, first
               {worst.prompts}); {apart} of {len(single)} intervals exclude 0, where chance alone would give
               {0.05 * len(single):.0f}."""
    if means:
        text += f" Mean over domains of the first {table.prompts.max()}, in domain: {', '.join(means)}."
    return prose(text)


def agreement(data) -> str:
    table = data.tables["agreement"]
    found = []
    for row in table[table.evaluation == "all"].itertuples():
        rate = f"{row.disagreeing:.2%} of {row.steps:,} steps" if row.steps else "no step could be compared"
        found.append(f"""On {row.target}: {rate}; {row.same_tokens:.0%} of {row.requests} requests have the same tokens;
                         AL {row.al_decoded:.3f} decoded, {row.al_replayed:.3f} replayed ({row.difference:+.3f}).""")
    return prose(" ".join(found))
