"""The text under each table and figure. It ends with how things came out, computed from the tables.

Every function takes `data` as `report.gather` made it, with all tables in `data.tables`.
"""

from osprey.tables import BASELINE, OURS, PAPER


def prose(text: str) -> str:
    """One line of a text that was broken for reading."""
    return " ".join(text.split())


def figure2(data) -> str:
    return prose(f"""
        Mean accepted length (AL, bonus token included) of drafters adapted on one domain and evaluated on every
        domain. First panel: means over in-domain (ID), out-of-domain (OOD) and all cells with 95 % bootstrap
        intervals; bars start at AL = 1, where no draft token is accepted. Matrices: every cell, bold in domain.
        Last: the difference; an asterisk marks a paired 95 % interval that excludes 0. The paper's numbers, in
        the tables, are for Qwen3-8B. {limits(data)} {outcome(data)}""")


def figure2_cells(data) -> str:
    return prose(f"""
        Every cell of Figure 2 and the drafters before distillation: mean AL over requests with its 95 % bootstrap
        interval, and {OURS} minus the row, paired by request. dropped: requests without a verification step.
        {PAPER}: the same cell of Table 12 at learning rate 1e-4, on another target. {outcome(data)}""")


def figure2_aggregate(data) -> str:
    table = data.tables["figure2_aggregate"]
    table = table[(table.recipe == BASELINE) & (table.distilled == "yes")].dropna(subset="osprey_minus_this")
    found = [
        f"{row.target} {row.cells} {row.osprey_minus_this:+.3f} [{row.minus_low:+.3f}, {row.minus_high:+.3f}]"
        for row in table.itertuples()
    ]
    return prose(f"""
        Means over cells, each cell a mean over requests; a resample draws the requests of an evaluation domain
        once for all drafters. {OURS}_minus_this: over the adaptation domains that both have. {PAPER}: as the
        paper prints it, on another target. {OURS} minus {BASELINE}: {", ".join(found) or "no domain in common"}.""")


def limits(data) -> str:
    """What a reader must know before comparing the bars (design, section 8)."""
    params, text = data.params, []
    recipes = {drafter.recipe: params.recipes[drafter.recipe] for drafter in params.drafters.values()}
    same = [target for target in params.targets if target == params.source.model]
    if same:
        text.append(f"""Source and target {same[0]} are the same model, so a drafter made from the source inherits the
                        target's own embedding and head.""")
    layers = {name: recipe.layers or params.source.layers for name, recipe in recipes.items()}
    widths = {name: "source" if recipe.interface == "osprey" else "target" for name, recipe in recipes.items()}
    if len(set(layers.values())) > 1 or list(params.targets) != same:
        bodies = [f"{name}: {n} layer{'s' * (n > 1)} of the {widths[name]}'s width" for name, n in layers.items()]
        text.append(f"The bodies differ in size ({', '.join(bodies)}).")
        matched = [name for name, n in layers.items() if widths[name] == "target" and n == params.source.layers]
        if same and matched:
            text.append(f"On {same[0]}, {' and '.join(matched)} is the size-matched row.")
    apart = data.tables["figure2"].query("adaptation != 'none' and in_figure == 'no'").run.nunique()
    if apart:
        text.append(f"Runs in the table only (fewer domains than {OURS}, or a further learning rate): {apart}.")
    return " ".join(text)


def outcome(data) -> str:
    """How the comparison came out, a sentence per target."""
    cells, text = data.tables["figure2"], []
    pairs = cells[(cells.recipe == BASELINE) & (cells.in_figure == "yes")].dropna(subset="osprey_minus_this")
    for target in data.params.targets:
        pair = pairs[pairs.target == target]
        if pair.empty:
            text.append(f"On {target} there is nothing to compare: {OURS} and {BASELINE} do not share their domains.")
            continue
        more, n = (pair.osprey_minus_this > 0).sum(), len(pair)
        won, lost = (pair.minus_low > 0).sum(), (pair.minus_high < 0).sum()
        text.append(f"""On {target}, {OURS} is ahead of {BASELINE} in {more} of {n} cells; the paired intervals put it
                        ahead in {won}, behind in {lost} and leave {n - won - lost} open.""")
    return " ".join(text)


def pretraining(data) -> str:
    loss = data.tables["pretraining"].iloc[0]
    return prose(f"""
        First and last point of Stage 2's curves, and of the paper's for another model and corpus (Qwen3-4B cut to
        two layers, FineWeb). The run here sees {loss.tokens:,} tokens in {loss.last_step:,} updates, the paper's
        about 462 billion in 55,000.""")


def figure3(data) -> str:
    row = data.tables["pretraining"].iloc[0]
    tenth = max(1, len(data.train) // 10)
    return prose(f"""
        Stage 2's training loss at every update. Dashed: points that the paper states for another model and corpus
        (Qwen3-4B cut to two layers, FineWeb, 55k steps). The loss goes from {row["first"]:.2f} nats to
        {data.train.loss.tail(tenth).mean():.2f} (mean of the last {tenth} updates) in {row.last_step:,} updates
        and {row.tokens:,} tokens.""")


def figure4(data) -> str:
    row, curve = data.tables["pretraining"].iloc[1], data.held_out.perplexity
    before = curve.iloc[-2] if len(curve) > 1 else curve.iloc[-1]
    trend = "still falling" if curve.iloc[-1] < before else "no longer falling"
    return prose(f"""
        Perplexity on held-out documents, both axes logarithmic; step 0, the pruned source, stands at the left
        edge. Dashed: points that the paper states for another model and corpus. Perplexity goes from
        {row["first"]:,.0f} to {row["last"]:,.1f} in {row.last_step:,} updates and is {trend} at the last
        evaluation ({before:,.1f} at the one before).""")


def acceptance(data) -> str:
    table, text = data.tables["acceptance_aggregate"], []
    for target, rows in table[(table.position == 1) & (table.cells == "ID")].groupby("target", sort=False):
        shares = ", ".join(f"{row.unconditional:.0%} ({row.recipe})" for row in rows.itertuples())
        text.append(f"On {target}, in domain, the first draft token is accepted in {shares} of the steps.")
    return prose(f"""
        Acceptance by draft position, pooled over requests. Unconditional: of the verification steps in which the
        position lay inside the response, the share that accepted it and all before it. Conditional: of the steps
        that accepted all earlier positions, the share that accepted this one too. {" ".join(text)}""")


def conventions(data) -> str:
    table = data.tables["conventions_aggregate"]

    def order(rows, name):
        return list(rows.sort_values(name, kind="stable").recipe)

    changed = [
        name
        for name in table.columns[2:]
        if any(order(rows, name) != order(rows, "al") for _, rows in table.groupby("target"))
    ]
    return prose(f"""
        Accepted length as different people count it, for responses of T tokens and V verification steps. al: mean
        over requests of (T - 1) / V, used everywhere else; with_prefill: T / V, as in the authors' script;
        pooled: sum of T - 1 over sum of V; vllm: 1 + accepted / drafts; without_bonus: accepted draft tokens per
        verification step. The order of the recipes
        {f"differs under {', '.join(changed)}" if changed else "is the same under all of them"}.""")


def rollouts(data) -> str:
    table = data.tables["rollouts"]
    worst = table.loc[table.repetition.idxmax()]
    return prose(f"""
        Responses of the targets. skipped: prompts that are too long or answered with fewer than two tokens;
        ended: share of responses that stopped by themselves; repetition: share of repeated 4-grams. Between
        {table.ended.min():.0%} and {table.ended.max():.0%} of a row's responses end by themselves; repetition is
        at most {worst.repetition:.0%} ({worst.target}, {worst.domain}, {worst.split}).""")


def coverage(data) -> str:
    table = data.tables["coverage"]
    worst = [table.loc[place] for place in table.groupby("split").covered.idxmin()]
    lowest = "; ".join(f"{row.split} {row.covered:.1%} ({row.target}, {row.domain})" for row in worst)
    return prose(f"""
        covered: share of response tokens that the draft vocabulary can propose at all; the others count as
        rejected drafts. The lowest shares: {lowest}.""")


def distillation(data) -> str:
    table = data.tables["distillation"]
    first = table.drop_duplicates(["target", "adaptation", "recipe"])
    last = first.pivot(index=["target", "adaptation"], columns="recipe", values="last_tenth")
    pairs = last[[OURS, BASELINE]].dropna() if {OURS, BASELINE} <= set(last.columns) else last.iloc[:0]
    ahead = (pairs[OURS] < pairs[BASELINE]).sum() if len(pairs) else 0
    return prose(f"""
        Stage 4's loss (eq. 5: the discounted sum over draft steps) per supervised position. In the figure, faint:
        single updates; thick: running mean over a twentieth of the run. The last tenth's mean loss is below the
        first tenth's in {(table.last_tenth < table.first_tenth).sum()} of {len(table)} runs; {OURS} ends below
        {BASELINE} in {ahead} of {len(pairs)} pairs.""")
