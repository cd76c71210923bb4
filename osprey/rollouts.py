"""The target's own responses to each domain's prompts, with taps: what drafters are distilled on and judged by.

One safetensors file per domain and split holds all responses end to end:
  tokens [N] int32        prompt and response of every request
  response [N] uint8      0 in the prompt, else the number of the response (turn) a token belongs to
  greedy [N] int32        the target's argmax after every position from the last of the prompt on; 0 elsewhere
  lengths [R] int64       tokens of each request; they add up to N
  taps [N, 3H] bf16       outputs of the three tapped layers
  last [N, H] bf16        the state that the target's head reads
The target never read a response's last token: taps, last and greedy are zeros there.
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
from transformers import AttentionInterface, LogitsProcessor, LogitsProcessorList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from osprey import models, prompts, taps
from osprey.params import Rollouts, UserError
from osprey.progress import Progress

STORED = {
    "tokens": torch.int32, "response": torch.uint8, "greedy": torch.int32,
    "taps": torch.bfloat16, "last": torch.bfloat16,
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NGRAM = 4
BLOCK = 256  # tokens drawn from together


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


class Sample(LogitsProcessor):
    """Sampling for greedy search: leaves one token per row, drawn from the softmax.

    First a block of tokens is drawn by its probability, then a token by its own inside the block: two uniform numbers
    a row, where the stock sampler's one per vocabulary entry take a third of the time of a step.
    """

    def __init__(self, temperature: float, generator: torch.Generator):
        self.temperature, self.generator = temperature, generator

    def draw(self, weights_BN):
        """An index for each row, with probability in proportion to its weights: the inverse of their running sum."""
        sums_BN = weights_BN.double().cumsum(-1)
        uniform_B1 = torch.rand(len(sums_BN), 1, generator=self.generator, dtype=torch.float64).to(sums_BN.device)
        return torch.searchsorted(sums_BN, uniform_B1 * sums_BN[:, -1:], right=True)

    def __call__(self, input_ids, scores_BV):
        blocks_BNM = (scores_BV.float() / self.temperature).softmax(-1)
        blocks_BNM = F.pad(blocks_BNM, (0, -scores_BV.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        block_B1 = self.draw(blocks_BNM.sum(-1))
        inside_BM = blocks_BNM.take_along_dim(block_B1[..., None], dim=1).squeeze(1)
        token_B1 = block_B1 * BLOCK + self.draw(inside_BM)
        return torch.full_like(scores_BV, -torch.inf).scatter(-1, token_B1, 0.0)


@torch.no_grad()
def generate(
    model, requests: list[list[int]], layers: list[int], temperature: float, max_new_tokens: int, eos: list[int], seed
) -> list[Response]:
    """Responses to one batch of prompts (token ids), each ending with an eos token or at the limit.

    Taps, last states and greedy tokens are those of the very passes that generated: nothing is computed twice. The
    last token of a response was never read by the target, so its three are zeros.
    """
    width, device = max(len(ids) for ids in requests), model.device
    tokens = torch.full((len(requests), width), eos[0])
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(requests):  # left-padded: generation goes on at the right
        tokens[row, width - len(ids) :] = torch.tensor(ids)
        mask[row, width - len(ids) :] = 1
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("osprey_grouped")
    sampler = [Sample(temperature, torch.Generator().manual_seed(seed))] if temperature > 0 else []
    with taps.Recording(model, layers) as recorded:
        output = model.generate(
            tokens.to(device), attention_mask=mask.to(device), max_new_tokens=max_new_tokens, eos_token_id=eos,
            pad_token_id=eos[0], repetition_penalty=1.0, do_sample=False, logits_processor=LogitsProcessorList(sampler),
        ).cpu()  # fmt: skip
    taps_BTC, last_BTH, greedy_BS = recorded.tensors()
    responses = []
    for row, ids in enumerate(requests):
        made = output[row, width:].tolist()
        made = made[: next((index for index, token in enumerate(made) if token in eos), len(made) - 1) + 1]
        read = slice(width - len(ids), width + len(made) - 1)  # columns of the tokens that the target read
        greedy_T = torch.zeros(len(ids) + len(made), dtype=torch.int64)
        greedy_T[len(ids) - 1 : -1] = greedy_BS[row, : len(made)]
        responses.append(Response(
            tokens=torch.tensor(ids + made), response=torch.tensor([0] * len(ids) + [1] * len(made)), greedy=greedy_T,
            taps=F.pad(taps_BTC[row, read], (0, 0, 0, 1)), last=F.pad(last_BTH[row, read], (0, 0, 0, 1)),
        ))  # fmt: skip
    return responses


def roll_out(
    model, requests: list[list[int]], layers: list[int], section: Rollouts, temperature: float, eos, seed: int,
    kept: Path, what: str,
) -> list[Response]:  # fmt: skip
    """Responses to all prompts, batched by length; every finished batch is kept in `kept` for a restart."""
    order = sorted(range(len(requests)), key=lambda index: (len(requests[index]), index))
    responses = {}
    progress = Progress(what, len(requests))
    for start in range(0, len(order), section.batch):
        batch = order[start : start + section.batch]
        file = kept / f"{what.replace('/', '-').replace(' ', '-')}-{start}.safetensors"
        if not file.exists():
            asked = [requests[index] for index in batch]
            write(generate(model, asked, layers, temperature, section.max_new_tokens, eos, seed + start), file)
        responses.update(zip(batch, read(file), strict=True))
        progress.advance(len(batch))
    return [responses[index] for index in range(len(requests))]


def repetition(tokens: list[int]) -> float:
    """Share of a response's 4-grams that occurred in it before; looping text inflates AL."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def write(responses: list[Response], file: Path) -> None:
    """The file described above, whole or not at all."""
    stored = {
        key: torch.cat([getattr(response, key) for response in responses]).to(dtype) for key, dtype in STORED.items()
    }
    stored["lengths"] = torch.tensor([len(response.tokens) for response in responses])
    partial = file.with_suffix(".partial")
    save_file(stored, partial)
    partial.rename(file)


def tensors(file: Path, *keys: str) -> dict[str, torch.Tensor]:
    """The named tensors of the file. Raises UserError when it is missing or cut short."""
    try:
        with safe_open(file, "pt") as handle:
            return {key: handle.get_tensor(key) for key in keys}
    except Exception as error:  # safetensors has its own kinds, none of them public
        raise UserError(f"{file}: cannot be read ({error}); run the rollouts stage again") from None


def read(file: Path) -> list[Response]:
    """All requests of one domain and split. Raises UserError when the file is missing or cut short."""
    stored = tensors(file, "lengths", *STORED)
    lengths = stored.pop("lengths").tolist()
    stored["tokens"], stored["greedy"] = stored["tokens"].long(), stored["greedy"].long()
    split = {key: tensor.split(lengths) for key, tensor in stored.items()}
    return [Response(**{key: split[key][index] for key in split}) for index in range(len(lengths))]


def response_tokens(file: Path) -> np.ndarray:
    """The response tokens of all requests, end to end. Raises UserError likewise."""
    stored = tensors(file, "tokens", "response")
    return stored["tokens"][stored["response"] > 0].numpy().astype(np.int64)


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
    layers = taps.layer_ids(model.config.get_text_config().num_hidden_layers, target.taps, name)
    eos = models.eos_ids(folder, tokenizer)
    taps.check_head(model, torch.tensor([eos[:1] * 2], device=model.device))
    rows = []
    with models.finished(out) as made:
        for domain, spec in params.domains.items():
            (made / domain).mkdir()
            for split, texts in prompts.split(domain, spec, section.prompts, params.seed).items():
                temperature = section.adaptation_temperature if split == "adaptation" else section.held_out_temperature
                requests = [prompts.render(tokenizer, text, target.system) for text in texts]
                requests = [ids for ids in requests if len(ids) <= section.max_prompt_tokens]
                what = f"rollouts {domain} {split}"
                responses = roll_out(model, requests, layers, section, temperature, eos, params.seed, kept, what)
                responses = [response for response in responses if response.response.sum() > 1]
                if not responses:
                    raise UserError(
                        f"rollouts of {name}, {domain}, {split}: all {len(texts)} responses are empty "
                        f"({len(requests)} prompts are within rollouts.max_prompt_tokens)"
                    )
                write(responses, made / domain / f"{split}.safetensors")
                answers = [response.tokens[response.response > 0].tolist() for response in responses]
                with open(made / domain / f"{split}.jsonl", "w") as file:
                    for response, answer in zip(responses, answers, strict=True):
                        prompt = tokenizer.decode(response.tokens[response.response == 0])
                        line = {"prompt": prompt, "response": tokenizer.decode(answer)}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                rows.append({
                    "domain": domain, "split": split, "prompts": len(texts), "skipped": len(texts) - len(responses),
                    "tokens": sum(map(len, answers)), "mean_tokens": float(np.mean([len(a) for a in answers])),
                    "ended": float(np.mean([answer[-1] in eos for answer in answers])),
                    "repetition": float(np.mean([repetition(answer) for answer in answers])),
                })  # fmt: skip
        summary = pd.DataFrame(rows)
        summary.to_csv(made / "summary.csv", index=False, float_format="%.6g")
    return summary


def examples(folder: Path, domains, split: str) -> str:
    """The first request of every domain's split, to be read."""
    shown = []
    for domain in domains:
        with open(folder / domain / f"{split}.jsonl") as file:
            line = json.loads(file.readline())
        shown.append(f"[{domain}]\n{line['prompt']}{line['response']}")
    return "\n\n".join(shown)
