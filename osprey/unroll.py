"""Many draft chains at once: the training-time test's mask, used by distillation and by replay.

Serving convention (design, section 5): index i holds token x_{i+1} and the context fc(taps_i). The chain that
starts at i attends, at every step, to the step-0 keys at j <= i and to its own keys of steps 1..k; its step k
has rotary position i + k and its context is its own state of step k - 1, taken before the final norm.
"""

import torch


def unroll(drafter, tokens_BT, taps_BTC, starts_BS, steps: int, feed):
    """Yield, for step k = 0 .. steps - 1, the pre-norm state of every chain, [B, S, D].

    starts_BS: the indices i at which chains start. `feed(k, hidden_BSD)` gives the tokens [B, S] of step k from
    the states of step k - 1: teacher-forced in training, the drafter's own argmax in replay.
    """
    batch, length = tokens_BT.shape
    chains = starts_BS.shape[1]
    index_T = torch.arange(length - 1, device=tokens_BT.device)
    causal_BTT = (index_T[:, None] >= index_T).expand(batch, -1, -1)
    rows = torch.arange(batch, device=tokens_BT.device)[:, None].expand_as(starts_BS), starts_BS
    context_BTD = drafter.fc(taps_BTC[:, :-1])
    hidden_BSD, past = drafter(tokens_BT[:, 1:], context_BTD, index_T.expand(batch, -1), causal_BTT, rows=rows)
    yield hidden_BSD

    own_SS = torch.eye(chains, dtype=torch.bool, device=tokens_BT.device).expand(batch, -1, -1)
    mask_BSK = causal_BTT[rows]
    for k in range(1, steps):
        mask_BSK = torch.cat([mask_BSK, own_SS], dim=-1)
        hidden_BSD, past = drafter(feed(k, hidden_BSD), hidden_BSD, starts_BS + k, mask_BSK, past)
        yield hidden_BSD
