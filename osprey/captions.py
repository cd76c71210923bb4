"""The text under each table and figure. It ends with how things came out, computed from the tables.

Every function takes `data` as `inputs.gather` made it, with all tables in `data.tables`.
"""

from osprey import claims, rates
from osprey.claims import prose
from osprey.rates import OURS
from osprey.tables import PAPER

# Figure 2


def figure2(data) -> str:
    return prose(f"""
        Mean accepted length (AL, bonus token included) of drafters adapted on one domain and evaluated on every
        domain. Left: means over in-domain (ID), out-of-domain (OOD) and all cells with 95 % bootstrap intervals over
        requests; bars start at AL = 1, where no draft token is accepted; below, OOD/ID. Middle: every cell, bold in
        domain. Right: {OURS} minus the recipe beside it, or minus its own drafter before distillation; an asterisk
        marks a paired 95 % interval that excludes 0. {learning_rates_of(data)} The paper's numbers, in the tables, are
        for Qwen3-8B. {limits(data)} {claims.gain(data)} {claims.cells(data)} {claims.aggregates(data)}""")


def figure2_cells(data) -> str:
    return prose(f"""
        Every cell of Figure 2 and the drafters before distillation: mean AL over requests with its 95 % bootstrap
        interval; {OURS} minus the row, paired by request, at the same kind of rate; and gain, the row minus its
        drafter before distillation. dropped: requests without a verification step. {PAPER}: the same cell of Table 12
        at learning rate 1e-4, for eagle3-2l of Table 6, on another target. rate: own, the recipe's own learning rate;
        common, the one that all recipes share, where that is another; other, in no mean. {learning_rates_of(data)}
        {claims.cells(data)}""")


def figure2_aggregate(data) -> str:
    return prose(f"""
        Means over cells, each cell a mean over requests; a resample draws the requests of an evaluation domain
        once for all drafters. {OURS}_minus_this: over the adaptation domains that both have. gain: over the recipe's
        own drafter before distillation, on the same cells. {PAPER}: as the paper prints it, on another target (its
        two-layer EAGLE-3 was adapted on four domains: tables/table6). {learning_rates_of(data)} {claims.gain(data)}
        {claims.aggregates(data)}""")


def everywhere(data) -> list[str]:
    """The recipes that are some target's baselines."""
    return list(dict.fromkeys(b for target in data.params.targets for b in rates.baselines(data.params, target)))


def learning_rates_of(data) -> str:
    """Which rates are shown, a sentence per target."""
    params, text = data.params, []
    for target in params.targets:
        own, lr = rates.grid(params, target), rates.common(params, target)
        if not own:
            continue
        used = ", ".join(f"{recipe} {rates.written(params, runs.values())}" for recipe, runs in own.items())
        if "common" in rates.sets(params, target):
            text.append(f"Learning rates on {target}: own {used}; the common one is {lr:g}.")
        elif lr is not None:
            text.append(f"On {target} all recipes' own learning rates are the same, {lr:g}, so there is one set.")
        else:
            text.append(f"Own learning rates on {target}: {used}; no rate is common to all.")
    return " ".join(text)


def limits(data) -> str:
    """What a reader must know before comparing the bars (design, section 8)."""
    params, text = data.params, []
    same = [target for target in params.targets if target == params.source.model]
    if same:
        text.append(f"""Source and target {same[0]} are the same model, so a drafter made from the source inherits the
                        target's own embedding and head.""")
    text.append(bodies(data))
    apart = data.tables["figure2"].query("rate == 'other' or (rate == 'own' and in_figure == 'no')").run.nunique()
    if apart:
        text.append(f"Runs in the table only (fewer domains than {OURS}, or a further learning rate): {apart}.")
    return " ".join(text)


def bodies(data) -> str:
    """The sizes compared, and which recipe matches OURS (within a tenth)."""
    table, text = data.tables["table11"], []
    for target, rows in table.groupby("target", sort=False):
        body = rows.set_index("recipe").body
        sizes = ", ".join(f"{recipe} {millions(size)}" for recipe, size in body.items())
        text.append(f"Parameters of the bodies (layers and fc) on {target}: {sizes}.")
        matched = [r for r in body.index if r != OURS and OURS in body and abs(body[r] / body[OURS] - 1) < 0.1]
        if matched:
            verb = "is the size-matched row" if len(matched) == 1 else "are the size-matched rows"
            text.append(f"On {target}, {' and '.join(matched)} {verb}.")
    return " ".join(text)


def millions(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count:,}"


def table6(data) -> str:
    return prose(f"""
        Means over the adaptation and evaluation domains that the paper's Table 6 covers (chat, code, finance, math),
        at own learning rates; {PAPER}: the mean over the same cells of Table 6, on another target. The paper calls
        its two-layer EAGLE-3 parameter-matched, but its body is larger than Osprey's (tables/table11). {bodies(data)}
        {claims.matched(data)}""")


def table11(data) -> str:
    rows = data.tables["table11"].dropna(subset="paper_body_millions")
    ours = rows[rows.recipe == OURS].set_index("target")
    found = [f"{row.recipe} on {row.target} {row.body / ours.body[row.target]:.2f} (the paper's "
             f"{row.paper_body_millions / ours.paper_body_millions[row.target]:.2f})"
             for row in rows[rows.recipe != OURS].itertuples() if row.target in ours.index]  # fmt: skip
    return prose(f"""
        Sizes counted from the checkpoints: body is the layers and fc, as in Table 11; total adds embedding, head and
        final norm; trainable leaves out EAGLE-3's frozen embedding, which stock EAGLE-3 does not train. As there, only
        its first layer reads both streams; the paper's two-layer count fits a drafter in which both layers do. Bodies
        in units of {OURS}'s:
        {", ".join(found) or "nothing to compare"}.""")


def learning_rates(data) -> str:
    table, params = data.tables["learning_rates"], data.params
    best = [f"{row.recipe} on {row.target} {row.lr}" for row in table[table.best == "yes"].itertuples()]
    edge = [f"{row.recipe} on {row.target}" for row in table[table.edge == "yes"].itertuples()]
    text = f"On {params.evaluate.split} prompts the best rates are {', '.join(best)}."
    if (table.edge != "").any():
        text += f" Best at the edge of its grid (of two rates, either is): {', '.join(edge) or 'none'}."
    else:
        text += " Every recipe has a single rate."
    if params.evaluate.split != "validation":
        text += " No rate was chosen by these numbers; that is what tables/sweep is for."
    return prose(f"""
        Mean AL per learning rate with 95 % bootstrap intervals, over the adaptations' in-domain (ID), out-of-domain
        (OOD) and all cells. best: the recipe's highest ID, among the rates with the most adaptation domains; edge: is
        it the lowest or highest of these? {text}""")


def sweep(data) -> str:
    return prose(f"""
        The learning-rate sweep behind the runs' rates (presets/sweep.yaml), judged on validation prompts, which appear
        in no other table; the columns are those of tables/learning_rates. {claims.sweep(data)}""")


# Stages 2 to 4


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


# Evaluation


def acceptance(data) -> str:
    table, text = data.tables["acceptance_aggregate"], []
    for target, rows in table[(table.position == 1) & (table.cells == "ID")].groupby("target", sort=False):
        shares = ", ".join(f"{row.unconditional:.0%} ({row.recipe})" for row in rows.itertuples())
        text.append(f"On {target}, in domain, the first draft token is accepted in {shares} of the steps.")
    return prose(f"""
        Acceptance by draft position, pooled over requests. Unconditional: of the verification steps in which the
        position lay inside the response, the share that accepted it and all before it. Conditional: of the steps
        that accepted all earlier positions, the share that accepted this one too. {" ".join(text)}""")


def acceptance_gain(data) -> str:
    return prose(f"""
        {OURS} against the EAGLE-3 recipes by draft position: the difference of unconditional and of conditional
        acceptance, and the ratio of the unconditional ones, with 95 % bootstrap intervals paired by request; change:
        since position 1. Where in some resamples nobody got that far, these count as beyond both ends, and an end they
        reach is open: empty in the table, drawn to the panel's edge. The paper's introduction claims the most
        significant gains at further positions and prints no numbers. {claims.lookahead(data)}""")


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
        Responses of the targets, those for adaptation sampled at temperature
        {data.params.rollouts.adaptation_temperature:g}, the others at
        {data.params.rollouts.held_out_temperature:g}. skipped: prompts that are too long or answered with fewer than
        two tokens; ended: share of responses that stopped by themselves; repetition: share of repeated 4-grams. Between
        {table.ended.min():.0%} and {table.ended.max():.0%} of a row's responses end by themselves; repetition is
        at most {worst.repetition:.0%} ({worst.target}, {worst.domain}, {worst.split}).""")


def coverage(data) -> str:
    table = data.tables["coverage"]
    worst = [table.loc[place] for place in table.groupby("split").covered.idxmin()]
    lowest = "; ".join(f"{row.split} {row.covered:.1%} ({row.target}, {row.domain})" for row in worst)
    return prose(f"""
        covered: share of response tokens that the draft vocabulary can propose at all; the others count as
        rejected drafts. The lowest shares: {lowest}.""")


def first_n(data) -> str:
    paper = ", ".join(f"{row.al:.2f} at {row.prompts}" for row in data.paper_first.itertuples())
    return prose(f"""
        AL of the first N prompts in their own order against the first N of the seeded sample; bias: their difference,
        with its unpaired 95 % bootstrap interval (a prompt may be in both, so it is rather too wide). Domains whose
        prompts are generated have no such order. For comparison, the authors' code takes the first N, and its
        {data.paper_first.evaluation[0]} AL is {paper}. {claims.first_n(data)}""")


def agreement(data) -> str:
    return prose(f"""
        Requests decoded token by token by the {data.params.rollouts.precision} target with its own cache, beside
        their replay on taps recorded in padded batches. same_tokens: share of requests in which the decoded response
        is the recorded one; disagreeing: of the verification steps inside the common text, the share in which the two
        accept different numbers of drafts; AL of either and decoded minus replayed. Disagreement:
        {claims.agreement(data)}""")


def distillation(data) -> str:
    table = data.tables["distillation"]
    first = table.drop_duplicates(["target", "adaptation", "recipe"])
    last = first.pivot(index=["target", "adaptation"], columns="recipe", values="last_tenth")
    text = []
    for baseline in everywhere(data) if OURS in last else []:
        pairs = last[[OURS, baseline]].dropna()
        text.append(f"{OURS} ends below {baseline} in {(pairs[OURS] < pairs[baseline]).sum()} of {len(pairs)} pairs.")
    drawn = """An update's steps are drawn (step k with probability decay^k) and count alike: its loss is that of the
               drawn steps, eq. 5's on average only."""
    return prose(f"""
        Stage 4's loss (eq. 5: the discounted sum over draft steps) per supervised position.
        {drawn if data.params.distill.depth == "drawn" else ""} In the figure, faint:
        single updates; thick: running mean over a twentieth of the run. The last tenth's mean loss is below the
        first tenth's in {(table.last_tenth < table.first_tenth).sum()} of {len(table)} runs. {" ".join(text)}""")
