"""The domains' prompts: disjoint draws for adaptation and evaluation; their ids in the target's own chat template."""

import re
from itertools import islice, zip_longest

import jinja2

from osprey import params, records
from osprey.params import UserError

TEMPLATES_APART = {"held-out": 0.2, "validation": 0.3}  # upper limits of their shares of a generator's templates


def split(name: str, domain: params.Domain, counts: dict[str, int], seed: int) -> dict[str, list[str]]:
    """`counts` (split -> number) of distinct prompts in the domain's template, seeded samples without a prompt in
    common (but for `first`, which only keeps clear of adaptation, and which generators, whose order is random, lack).

    Prompts that share all but numbers, punctuation and word order count as one, or a held-out prompt could be an
    adaptation prompt with other figures. A split stays the same when another one's count changes, and grows without
    reshuffling when its own does. Raises UserError when there are too few.
    """
    generators = [item for item in domain.records if item.generate]
    if generators and len(generators) < len(domain.records):
        raise UserError(f"domains.{name}.records: generated and stored prompts cannot be mixed in one domain")
    draw = from_generators if generators else from_records
    drawn = draw(name, domain, counts, seed)
    return {side: [domain.template.replace("{prompt}", prompt) for prompt in drawn[side]] for side in drawn}


def from_records(name: str, domain: params.Domain, counts: dict[str, int], seed: int) -> dict[str, list[str]]:
    """One seeded order of all prompts: held-out and validation take turns at its front, adaptation has its back."""
    distinct = {}
    for item in domain.records:
        for prompt in map(str.strip, records.texts(item)):
            if prompt:
                distinct.setdefault(wording(prompt), prompt)
    order = sorted(distinct.values(), key=lambda prompt: records.position(seed, prompt))
    sides = {"held-out": order[0::2], "validation": order[1::2], "first": list(distinct.values())}
    drawn = {side: sides[side][: counts[side]] for side in sides if side in counts}
    kept = set().union(*drawn.values())
    drawn["adaptation"] = [prompt for prompt in reversed(order) if prompt not in kept][: counts["adaptation"]]
    for side, wanted in counts.items():
        if len(drawn[side]) < wanted:
            raise UserError(
                f"domains.{name}: {wanted} {side} prompts are asked for, {len(drawn[side])} are left of the "
                f"{len(order)} there are (not counting those that differ only in numbers or word order)"
            )
    return drawn


def from_generators(name: str, domain: params.Domain, counts: dict[str, int], seed: int) -> dict[str, list[str]]:
    """A share of the *templates* is held out: problems of one template differ only in names and numbers."""
    wanted = {side: count for side, count in counts.items() if side != "first"}
    sides = {side: [] for side in wanted}
    streams = [records.problems(item.generate, seed) for item in domain.records]
    turns = (problem for turn in zip_longest(*streams) for problem in turn if problem)
    enough = 10_000 + 100 * sum(wanted.values())  # a generator with a single template never fills all sides
    for problem in islice(turns, enough):
        if all(len(sides[side]) >= wanted[side] for side in wanted):
            break
        at = records.position(seed, template(problem))
        side = next((side for side, limit in TEMPLATES_APART.items() if at < limit), "adaptation")
        if len(sides.get(side, ())) < wanted.get(side, 0):
            sides[side].append(problem["question"])
    for side in wanted:
        if len(sides[side]) < wanted[side]:
            raise UserError(
                f"domains.{name}: {wanted[side]} {side} prompts are asked for, its generators gave {len(sides[side])}"
            )
    return sides


def wording(prompt: str) -> str:
    """The prompt's words in alphabetical order; the prompt itself when it has none."""
    return " ".join(sorted(re.findall(r"[^\W\d_]+", prompt.lower()))) or prompt


def template(problem: dict) -> str:
    """What tells a generator's templates apart: the names of the variables it filled in (gsm_symbolic's 85 tasks have
    85 different sets of names), or else the question itself."""
    metadata = problem["metadata"]
    return " ".join([metadata["source_dataset"], *sorted(metadata.get("variables", [problem["question"]]))])


def render(tokenizer, prompt: str, system: str | None) -> list[int]:
    """Token ids of the prompt up to where the response starts, in the tokenizer's own chat template.

    A tokenizer without a template (a base model's) gets plain text, after bos where it adds one. Raises UserError for
    a template that refuses the system prompt or ignores add_generation_prompt.
    """
    if tokenizer.chat_template is None:
        ids = tokenizer(f"{system}\n\n" * bool(system) + f"Question: {prompt}\nAnswer:")["input_ids"]
        return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": prompt}]
    try:
        closed, opened = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add) for add in (False, True)
        )
    except jinja2.TemplateError as error:
        hint = "; leave the target's system out" if system else ""
        raise UserError(f"the target's chat template refuses the prompt: {error}{hint}") from None
    if closed == opened:
        raise UserError(
            "the target's chat template ignores add_generation_prompt: nothing marks where the response starts; "
            "add that branch to chat_template.jinja in the model's folder"
        )
    return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
