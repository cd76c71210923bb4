"""Reference speculative decoding: the acceptance rule and the loop around it, on one screen.

Batch 1, a chain of greedy drafts, the target's own cache. Slow and plain on purpose: replay and every faster loop
are tested against it. Greedy output equals decoding without a drafter; at temperature > 0 it has its distribution.
"""

import torch
from transformers import DynamicCache


def verify(logits_KV: torch.Tensor, drafts: list[int], temperature: float, generator=None) -> tuple[int, int]:
    """How many drafts are accepted, and the target's token after them (correction or bonus).

    The draft distribution is a point mass on the draft d: accept it with probability p(d), else sample from p
    without d (Leviathan et al., 2023, for q = 1 at d). At temperature 0, p is the point mass on the argmax.
    """
    for accepted, draft in enumerate(drafts):
        if temperature == 0:
            choice = int(logits_KV[accepted].argmax())
            if choice != draft:
                return accepted, choice
            continue
        p_V = (logits_KV[accepted].double() / temperature).softmax(-1)
        if torch.rand((), generator=generator, dtype=torch.float64) >= p_V[draft]:
            p_V[draft] = 0
            return accepted, int(torch.multinomial(p_V, 1, generator=generator))
    if temperature == 0:
        return len(drafts), int(logits_KV[-1].argmax())
    p_V = (logits_KV[-1].double() / temperature).softmax(-1)
    return len(drafts), int(torch.multinomial(p_V, 1, generator=generator))


@torch.no_grad()
def speculate(
    target, drafter, layers: list[int], prompt: list[int], steps: int, max_new_tokens: int, eos: list[int],
    temperature: float = 0.0, generator=None,
):  # fmt: skip
    """Decode one response: its tokens, the taps of all positions but the last [T - 1, 3H], accepted drafts per step.

    The last step is clipped at eos or at `max_new_tokens`, tokens and accepted drafts alike.
    """
    cache, tokens, accepted, taps, past, read = DynamicCache(config=target.config), list(prompt), [], [], None, 0
    cache.activate_past_recording()  # a sliding window keeps what a rejection brings back
    limit = len(prompt) + max_new_tokens

    def run_target(ids):
        output = target(torch.tensor([ids]), cache=cache, use_cache=True, output_hidden_states=True)
        return output.logits[0], torch.cat([output.hidden_states[layer + 1][0] for layer in layers], dim=-1)

    logits, states = run_target(tokens)
    taps.append(states)
    tokens.append(verify(logits[-1:], [], temperature, generator)[1])
    while len(tokens) < limit and tokens[-1] not in eos:
        # the drafter (fp32) reads what is new, with real taps: index i holds token i + 1
        context = drafter.fc(torch.cat(taps)[read:].float())[None]
        index = torch.arange(read, len(tokens) - 1)
        mask = (index[:, None] >= torch.arange(len(tokens) - 1))[None]
        hidden, past = drafter(torch.tensor([tokens[read + 1 :]]), context, index[None], mask, past)
        read = len(tokens) - 1
        drafts, hidden, chain = [int(drafter.draft(hidden[:, -1:]))], hidden[:, -1:], past
        while len(drafts) < steps:  # then its own tokens, with its own state for context
            position = torch.tensor([[read - 1 + len(drafts)]])
            mask = torch.ones(1, 1, read + len(drafts), dtype=torch.bool)
            hidden, chain = drafter(torch.tensor([[drafts[-1]]]), hidden, position, mask, chain)
            drafts.append(int(drafter.draft(hidden)))

        logits, states = run_target([tokens[-1], *drafts])
        count, choice = verify(logits, drafts, temperature, generator)
        new = [*drafts[:count], choice][: limit - len(tokens)]
        new = new[: next((i + 1 for i, token in enumerate(new) if token in eos), len(new))]
        taps.append(states[: len(new)])
        tokens += new
        accepted.append(min(count, len(new)))
        cache.crop(len(tokens) - 1 - cache.get_seq_length())  # minus the number of rejected tokens
    return tokens[len(prompt) :], torch.cat(taps), accepted
