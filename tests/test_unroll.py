"""Training equals serving: `unroll` against the drafter read token by token with a cache (slow.py)."""

import pytest
import slow
import torch

from osprey.unroll import unroll

STEPS = 4
REDUCED = tuple(range(1, 512, 3))
DRAFTERS = [
    ("osprey", 1, "qwen3"), ("osprey", 2, "qwen3"), ("osprey", 2, "llama"), ("eagle3", 1, ""), ("eagle3", 2, ""),
]  # fmt: skip


@pytest.fixture(params=DRAFTERS, ids=lambda param: "-".join(map(str, param)).rstrip("-"))
def drafter(request, make_drafter, make_model):
    interface, layers, architecture = request.param
    arguments = {"layers": layers, "ids": REDUCED}
    if interface == "osprey":
        arguments["source"] = make_model(architecture, layers=4, width=48, head_dim=24, seed=1)
    return make_drafter(interface, **arguments)


def sequence(length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(512, (length,), generator=generator), torch.randn(length, 192, generator=generator)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@torch.no_grad()
def test_teacher_forced_chains_equal_serving_with_a_cache(drafter):
    tokens_T, taps_TC = sequence(9)
    starts_S = torch.tensor([0, 2, 3, 4, 7])
    states = list(unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], STEPS))
    assert len(states) == STEPS
    for s, start in enumerate(starts_S.tolist()):
        served = slow.chain(drafter, tokens_T.tolist(), taps_TC, start, STEPS)
        assert len(served) == min(STEPS, len(tokens_T) - 1 - start)
        for k, state_D in enumerate(served):
            close(states[k][0, s], state_D)
            close(drafter.logits(states[k])[0, s], slow.logits(drafter, state_D))


@torch.no_grad()
def test_chains_that_end_early_change_nothing_for_the_others(drafter):
    tokens_T, taps_TC = sequence(12, seed=1)
    starts_S = torch.tensor([1, 2, 5, 6, 7])
    whole = list(unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], STEPS))
    chains, left = unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], STEPS), torch.arange(5)
    state = next(chains)
    for k, kept in enumerate([[0, 1, 3, 4], None, [1, 3]]):
        close(state[0], whole[k][0, left])
        left = left if kept is None else left[kept]
        state = chains.send(None if kept is None else torch.tensor(kept))
    assert left.tolist() == [1, 4]
    close(state[0], whole[3][0, left])


@torch.no_grad()
def test_padding_changes_nothing(drafter):
    lengths, starts = [9, 5, 7], [[1, 3, 4, 6], [0, 1], [2, 3, 4]]
    singles = [sequence(length, seed) for seed, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(9)
    tokens_BT = torch.randint(512, (3, 9), generator=generator)  # padded with anything, at the right
    taps_BTC = 100 * torch.randn(3, 9, 192, generator=generator)
    starts_BS = torch.zeros(3, 4, dtype=torch.int64)
    for b, (tokens_T, taps_TC) in enumerate(singles):
        tokens_BT[b, : lengths[b]], taps_BTC[b, : lengths[b]] = tokens_T, taps_TC
        starts_BS[b, : len(starts[b])] = torch.tensor(starts[b])
    batch = list(unroll(drafter, tokens_BT, taps_BTC, starts_BS, STEPS))
    for b, (tokens_T, taps_TC) in enumerate(singles):
        starts_S = torch.tensor(starts[b])
        alone = unroll(drafter, tokens_T[None], taps_TC[None], starts_S[None], STEPS)
        for k, state_1SD in enumerate(alone):
            inside = [s for s, start in enumerate(starts[b]) if start + 1 + k < lengths[b]]
            close(batch[k][b, inside], state_1SD[0, inside])
