"""Speculation on a text of one's own: what notebooks/explore.ipynb shows. In no stage; it reads the stages' outputs.

Greedy decoding is lossless: the target's response is the same whoever drafts. So the target answers once and every
drafter is replayed on its answer. osprey/pictures.py draws what is computed here.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from transformers.utils import logging

from osprey import align, checkpoint, evaluate, models, prompts, rates, rollouts, stats, taps
from osprey.params import UserError
from osprey.unroll import unroll


@dataclass
class Desk:
    """A target that is ready to answer, and all that is needed to read it."""

    params: object  # params.load()
    root: Path  # the stage outputs are below it
    target: str
    model: object
    tokenizer: object
    layers: list[int]  # tapped
    eos: list[int]
    own: align.Vocabulary


@dataclass
class Trace:
    """How one drafter fares on a response of N tokens."""

    run: str
    steps: int  # drafts a verification step
    accepted: list[int]  # drafts, of every verification step
    drafts: list[list[int]]  # of every verification step; those after the first miss read tokens that were not drafted
    kinds: list[str]  # [N] what every token is: prefill, accepted, correction or bonus
    step_of: list[int]  # [N] the verification step that emitted it, from 1; 0 for the prefill


def need(root: Path, inside: str) -> Path:
    """The path of a stage output. Raises UserError when it has not been made."""
    if not (root / inside).exists():
        raise UserError(f"{inside}: no such file; make it with dvc repro")
    return root / inside


def open_target(params, target: str, root: Path) -> Desk:
    """Load the target in the precision of its rollouts. Raises UserError when it is not in params.yaml or not made."""
    if target not in params.targets:
        raise UserError(f"target: {target!r} is not among targets in params.yaml ({', '.join(params.targets)})")
    logging.disable_progress_bar()
    folder = need(root, f"data/models/{target}")
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(folder, rollouts.DTYPES[params.rollouts.precision])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    layers = taps.layer_ids(model.config.get_text_config().num_hidden_layers, params.targets[target].taps, target)
    own = align.vocabulary(tokenizer)
    return Desk(params, root, target, model, tokenizer, layers, models.eos_ids(folder, tokenizer), own)


def run_folder(desk: Desk, recipe: str, adaptation: str) -> str:
    """Where the drafter of `recipe` adapted on the domain `adaptation` lies. Raises UserError when no run makes it."""
    runs = rates.grid(desk.params, desk.target).get(recipe, {})
    if adaptation not in runs:
        there = f"it has {', '.join(runs)}" if runs else "it has none"
        raise UserError(
            f"runs: {desk.target} has no {recipe} drafter adapted on {adaptation!r} in params.yaml ({there})"
        )
    return f"data/drafters/{desk.target}/{recipe}/{runs[adaptation]}"


def open_drafters(desk: Desk, recipes: list[str], adaptation: str) -> dict:
    """recipe -> its drafter adapted on the domain `adaptation`, and the name of the run that made it."""
    found = {}
    for recipe in recipes:
        folder = need(desk.root, run_folder(desk, recipe, adaptation))
        found[recipe] = checkpoint.load(folder).to(desk.model.device), folder.name
    return found


def respond(desk: Desk, texts: list[str]) -> list[rollouts.Response]:
    """The target's greedy responses to prompts, of at most rollouts.max_new_tokens, with taps."""
    section = desk.params.rollouts
    requests = [prompts.render(desk.tokenizer, text, desk.params.targets[desk.target].system) for text in texts]
    for text, ids in zip(texts, requests):
        if len(ids) > section.max_prompt_tokens:
            limit = f"the limit, rollouts.max_prompt_tokens, is {section.max_prompt_tokens}"
            raise UserError(f"prompt {text[:40]!r}…: {len(ids)} tokens; {limit}")
    responses = []
    for start in range(0, len(requests), section.batch):
        batch = requests[start : start + section.batch]
        how = desk.layers, 0.0, section.max_new_tokens, desk.eos, desk.params.seed
        responses += rollouts.generate(desk.model, batch, *how)
    if not any(response.response.sum() > 1 for response in responses):
        raise UserError("prompts: no response has two tokens, so there is nothing to draft; try other prompts")
    return responses


def answer(response: rollouts.Response) -> list[int]:
    return response.tokens[response.response > 0].tolist()


@torch.no_grad()
def trace(drafter, response: rollouts.Response, steps: int, precision: str, run: str = "") -> Trace:
    """Replay the drafter on a single-response request. `precision`: evaluate.precision."""
    device = drafter.fc.weight.device
    tokens_T, response_T, taps_TC = (t.to(device) for t in (response.tokens, response.response, response.taps.float()))
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        starts_S, runs_S = evaluate.accepted_runs(drafter, tokens_T, response_T, taps_TC, steps)
        chains = unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], steps)
        drafts_SK = torch.stack([drafter.draft(hidden_1SD)[0] for hidden_1SD in chains], dim=-1)
    accepted = evaluate.walk(starts_S, runs_S) if len(starts_S) else []
    kinds, step_of, drafts = ["prefill"], [0], []
    for step, count in enumerate(accepted, start=1):
        drafts.append(drafts_SK[len(kinds) - 1].tolist())  # chain 0 starts from the first token
        kinds += ["accepted"] * count + ["bonus" if count == steps else "correction"]
        step_of += [step] * (count + 1)
    length = int((response_T > 0).sum())  # the last step may end on a draft
    return Trace(run, steps, accepted, drafts, kinds[:length], step_of[:length])


def replay(desk: Desk, drafters: dict, response: rollouts.Response) -> dict[str, Trace]:
    """recipe -> the trace of its drafter on the response."""
    how = desk.params.evaluate.steps, desk.params.evaluate.precision
    return {recipe: trace(drafter, response, *how, run) for recipe, (drafter, run) in drafters.items()}


def compare(one: Trace, other: Trace) -> list[str]:
    """Of every token: `one` or `other` if only that drafter drafted it rightly, else ``.

    Rightly drafted is what was accepted; the other one must have missed there. A bonus token is no miss: its drafter
    was not asked.
    """
    marks = {("accepted", "correction"): "one", ("correction", "accepted"): "other"}
    return [marks.get(pair, "") for pair in zip(one.kinds, other.kinds, strict=True)]


def new_domain(desk: Desk, texts: list[str]) -> pd.DataFrame:
    """AL of all the target's drafters on its responses to prompts, before distillation and by adaptation domain.

    `best` is the adaptation domain with the highest AL.
    """
    section, responses, rows = desk.params.evaluate, respond(desk, texts), {}
    for recipe, runs in rates.grid(desk.params, desk.target).items():
        folders = {"undistilled": f"data/converted/{desk.target}-{recipe}"}
        folders |= {domain: run_folder(desk, recipe, domain) for domain in desk.params.domains if domain in runs}
        rows[recipe] = {}
        for column, folder in folders.items():
            drafter = checkpoint.load(need(desk.root, folder)).to(desk.model.device)
            ledger = evaluate.replay(drafter, responses, section.steps, section.precision)
            rows[recipe][column] = stats.measured(ledger).al.mean()
    frame = pd.DataFrame(rows).T
    best = frame.drop(columns="undistilled").idxmax(axis=1)
    return frame.round(3).assign(best=best)


def alignment(file: Path, ids: list[int]) -> list[dict[str, str]]:
    """The lines of alignment.csv about target tokens (eq. 4), in the order of `ids`."""
    with open(file, encoding="utf-8", newline="") as lines:
        found = {int(line["target_id"]): line for line in csv.DictReader(lines) if int(line["target_id"]) in set(ids)}
    return [found[i] for i in ids]


def nearest(row_D: torch.Tensor, weight_SD: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The rows with the highest cosine to a row: (index, cosine), highest first."""
    top = (F.normalize(weight_SD, dim=-1) @ F.normalize(row_D, dim=-1)).topk(count)
    return list(zip(top.indices.tolist(), top.values.tolist()))
