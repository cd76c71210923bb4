"""The explorer's pictures: plain HTML with their own paper and ink (JupyterLab may be dark); what a colour says, the
line under the token says too. osprey/explore.py computes what they show."""

import codecs
import html
import re

import torch
from IPython.display import HTML

from osprey import align, convert, evaluate, explore, models, rollouts
from osprey.params import UserError

STYLE = """<style>
.osprey, .osprey * {color: #111}
.osprey {background: #fff; border: 1px solid #999; padding: 10px 14px; font: 13px/1.6 sans-serif; overflow-x: auto}
.osprey .panels {display: flex; flex-wrap: wrap; gap: 12px 28px}
.osprey .panels > div {flex: 1 1 330px; min-width: 0}
.osprey .note {font-size: 12px}
.osprey .legend {font-size: 12px; margin-bottom: 8px; line-height: 2}
.osprey .text {font: 13px/2.1 monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 6px}
.osprey .t {padding: 2px 0 1px; margin-right: 1px; white-space: pre}
.osprey .prefill {border-bottom: 3px dotted #555}
.osprey .accepted {background: #b9dcf2; border-bottom: 3px solid #0072b2}
.osprey .correction {background: #fdf1e3; border-bottom: 2px dashed #c8792f}
.osprey .bonus {background: #e3c9e8; border-bottom: 5px double #6b2c73}
.osprey .one {background: #d6eaf8; border: 2px solid #0072b2}
.osprey .other {background: #fbdcb6; border: 2px dashed #a04000}
.osprey .step {border-left: 1px solid #666; margin-left: 2px; padding-left: 2px;
  animation: osprey-pass .5s calc(var(--n) * .15s)}
.osprey i {background: radial-gradient(circle at 50% 55%, #777 1px, transparent 1.5px)}
.osprey .newline::before {content: "\\21b5"; color: #555}
.osprey [data-bytes]::before {content: attr(data-bytes); font-size: 75%}
.osprey .grid {display: grid; gap: 3px 18px; align-items: center; justify-content: start}
.osprey .grid > b {border-bottom: 1px solid #999}
.osprey .bar {display: inline-block; height: 11px; background: #0072b2; border: 1px solid #111; margin-right: 6px}
.osprey .token {font-family: monospace; background: #eee; padding: 0 3px; white-space: pre}
@keyframes osprey-pass {from {box-shadow: 0 0 0 3px #111}}
@media (prefers-reduced-motion: reduce) {.osprey .step {animation: none}}
</style>"""
KINDS = {
    "accepted": "accepted draft",
    "correction": "correction: the target's token where a draft missed",
    "bonus": "bonus: the target's token after a chain without a miss",
    "prefill": "first token, from the prefill",
}
PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


def framed(*parts: str) -> HTML:
    """One picture. Prices are no formulas: its classes tell MathJax 2 and 3 to leave the text alone."""
    return HTML(f'{STYLE}<div class="osprey tex2jax_ignore mathjax_ignore">{"".join(parts)}</div>')


def legend(words: dict[str, str]) -> str:
    samples = (f'<span class="t {kind}">{html.escape(text)}</span>' for kind, text in words.items())
    return f'<div class="legend">{" &nbsp; ".join(samples)}</div>'


def boxed(token: str) -> str:
    return f'<span class="token">{html.escape(token)}</span>'


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A table of HTML cells, made of blocks: the notebook's theme has colours of its own for tables."""
    cells = [f"<b>{cell}</b>" for cell in header] + [f"<div>{cell}</div>" for row in rows for cell in row]
    return f'<div class="grid" style="grid-template-columns: repeat({len(header)}, auto)">{"".join(cells)}</div>'


def written(own: align.Vocabulary, ids: list[int]) -> list[str]:
    """What each token adds to the text: the characters that it completes, none for the fragment of one.

    Bytes that never become a character are \\x.., control characters their pictures; nothing is ever U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    texts = []
    for i in ids:
        if own.bytes[i] is not None:
            texts.append(decoder.decode(own.bytes[i]))
            continue
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        texts.append(own.tokens[i])
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return [text.translate(PICTURES) for text in texts]


def spans(own: align.Vocabulary, ids: list[int], kinds: list[str], titles: list[str]) -> list[str]:
    """One HTML element a token; all their text content, end to end, is the text.

    Spaces, newlines and fragments of characters are made visible by style alone.
    """
    made = []
    for token, text, kind, title in zip(ids, written(own, ids), kinds, titles, strict=True):
        marked = html.escape(text).replace(" ", "<i> </i>").replace("\n", '<span class="newline">\n</span>')
        fragment = f' data-bytes="{own.bytes[token].hex(" ")}"' if not text and own.bytes[token] else ""
        may_break = "<wbr>" if text.startswith(" ") else ""  # before the space: it belongs to the token
        made.append(f'{may_break}<span class="t {kind}" title="{html.escape(title)}"{fragment}>{marked}</span>')
    return made


def tell(own: align.Vocabulary, ids: list[int], trace: explore.Trace) -> list[str]:
    """What happened to every token of the response, in words."""
    told = []
    for place, (token, kind, step) in enumerate(zip(ids, trace.kinds, trace.step_of, strict=True)):
        shown = align.show(own, token)
        if kind == "prefill":
            told.append(f"{shown} is from the prefill")
            continue
        run = trace.accepted[step - 1]
        if kind == "accepted":
            about = f"is draft {place - trace.step_of.index(step) + 1}"
        elif kind == "correction":
            about = f"is the target's; drafted was {align.show(own, trace.drafts[step - 1][run])}"
        else:
            about = "is the target's, after all the drafts"
        told.append(f"step {step}, run length {run} of {trace.steps}: {shown} {about}")
    return told


def side_by_side(desk: explore.Desk, response: rollouts.Response, traces: dict[str, explore.Trace]) -> HTML:
    """The response once for every drafter, its tokens coloured by where they came from.

    A frame passes over the verification steps, at the same pace everywhere.
    """
    ids, panels = explore.answer(response), []
    for recipe, trace in traces.items():
        steps = {}
        for step, token in zip(trace.step_of, spans(desk.own, ids, trace.kinds, tell(desk.own, ids, trace))):
            steps[step] = steps.get(step, "") + token
        text = "".join(f'<span class="step" style="--n: {step}">{tokens}</span>' for step, tokens in steps.items())
        text = re.sub("(<span class=.step.[^>]*>)<wbr>", r"<wbr>\1", text)  # the step's border stays with its token
        counts = ", ".join(f"{trace.kinds.count(kind)} {kind}" for kind in ("accepted", "correction", "bonus"))
        passes = len(trace.accepted)
        panels.append(
            f'<div><b>{html.escape(recipe)}</b> &nbsp;<span class="note">{html.escape(trace.run)}</span>'
            f"<div>AL {(len(ids) - 1) / passes:.2f}: {len(ids)} tokens, from the prefill and {passes} verification "
            f'steps</div><div class="note">{counts}</div><div class="text">{text}</div></div>'
        )
    return framed(legend(KINDS), f'<div class="panels">{"".join(panels)}</div>')


def differences(desk: explore.Desk, response: rollouts.Response, traces: dict[str, explore.Trace]) -> HTML:
    """The response with the tokens marked that only one of the first two drafters drafted rightly."""
    (one, first), (other, second) = list(traces.items())[:2]
    ids, marks = explore.answer(response), explore.compare(first, second)
    both = zip(tell(desk.own, ids, first), tell(desk.own, ids, second))
    titles = [f"{one}: {said}\n{other}: {answered}" for said, answered in both]
    words = {
        kind: f"only {name} drafted it rightly: {marks.count(kind)}" for kind, name in (("one", one), ("other", other))
    }
    return framed(legend(words), f'<div class="text">{"".join(spans(desk.own, ids, marks, titles))}</div>')


def acceptance(traces: dict[str, explore.Trace]) -> HTML:
    """Of the verification steps that could go as far as draft k, the share whose first k were accepted."""
    rows = {recipe: evaluate.ledger_row(t.accepted, len(t.kinds), t.steps) for recipe, t in traces.items()}
    cells = []
    for k in range(1, max(trace.steps for trace in traces.values()) + 1):
        cells.append([str(k)])
        for row in rows.values():
            accepted, offered = row[f"accepted_{k}"], row[f"offered_{k}"]
            share = accepted / offered if offered else 0.0
            bar = f'<span class="bar" style="width: {200 * share:.0f}px"></span>' * (accepted > 0)
            cells[-1].append(f'{bar}{share:.2f} &nbsp;<span class="note">{accepted} of {offered}</span>')
    return framed(grid(["draft", *map(html.escape, traces)], cells))


def source_rows(desk: explore.Desk, drafters: dict, recipe: str, text: str, count: int = 4) -> HTML:
    """Where the drafter's rows of a text's tokens came from (eq. 4), and the source rows they are nearest to now."""
    body = desk.params.recipes[recipe].body if recipe in desk.params.recipes else None
    if body not in convert.BODIES:
        raise UserError(f"recipe {recipe!r}: its drafters take no rows from a source; name one with a pretrained body")
    ids = list(dict.fromkeys(desk.tokenizer(text, add_special_tokens=False)["input_ids"]))
    lines = explore.alignment(explore.need(desk.root, f"data/converted/{desk.target}-{recipe}/alignment.csv"), ids)
    source = models.load_model(explore.need(desk.root, convert.BODIES[body]), torch.float32)
    theirs = align.vocabulary(models.load_tokenizer(explore.need(desk.root, f"data/models/{desk.params.source.model}")))
    weight_SD = source.get_input_embeddings().weight.detach()[: len(theirs.tokens)]
    drafter, _ = drafters[recipe]
    rows = []
    for line in lines:
        near = explore.nearest(drafter.embed_tokens.weight[int(line["target_id"])].detach().cpu(), weight_SD, count)
        rows.append([
            f"{boxed(line['token'])} {line['target_id']}", line["provenance"],
            f"{boxed(line['source_tokens'])} {line['source_ids']}" if line["source_ids"] else "",
            " ".join(f"{boxed(align.show(theirs, i))} {cosine:.2f} &nbsp;" for i, cosine in near),
        ])  # fmt: skip
    return framed(grid(["target token", "provenance", "its source rows", "nearest source rows, cosine"], rows))
