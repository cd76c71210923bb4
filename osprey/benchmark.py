"""`python -m osprey.benchmark`: one training-time-test step as distill.py takes it, against the plain formulation.

The plain formulation computes every position at every step and keeps the logits whole: student and teacher
[B, T, V], soft cross entropy by autograd, masked mean. Both run forward and backward in bf16 autocast on the same
random weights and response, at the laptop preset's shapes: a response of 96 tokens after a prompt of 160, K = 5,
SmolLM2's two-layer backbone and its vocabulary of 49,152 or a draft vocabulary of 8,192 rows. Ours has the embedding
cut to the rows that occur, as Stage 4 has. Two threads, about a minute; needs both cores to itself.
"""

import time

import pandas as pd
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from osprey import distill, stages
from osprey.drafter import Drafter
from osprey.rollouts import Response
from osprey.unroll import unroll

PROMPT, RESPONSE, STEPS, DECAY = 160, 96, 5, 0.8
WIDTH, VOCABULARY, REDUCED = 576, 49_152, 8_192
REPEATS = 5


def random_drafter(draft_vocabulary: int) -> Drafter:
    """SmolLM2's shape with two layers, untrained; it drafts the first `draft_vocabulary` ids."""
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=VOCABULARY, tie_word_embeddings=False,
    )  # fmt: skip
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
        forced = distill.teacher_forced(tokens_BT, index_S[None])
        total = 0
        for k, hidden_BSD in enumerate(unroll(drafter, tokens_BT, taps_BTC, index_S[None], STEPS, forced)):
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


def measure() -> pd.DataFrame:
    """Median seconds of each formulation at each vocabulary, measured in turns, and the losses, which must agree."""
    stages.settle(threads=2, seed=0)
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


def main():
    table = measure()
    print(table.round(4).to_string())
    seconds = table["seconds"]
    for size in (VOCABULARY, REDUCED):
        print(f"vocabulary {size}: plain / ours = {seconds[size, 'plain'] / seconds[size, 'ours']:.2f}")
    ratio = seconds[VOCABULARY, "plain"] / seconds[REDUCED, "ours"]
    print(f"plain with {VOCABULARY} / ours with {REDUCED} = {ratio:.2f}")


if __name__ == "__main__":
    main()
