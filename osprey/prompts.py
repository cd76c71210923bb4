"""The domains' prompts: disjoint adaptation and held-out draws, and their ids in the target's own chat template."""

import re
from itertools import islice, zip_longest

import jinja2

from osprey import params, records
from osprey.params import UserError

TEMPLATES_HELD_OUT = 0.2  # of a generator's templates


def split(
    domain_name: str, domain: params.Domain, adaptation: int, held_out: int, seed: int
) -> tuple[list[str], list[str]]:
    """(adaptation prompts, held-out prompts) in the domain's template: disjoint seeded samples of distinct prompts.

    Prompts that share all but numbers, punctuation and word order count as one, or a held-out prompt could be an
    adaptation prompt with other figures. Each side stays the same when only the other's count changes, and grows
    without reshuffling when its own does. Raises UserError when there are too few.
    """
    generators = [item for item in domain.records if item.generate]
    if generators and len(generators) < len(domain.records):
        raise UserError(f"domains.{domain_name}.records: generated and stored prompts cannot be mixed in one domain")
    draw = from_generators if generators else from_records
    sides = draw(domain_name, domain, adaptation, held_out, seed)
    return tuple([domain.template.replace("{prompt}", prompt) for prompt in side] for side in sides)


def from_records(name: str, domain: params.Domain, adaptation: int, held_out: int, seed: int):
    """One seeded order of all prompts: held-out ones are taken from its front, adaptation ones from its back."""
    distinct = {}
    for item in domain.records:
        for prompt in map(str.strip, records.texts(item)):
            if prompt:
                distinct.setdefault(wording(prompt), prompt)
    order = sorted(distinct.values(), key=lambda prompt: records.position(seed, prompt))
    if adaptation + held_out > len(order):
        raise UserError(
            f"domains.{name}: {adaptation} adaptation and {held_out} held-out prompts are asked for, "
            f"there are {len(order)} (not counting those that differ only in numbers or word order)"
        )
    return order[::-1][:adaptation], order[:held_out]


def from_generators(name: str, domain: params.Domain, adaptation: int, held_out: int, seed: int):
    """A fifth of the *templates* is held out: problems of one template differ only in names and numbers."""
    wanted = {"adaptation": adaptation, "held-out": held_out}
    sides = {side: [] for side in wanted}
    streams = [records.problems(item.generate, seed) for item in domain.records]
    turns = (problem for turn in zip_longest(*streams) for problem in turn if problem)
    enough = 10_000 + 100 * (adaptation + held_out)  # a generator with a single template never fills both sides
    for problem in islice(turns, enough):
        if all(len(sides[side]) >= wanted[side] for side in wanted):
            break
        side = "held-out" if records.position(seed, template(problem)) < TEMPLATES_HELD_OUT else "adaptation"
        if len(sides[side]) < wanted[side]:
            sides[side].append(problem["question"])
    for side in wanted:
        if len(sides[side]) < wanted[side]:
            raise UserError(
                f"domains.{name}: {wanted[side]} {side} prompts are asked for, its generators gave {len(sides[side])}"
            )
    return sides["adaptation"], sides["held-out"]


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
