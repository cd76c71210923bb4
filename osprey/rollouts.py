"""The target's own responses to each domain's prompts, with taps: what drafters are distilled on and judged by.

One safetensors file per domain and split holds all responses end to end:
  tokens [N] int32        prompt and response of every request
  response [N] uint8      0 in the prompt, else the number of the response (turn) a token belongs to
  greedy [N] int32        the target's argmax at every position
  lengths [R] int64       tokens of each request; they add up to N
  taps [N, 3H] bf16       outputs of the three tapped layers
  last [N, H] bf16        the state that the target's head reads
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from osprey import models, prompts, taps
from osprey.params import Rollouts, UserError
from osprey.progress import Progress

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NGRAM = 4


@dataclass
class Response:
    """One request: T tokens of prompt and response, and what the target computed on them."""

    tokens: torch.Tensor  # [T] int64
    response: torch.Tensor  # [T] 0 in the prompt, else the number of the turn
    greedy: torch.Tensor  # [T]
    taps: torch.Tensor  # [T, 3H]
    last: torch.Tensor  # [T, H]


def grouped_attention(module, query_BHTD, key, value, attention_mask, **kwargs):
    """Scaled dot-product attention that, for a single new token, makes the heads which share a key head the rows of
    one product: the same numbers, several times faster on CPU than repeating the keys."""
    if query_BHTD.shape[2] > 1:
        return sdpa_attention_forward(module, query_BHTD, key, value, attention_mask, **kwargs)
    rows = query_BHTD.view(len(key), key.shape[1], -1, query_BHTD.shape[-1])
    mixed = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return mixed.reshape(len(key), 1, -1, mixed.shape[-1]), None


AttentionInterface.register("osprey_grouped", grouped_attention)
AttentionMaskInterface.register("osprey_grouped", sdpa_mask)


@torch.no_grad()
def generate(model, requests: list[list[int]], temperature: float, max_new_tokens: int, eos: list[int], seed: int):
    """Responses to one batch of prompts (token ids), each ending with an eos token or at the limit."""
    width = max(len(ids) for ids in requests)
    tokens = torch.full((len(requests), width), eos[0])
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(requests):  # left-padded: generation goes on at the right
        tokens[row, width - len(ids) :] = torch.tensor(ids)
        mask[row, width - len(ids) :] = 1
    torch.manual_seed(seed)
    how = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    device = model.device
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("osprey_grouped")
    output = model.generate(
        tokens.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens, eos_token_id=eos,
        pad_token_id=eos[0], repetition_penalty=1.0, **how,
    ).cpu()  # fmt: skip
    responses = []
    for row in output[:, width:].tolist():
        end = next((index for index, token in enumerate(row) if token in eos), len(row) - 1)
        responses.append(row[: end + 1])
    return responses


def roll_out(
    model, requests: list[list[int]], section: Rollouts, temperature: float, eos, seed: int, kept: Path, what: str
):
    """Responses to all prompts, batched by length; every finished batch is kept in `kept` for a restart."""
    order = sorted(range(len(requests)), key=lambda index: (len(requests[index]), index))
    responses: list[list[int]] = [[]] * len(requests)
    progress = Progress(what, len(requests))
    for start in range(0, len(order), section.batch):
        batch = order[start : start + section.batch]
        file = kept / f"{what.replace('/', '-').replace(' ', '-')}-{start}.json"
        if not file.exists():
            made = generate(model, [requests[i] for i in batch], temperature, section.max_new_tokens, eos, seed + start)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(made))
            partial.rename(file)
        for index, response in zip(batch, json.loads(file.read_text())):
            responses[index] = response
        progress.advance(len(batch))
    return responses


def repetition(tokens: list[int]) -> float:
    """Share of a response's 4-grams that occurred in it before; looping text inflates AL."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def with_taps(
    model, sequences: list[tuple[list[int], list[int]]], layers: list[int], what: str
) -> dict[str, torch.Tensor]:
    """One forward of the frozen target per (prompt, response): the tensors of the file described above."""
    parts: dict[str, list[torch.Tensor]] = {key: [] for key in ("tokens", "response", "greedy", "taps", "last")}
    progress = Progress(what, len(sequences))
    for prompt, response in sequences:
        tokens_T = torch.tensor(prompt + response)
        taps_TC, last_TH, greedy_T = taps.forward(model, tokens_T.to(model.device), layers)
        mask_T = torch.tensor([0] * len(prompt) + [1] * len(response), dtype=torch.uint8)
        made = (tokens_T.int(), mask_T, greedy_T.int(), taps_TC.bfloat16(), last_TH.bfloat16())
        for key, tensor in zip(parts, made):
            parts[key].append(tensor.cpu())
        progress.advance()
    lengths = torch.tensor([len(tokens) for tokens in parts["tokens"]])
    return {"lengths": lengths, **{key: torch.cat(tensors) for key, tensors in parts.items()}}


def read(file: Path) -> list[Response]:
    """All requests of one domain and split. Raises UserError when the file is missing or cut short."""
    try:
        with safe_open(file, "pt") as handle:
            stored = {key: handle.get_tensor(key) for key in handle.keys()}
    except Exception as error:  # safetensors has its own kinds, none of them public
        raise UserError(f"{file}: cannot be read ({error}); run the rollouts stage again") from None
    lengths = stored.pop("lengths").tolist()
    stored["tokens"], stored["greedy"] = stored["tokens"].long(), stored["greedy"].long()
    split = {key: tensor.split(lengths) for key, tensor in stored.items()}
    return [Response(**{key: split[key][index] for key in split}) for index in range(len(lengths))]


def response_tokens(file: Path) -> np.ndarray:
    """The response tokens of all requests, end to end."""
    with safe_open(file, "np") as handle:
        return handle.get_tensor("tokens")[handle.get_tensor("response") > 0].astype(np.int64)


def collect(params, name: str, kept: Path, root: Path, out: Path) -> pd.DataFrame:
    """Roll out every domain and split for the target `name` and write `out`; returns the summary table.

    out/<domain>/<split>.safetensors (above), <split>.jsonl (readable), and summary.csv. A response of fewer than
    two tokens teaches nothing: it is skipped and counted. Raises UserError when none is left.
    """
    target, section = params.targets[name], params.rollouts
    folder = root / "data/models" / name
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(folder, DTYPES[section.precision])
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    layers = taps.layer_ids(taps.text_config(model.config).num_hidden_layers, target.taps, name)
    eos = models.eos_ids(folder, tokenizer)
    jobs = []
    for domain, spec in params.domains.items():
        adaptation, held_out = prompts.split(
            domain, spec, section.adaptation_prompts, section.held_out_prompts, params.seed
        )
        jobs.append((domain, "adaptation", adaptation, section.adaptation_temperature))
        jobs.append((domain, "held-out", held_out, section.held_out_temperature))
    rows = []
    with models.finished(out) as made:
        for domain, split, texts, temperature in jobs:
            requests = [prompts.render(tokenizer, text, target.system) for text in texts]
            requests = [ids for ids in requests if len(ids) <= section.max_prompt_tokens]
            what = f"rollouts {domain} {split}"
            responses = roll_out(model, requests, section, temperature, eos, params.seed, kept, what)
            sequences = [(p, r) for p, r in zip(requests, responses) if len(r) > 1]
            if not sequences:
                raise UserError(
                    f"rollouts of {name}, {domain}, {split}: all {len(texts)} responses are empty "
                    f"({len(requests)} prompts are within rollouts.max_prompt_tokens)"
                )
            taps.check_head(model, torch.tensor(sequences[0][0], device=model.device))
            tensors = with_taps(model, sequences, layers, f"taps {domain} {split}")
            (made / domain).mkdir(exist_ok=True)
            save_file(tensors, made / domain / f"{split}.safetensors", metadata={"target": name})
            with open(made / domain / f"{split}.jsonl", "w") as file:
                for prompt, response in sequences:
                    line = {"prompt": tokenizer.decode(prompt), "response": tokenizer.decode(response)}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            lengths = [len(response) for _, response in sequences]
            rows.append({
                "domain": domain, "split": split, "prompts": len(texts), "skipped": len(texts) - len(sequences),
                "tokens": sum(lengths), "mean_tokens": float(np.mean(lengths)),
                "ended": float(np.mean([response[-1] in eos for _, response in sequences])),
                "repetition": float(np.mean([repetition(response) for _, response in sequences])),
            })  # fmt: skip
        summary = pd.DataFrame(rows)
        summary.to_csv(made / "summary.csv", index=False, float_format="%.6g")
    return summary


def examples(folder: Path, domains) -> str:
    """The first held-out request of every domain, to be read."""
    shown = []
    for domain in domains:
        with open(folder / domain / "held-out.jsonl") as file:
            line = json.loads(file.readline())
        shown.append(f"[{domain}]\n{line['prompt']}{line['response']}")
    return "\n\n".join(shown)
