"""Many draft chains at once: the training-time test's mask, used by distillation and by replay.

Serving convention (design, section 5): index i holds token x_{i+1} and the context fc(taps_i). The chain that
starts at i attends, at every step, to the step-0 keys at j <= i and to its own keys of steps 1..k; its step k
holds x_{i+1+k}, has rotary position i + k, and its context is its own state of step k - 1, taken before the final norm.
"""

import torch


def unroll(drafter, tokens_BT, taps_BTC, starts_BS, steps: int):
    """Yield, for step k = 0 .. steps - 1, the pre-norm state of every chain, [B, S, D].

    starts_BS: the indices i at which chains start; what a chain holds past the end of the sequence means nothing.
    Whoever iterates may `send` the chains to go on with, as an index [S']; the others end.
    """
    batch, length = tokens_BT.shape
    index_T = torch.arange(length - 1, device=tokens_BT.device)
    causal_BTT = (index_T[:, None] >= index_T).expand(batch, -1, -1)
    rows = torch.arange(batch, device=tokens_BT.device)[:, None].expand_as(starts_BS), starts_BS
    context_BTD = drafter.fc(taps_BTC[:, :-1])
    hidden_BSD, past = drafter(tokens_BT[:, 1:], context_BTD, index_T.expand(batch, -1), causal_BTT, rows=rows)
    mask_BSK = causal_BTT[rows]
    for k in range(1, steps):
        kept = yield hidden_BSD
        if kept is not None:
            hidden_BSD, starts_BS, mask_BSK = hidden_BSD[:, kept], starts_BS[:, kept], mask_BSK[:, kept]
        own_SS = torch.eye(starts_BS.shape[1], dtype=torch.bool, device=tokens_BT.device).expand(batch, -1, -1)
        mask_BSK = torch.cat([mask_BSK, own_SS], dim=-1)
        held_BS = tokens_BT.gather(1, (starts_BS + 1 + k).clamp(max=length - 1))
        hidden_BSD, past = drafter(held_BS, hidden_BSD, starts_BS + k, mask_BSK, past)
    yield hidden_BSD
