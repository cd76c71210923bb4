"""How often replay on recorded taps disagrees with decoding token by token (design, section 7).

In exact arithmetic they agree. A bf16 target does not quite: its taps were recorded in a padded batch, a token at a
time, while decoding verifies several tokens of one request at once. So its text may part from the recorded one, and on
the same text a draft may fall on the other side of a near tie.
"""

import os
from pathlib import Path

import pandas as pd
import torch

from osprey import checkpoint, decode, evaluate, models, rollouts, taps
from osprey.params import UserError
from osprey.progress import Progress

RECIPE = "osprey"  # whose drafters are compared, where the target has any


def compare(
    target, drafter, layers: list[int], response: rollouts.Response, steps: int, limit: int, eos: list[int],
    precision: str,
) -> dict:  # fmt: skip
    """One recorded single-response request against decoding its prompt greedily, to `limit` tokens or an `eos`.

    tokens     of the recorded response
    common     tokens from its first one on that the decoded response has too
    steps      verification steps of the decoding all of whose emitted tokens are among these
    equal      those of them in which replay, from the same place of the recorded response, accepts as many drafts
    decoded_tokens, decoded_verifications, replayed_tokens, replayed_verifications    the two responses, whole

    `precision` is the drafter's (evaluate.precision), as in replay. A response recorded at a temperature shares few
    tokens with the decoded one, and so compares few steps.
    """
    recorded = response.tokens[response.response > 0].tolist()
    prompt = response.tokens[response.response == 0].tolist()
    device = drafter.fc.weight.device
    with device, torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        decoded, _, accepted = decode.speculate(target, drafter, layers, prompt, steps, limit, eos)
        given = (tensor.to(device) for tensor in (response.tokens, response.response, response.taps.float()))
        starts, runs = evaluate.accepted_runs(drafter, *given, steps)
    run_at = dict(zip(starts.tolist(), runs.tolist()))
    pairs = enumerate(zip(recorded, decoded))
    common = next((at for at, (one, other) in pairs if one != other), min(len(recorded), len(decoded)))

    compared, equal, emitted = 0, 0, 1  # the prefill emits the first token
    for run in accepted:
        after = min(emitted + run + 1, len(decoded))  # the last step may end on a draft
        if after > common:
            break
        compared += 1
        equal += run_at[len(prompt) + emitted - 2] == run  # the chain at index i has emitted token i + 1
        emitted = after
    return {
        "tokens": len(recorded), "common": common, "steps": compared, "equal": equal,
        "decoded_tokens": len(decoded), "decoded_verifications": len(accepted), "replayed_tokens": len(recorded),
        "replayed_verifications": len(evaluate.walk(starts, runs)) if len(starts) else 0,
    }  # fmt: skip


def contestants(runs: dict, target: str, domains) -> dict[str, str]:
    """Domain -> the run compared on its requests: the first one adapted on it, of RECIPE or else the first recipe."""
    mine = {name: run for name, run in runs.items() if run.target == target}
    if not mine:
        raise UserError(f"targets.{target}: no run drafts for it, so there is nothing to compare; add one to runs")
    recipes = [run.recipe for run in mine.values()]
    recipe = RECIPE if RECIPE in recipes else recipes[0]
    found = {}
    for name, run in mine.items():
        if run.recipe == recipe:
            found.setdefault(run.domain, name)
    return {domain: found[domain] for domain in domains if domain in found}


def agree(params, name: str, root: Path, out: Path) -> pd.DataFrame:
    """Compare the first `agreement.requests` requests of every domain for the target `name`; write the table `out`."""
    folder, section = root / "data/models" / name, params.rollouts
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = models.load_model(folder, rollouts.DTYPES[section.precision]).to(device)
    target.forward = torch.autocast(device.type, enabled=False)(target.forward)  # not in the drafter's
    layers = taps.layer_ids(target.config.get_text_config().num_hidden_layers, params.targets[name].taps, name)
    eos = models.eos_ids(folder, models.load_tokenizer(folder))
    runs = contestants(params.runs, name, params.domains)
    rows, progress = [], Progress(f"agreement {name}", len(runs) * params.agreement.requests)
    for domain, run in runs.items():
        drafter = checkpoint.load(root / "data/drafters" / name / params.runs[run].recipe / run).to(device)
        file = root / "data/rollouts" / name / domain / f"{params.evaluate.split}.safetensors"
        for request, response in enumerate(rollouts.read(file)[: params.agreement.requests]):
            how = params.evaluate.steps, section.max_new_tokens, eos, params.evaluate.precision
            row = compare(target, drafter, layers, response, *how)
            rows.append({"run": run, "evaluation": domain, "request": request, **row})
            progress.advance(note=f"{domain}: {row['equal']} of {row['steps']} steps agree")
    table = pd.DataFrame(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    table.to_csv(partial, index=False)
    os.replace(partial, out)
    return table


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """The counts by domain and in all, with the shares of tokens in common and of steps that agree."""
    sums = table.groupby("evaluation", sort=False)[["tokens", "common", "steps", "equal"]].sum()
    sums.loc["all"] = sums.sum()
    return sums.assign(common_share=sums["common"] / sums["tokens"], equal_share=sums["equal"] / sums["steps"]).round(3)
