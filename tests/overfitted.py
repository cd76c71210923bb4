"""Tiny drafters that draft well where they were trained and badly elsewhere: accepted runs of every length."""

import torch

from osprey import distill, rollouts, taps

TAPS = [1, 3, 4]
SEEN = [[5, 70, 211, 9], [300, 17, 42], [88, 8], [401, 33, 250, 6, 90, 7, 100]]  # prompts it was trained on
UNSEEN = [[12, 450, 77, 31, 2], [500, 64]]
ALL, TWO_THIRDS = tuple(range(512)), tuple(token for token in range(512) if token % 3)

trained = {}


@torch.no_grad()
def greedy(target, prompt: list[int], tokens: int, eos: list[int]) -> list[int]:
    """The target's own greedy decoding: no drafter, no cache."""
    made = []
    while len(made) < tokens and not (made and made[-1] in eos):
        made.append(int(target(torch.tensor([prompt + made])).logits[0, -1].argmax()))
    return made


def drafter(make_drafter, target, interface: str, ids=ALL):
    """The drafter of `interface` over the draft vocabulary `ids`, overfitted to the target's responses to SEEN.

    `make_drafter`: the fixture. Made once; don't change it.
    """
    if (interface, ids) in trained:
        return trained[interface, ids]
    made = make_drafter(interface, ids=ids)
    responses = []
    for prompt in SEEN:
        tokens = prompt + greedy(target, prompt, 24, [])
        taps_TC, last_TH, greedy_T = taps.forward(target, torch.tensor(tokens), TAPS)
        mask_T = torch.tensor([0] * len(prompt) + [1] * 24)
        responses.append(rollouts.Response(torch.tensor(tokens), mask_T, greedy_T, taps_TC, last_TH))
    head_VH = target.get_output_embeddings().weight.detach()[list(ids)]
    distiller = distill.Distiller(made, head_VH, None, steps=5, decay=0.8)
    batch = distill.collate([distill.sample(response, 5, made.t2d) for response in responses])
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(40 if interface == "osprey" else 80):  # enough to draft whole chains, too few to draft them all
        optimizer.zero_grad()
        distiller(**batch)["loss"].backward()
        optimizer.step()
    trained[interface, ids] = made.requires_grad_(False)
    return made
