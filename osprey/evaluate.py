"""Accepted length by replay, and the ledger of what was offered and accepted (design, section 7).

Greedy decoding is lossless: the target's continuation does not depend on the drafter. So all chains of a recorded
response are drafted at once and walked from its first token, which gives the counts of token-by-token speculation
without running the target. The same holds in distribution for rollouts sampled at a temperature.
"""

import os
from pathlib import Path

import pandas as pd
import torch

from osprey import checkpoint, rollouts, stats, supervision
from osprey.params import UserError
from osprey.progress import Progress
from osprey.unroll import unroll


@torch.no_grad()
def accepted_runs(drafter, tokens_T: torch.Tensor, response_T: torch.Tensor, taps_TC: torch.Tensor, steps: int):
    """Chain starts [S] and, for each, how many drafts in a row equal the response's tokens, [S].

    tokens_T, response_T and taps_TC are a recorded request's (rollouts.Response); `steps` drafts a chain. A chain that
    has missed ends there, so what the others hold, their own drafts, are the response's tokens.
    """
    starts_S = supervision.chain_starts(response_T)
    position_KS, inside_KS = supervision.predicted(response_T, starts_S, steps)
    runs_S, alive_A = torch.zeros_like(starts_S), torch.arange(len(starts_S), device=starts_S.device)
    chains = unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], steps)
    hidden_1AD = next(chains)
    for k in range(steps):
        hit_A = inside_KS[k, alive_A] & (drafter.draft(hidden_1AD)[0] == tokens_T[position_KS[k, alive_A]])
        alive_A = alive_A[hit_A]
        runs_S[alive_A] += 1
        if k + 1 == steps or not len(alive_A):
            return starts_S, runs_S
        hidden_1AD = chains.send(hit_A.nonzero().squeeze(-1))


def walk(starts_S: torch.Tensor, runs_S: torch.Tensor) -> list[int]:
    """Accepted drafts of each verification step of one response, from its first token to its last.

    The chain at index i has emitted token i + 1; a step emits its run and one token of the target. The last run is
    clipped by the response's end.
    """
    run_at = dict(zip(starts_S.tolist(), runs_S.tolist()))
    index, accepted = int(starts_S[0]), []
    while index in run_at:
        accepted.append(run_at[index])
        index += run_at[index] + 1
    return accepted


def ledger_row(accepted: list[int], tokens: int, steps: int) -> dict:
    """Counts of one request of `tokens` response tokens: T, V, accepted drafts, and both by lookahead position.

    offered_k: steps whose k-th draft lay inside the response; accepted_k: steps whose first k drafts were accepted.
    """
    row = {"tokens": tokens, "verifications": len(accepted), "accepted": sum(accepted)}
    left, offered, hit = tokens - 1, [0] * steps, [0] * steps
    for run in accepted:
        for k in range(steps):
            offered[k] += left > k
            hit[k] += run > k
        left -= run + 1
    row |= {f"offered_{k + 1}": offered[k] for k in range(steps)}
    return row | {f"accepted_{k + 1}": hit[k] for k in range(steps)}


def replay(drafter, responses: list[rollouts.Response], steps: int, precision: str) -> pd.DataFrame:
    """The ledger of a drafter on recorded single-response requests, one row each."""
    rows, device = [], drafter.fc.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        for request, response in enumerate(responses):
            given = (tensor.to(device) for tensor in (response.tokens, response.response, response.taps.float()))
            starts, runs = accepted_runs(drafter, *given, steps)
            accepted = walk(starts, runs) if len(starts) else []
            tokens = int((response.response > 0).sum())
            rows.append({"request": request, **ledger_row(accepted, tokens, steps)})
    return pd.DataFrame(rows)


def evaluate(params, drafter_name: str, root: Path, out: Path) -> pd.DataFrame:
    """Replay every run of one (target, recipe), and its undistilled start, on every domain; write the ledger `out`.

    The records' first prompts, where the rollouts have them, are for comparison with the sample: in domain only.
    """
    spec = params.drafters[drafter_name]
    folder = root / "data/rollouts" / spec.target
    recorded = {
        (split, domain): rollouts.read(folder / domain / f"{split}.safetensors")
        for split in (params.evaluate.split, *({"first"} & set(params.rollouts.prompts)))
        for domain, about in params.domains.items()
        if split != "first" or not any(item.generate for item in about.records)
    }
    undistilled = {"run": "undistilled", "adaptation": "none", "lr": 0.0}
    contestants = [(undistilled, root / "data/converted" / drafter_name)]
    for name, run in params.runs.items():
        if (run.target, run.recipe) == (spec.target, spec.recipe):
            about = {"run": name, "adaptation": run.domain, "lr": run.lr}
            contestants.append((about, root / "data/drafters" / spec.target / spec.recipe / name))
    frames = []
    progress = Progress(f"evaluate {drafter_name}", len(contestants))
    for about, checkpoint_folder in contestants:
        drafter = checkpoint.load(checkpoint_folder).to("cuda" if torch.cuda.is_available() else "cpu")
        for (split, domain), responses in recorded.items():
            if split == "first" and about["adaptation"] not in (domain, "none"):
                continue
            ledger = replay(drafter, responses, params.evaluate.steps, params.evaluate.precision)
            labels = {"target": spec.target, "recipe": spec.recipe, **about, "evaluation": domain, "split": split}
            frames.append(pd.DataFrame([labels] * len(ledger)).join(ledger))
        progress.advance(note=about["run"])
    frame = pd.concat(frames)
    if not (frame["verifications"] > 0).any():
        raise UserError(f"evaluate {drafter_name}: no {params.evaluate.split} response is long enough to measure")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    frame.to_csv(partial, index=False)
    os.replace(partial, out)
    return frame


def matrix(ledger: pd.DataFrame, split: str) -> pd.DataFrame:
    """Mean AL on the split's prompts, adaptation (and learning rate) by evaluation domain."""
    cells = stats.measured(ledger[ledger.split == split]).groupby(["adaptation", "lr", "evaluation"], sort=False).al
    return cells.mean().unstack("evaluation").round(3)
