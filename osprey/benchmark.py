"""`python -m osprey.benchmark`: the speed of the two things that make a laptop enough.

Distillation: one training-time-test step as distill.py takes it, against the plain formulation, which computes every
position at every step and keeps the logits whole: student and teacher [B, T, V], soft cross entropy by autograd,
masked mean. Both run forward and backward in bf16 autocast on the same random weights and response, at the laptop
preset's shapes: a response of 96 tokens after a prompt of 160, K = 5, SmolLM2's two-layer backbone and its vocabulary
of 49,152 or a draft vocabulary of 8,192 rows. Ours has the embedding cut to the rows that occur, as Stage 4 has.

Evaluation: replay against token-by-token decoding (decode.py) of the same requests, with the laptop preset's own
target and drafter where `make repro` has made them, else with random ones of their shapes, whose drafts never fit.
Only in the first case are the ratios kept, in results/timings/benchmark.csv, and inserted into README.md.

Two threads, about two minutes; needs both cores to itself.
"""

import os
import sys
import time

import pandas as pd
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from osprey import checkpoint, decode, distill, evaluate, models, readme, rollouts, stages, taps
from osprey.drafter import Drafter
from osprey.params import ROOT, UserError
from osprey.rollouts import Response
from osprey.unroll import unroll

PROMPT, RESPONSE, STEPS, DECAY = 160, 96, 5, 0.8
WIDTH, VOCABULARY, REDUCED = 576, 49_152, 8_192
REPEATS = 5
TARGET = ROOT / "data/models/smollm2"  # of the laptop preset, as the next two
DRAFTER = ROOT / "data/drafters/smollm2/osprey/smollm2-osprey-chat"
RECORDED = ROOT / "data/rollouts/smollm2/chat/held-out.safetensors"
REQUESTS, DECODINGS = 4, 3
OUT = ROOT / "results/timings/benchmark.csv"


def smollm2_config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=WIDTH, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=VOCABULARY, tie_word_embeddings=False,
    )  # fmt: skip


def random_drafter(draft_vocabulary: int) -> Drafter:
    """SmolLM2's shape with two layers, untrained; it drafts the first `draft_vocabulary` ids."""
    config = smollm2_config(layers=2)
    config.swap_h_and_emb, config.target_hidden_size, config.draft_vocab_size = True, WIDTH, draft_vocabulary
    drafter = Drafter(config)
    drafter.t2d[:draft_vocabulary] = True
    return drafter


def random_response() -> Response:
    """A request whose greedy tokens can all be drafted, so that both vocabularies teach equally many positions."""
    length = PROMPT + RESPONSE
    return Response(
        tokens=torch.randint(VOCABULARY, (length,)), response=(torch.arange(length) >= PROMPT).to(torch.uint8),
        greedy=torch.randint(REDUCED, (length,)), taps=torch.randn(length, 3 * WIDTH).bfloat16(),
        last=torch.randn(length, WIDTH).bfloat16(),
    )  # fmt: skip


def ours(drafter: Drafter, response: Response, head_VH: torch.Tensor):
    """A function that returns the loss of one micro-batch, by way of distill.py."""
    samples = [distill.sample(response, STEPS, drafter.t2d)]
    distill.compact_embedding(drafter, samples)
    batch, distiller = distill.collate(samples), distill.Distiller(drafter, head_VH, None, STEPS, DECAY)
    return lambda: distiller(**batch)["loss"]


def plain(drafter: Drafter, response: Response, head_VH: torch.Tensor):
    """Likewise, from the definition (eq. 5): chains from everywhere, whole logits, a mask."""
    tokens_BT, taps_BTC, last_BTH = response.tokens[None], response.taps[None].float(), response.last[None]
    index_S = torch.arange(len(response.tokens) - 1)
    inside_T = F.pad(response.response > 0, (0, STEPS + 1))  # nothing is taught beyond the end
    taught_KS = torch.stack([inside_T[index_S + 1] & inside_T[index_S + 2 + k] for k in range(STEPS)])

    def loss():
        teacher_BTV = (last_BTH @ head_VH.T).float().softmax(-1)
        total = 0
        for k, hidden_BSD in enumerate(unroll(drafter, tokens_BT, taps_BTC, index_S[None], STEPS)):
            logits_BSV = drafter.logits(hidden_BSD).float()
            target_BSV = F.pad(teacher_BTV[:, 1 + k :], (0, 0, 0, k))  # index i learns from position i + 1 + k
            each_BS = F.cross_entropy(logits_BSV.transpose(1, 2), target_BSV.transpose(1, 2), reduction="none")
            total = total + DECAY**k * (each_BS * taught_KS[k]).sum() / taught_KS[0].sum()
        return total

    return loss


def step(drafter: Drafter, loss) -> tuple[float, float]:
    """Seconds of one forward and backward, and the loss."""
    drafter.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss()
    value.backward()
    return time.perf_counter() - begun, value.item()


def distillation() -> pd.DataFrame:
    """Median seconds of each formulation at each vocabulary, measured in turns, and the losses, which must agree."""
    response, whole_VH = random_response(), torch.randn(VOCABULARY, WIDTH).mul_(WIDTH**-0.5).bfloat16()
    contestants = {}
    for size in (VOCABULARY, REDUCED):
        for make in (plain, ours):
            torch.manual_seed(1)
            drafter = random_drafter(size)
            contestants[make.__name__, size] = drafter, make(drafter, response, whole_VH[:size])
    rows = []
    for repeat in range(REPEATS + 1):
        for (formulation, size), contestant in contestants.items():
            seconds, loss = step(*contestant)
            if repeat:  # the first one fetches memory
                rows.append({"vocabulary": size, "formulation": formulation, "seconds": seconds, "loss": loss})
    return pd.DataFrame(rows).groupby(["vocabulary", "formulation"]).median()


def decoders(own: bool):
    """Target, drafter, tapped layers, prompts and eos ids: the laptop preset's `own`, or random."""
    if own:
        target, drafter = models.load_model(TARGET, torch.bfloat16), checkpoint.load(DRAFTER)
        recorded = rollouts.read(RECORDED)[:REQUESTS]
        prompts = [response.tokens[response.response == 0].tolist() for response in recorded]
        eos = models.eos_ids(TARGET, models.load_tokenizer(TARGET))
    else:
        target, drafter = LlamaForCausalLM(smollm2_config(layers=30)).bfloat16().eval(), random_drafter(VOCABULARY)
        prompts, eos = torch.randint(VOCABULARY, (REQUESTS, PROMPT)).tolist(), []
    return target, drafter, taps.layer_ids(target.config.num_hidden_layers, None, TARGET.name), prompts, eos


def replaying(own: bool) -> tuple[float, float]:
    """Seconds in all to decode some requests and to replay them: the sums of each one's median, measured in turns."""
    target, drafter, layers, prompts, eos = decoders(own)
    rows = []
    for repeat in range(DECODINGS + 1):
        for number, prompt in enumerate(prompts):
            begun = time.perf_counter()
            tokens, taps_TC, accepted = decode.speculate(target, drafter, layers, prompt, STEPS, RESPONSE, eos)
            decoded = time.perf_counter()
            # the last token was not read: it has no taps, and replay needs none
            taps_TC, response_T = F.pad(taps_TC, (0, 0, 0, 1)), torch.tensor([0] * len(prompt) + [1] * len(tokens))
            response = Response(torch.tensor(prompt + tokens), response_T, None, taps_TC, None)
            waited = time.perf_counter()
            ledger = evaluate.replay(drafter, [response], STEPS, "fp32")
            row = {"decoding": decoded - begun, "replay": time.perf_counter() - waited, "request": number}
            row |= {"decoding_steps": len(accepted), "replay_steps": ledger["verifications"].item()}
            if repeat:
                rows.append(row)
    medians = pd.DataFrame(rows).groupby("request").median()
    print(medians.round(4).to_string())
    return medians["decoding"].sum(), medians["replay"].sum()


def write(ratios: pd.DataFrame) -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    partial = OUT.with_suffix(".partial")
    ratios.to_csv(partial, index=False, float_format="%.4f", lineterminator="\n")
    os.replace(partial, OUT)


def main():
    stages.settle(threads=2, seed=0)
    table = distillation()
    print(table.round(4).to_string())
    seconds = table["seconds"]
    own = all(path.exists() for path in (TARGET, DRAFTER, RECORDED))
    pairs = {
        f"distillation {VOCABULARY}": (seconds[VOCABULARY, "plain"], seconds[VOCABULARY, "ours"]),
        f"distillation {REDUCED}": (seconds[REDUCED, "plain"], seconds[REDUCED, "ours"]),
        f"distillation {VOCABULARY} to {REDUCED}": (seconds[VOCABULARY, "plain"], seconds[REDUCED, "ours"]),
        "replay": replaying(own),
    }
    rows = [(name, slow / fast, slow, fast) for name, (slow, fast) in pairs.items()]
    ratios = pd.DataFrame(rows, columns=["name", "ratio", "slow_seconds", "fast_seconds"])
    for row in ratios.itertuples():
        print(f"{row.name}: {row.ratio:.1f} times as fast ({row.slow_seconds:.3f} s / {row.fast_seconds:.3f} s)")
    if own:
        write(ratios)
        try:
            readme.refresh()
        except UserError as error:
            sys.exit(f"osprey: {error}")
    else:
        print("replay with random weights, since make repro has not run: not kept")


if __name__ == "__main__":
    main()
