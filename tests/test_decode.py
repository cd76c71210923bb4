"""Speculative decoding loses nothing: greedy output is the target's own, sampled output has its distribution."""

from collections import Counter

import overfitted
import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from osprey import decode, models, taps
from osprey.drafter import Drafter

TOKENS = 24


@pytest.fixture(scope="module")
def target(target_folder):
    return models.load_model(target_folder, torch.float32)


@pytest.fixture
def verified(monkeypatch):
    """What every call of `verify` returned and how many drafts it was given, in order."""
    calls, original = [], decode.verify

    def recorded(logits_KV, drafts, *rest):
        calls.append((len(drafts), original(logits_KV, drafts, *rest)))
        return calls[-1][1]

    monkeypatch.setattr(decode, "verify", recorded)
    return calls


@pytest.mark.parametrize("interface", ["osprey", "eagle3"])
def test_greedy_output_is_the_target_s(interface, target, make_drafter, verified):
    drafter = overfitted.drafter(make_drafter, target, interface)
    seen = Counter()
    for prompt in overfitted.SEEN + overfitted.UNSEEN:
        alone = overfitted.greedy(target, prompt, TOKENS, [])
        reference, _, _ = taps.forward(target, torch.tensor(prompt + alone), overfitted.TAPS)
        for steps in (1, 2, 3, 4, 5):
            for limit in (1, 2, 9, TOKENS):
                verified.clear()
                tokens, taps_TC, accepted = decode.speculate(target, drafter, overfitted.TAPS, prompt, steps, limit, [])
                assert tokens == alone[:limit]
                assert taps_TC.shape[0] == len(prompt) + len(tokens) - 1
                torch.testing.assert_close(taps_TC, reference[: len(taps_TC)], rtol=1e-3, atol=1e-3)
                check_counts(tokens, accepted, verified, steps)
                seen.update(accepted)
                seen["clipped"] += clipped(tokens, accepted)
    # nothing, something and everything was accepted, and clipped
    assert min(seen[0], seen[1] + seen[2] + seen[3] + seen[4], seen[5], seen["clipped"]) > 0, seen


def clipped(tokens: list[int], accepted: list[int]) -> bool:
    """Was the last token a draft, so that the last step emitted no token of the target's own?"""
    return len(tokens) - 1 == sum(accepted) + len(accepted) - 1


def check_counts(tokens, accepted, verified, steps):
    """The prefill emits one token, a step its accepted drafts and one more, unless the response ends on a draft."""
    assert len(tokens) - 1 == sum(accepted) + len(accepted) - clipped(tokens, accepted)
    assert len(verified) == len(accepted) + 1 and verified[0][0] == 0  # the prefill drafts nothing
    assert all(drafted == steps for drafted, _ in verified[1:])
    left = len(tokens) - 1
    for (_, (count, _)), run in zip(verified[1:], accepted):
        assert run == min(count, left)
        left -= run + 1
    assert left in (0, -1)


@pytest.mark.parametrize("interface", ["osprey", "eagle3"])
def test_ends_at_eos_even_inside_a_chain(interface, target, make_drafter, verified):
    drafter = overfitted.drafter(make_drafter, target, interface)
    inside = 0
    for prompt in overfitted.SEEN:
        alone = overfitted.greedy(target, prompt, TOKENS, [])
        for eos in sorted(set(alone)):
            verified.clear()
            tokens, _, accepted = decode.speculate(target, drafter, overfitted.TAPS, prompt, 5, TOKENS, [511, eos])
            assert tokens == alone[: alone.index(eos) + 1]
            check_counts(tokens, accepted, verified, 5)
            inside += bool(accepted) and verified[-1][1][0] > accepted[-1]  # drafts beyond eos had been accepted
    assert inside > 0


def test_a_library_s_greedy_decoding_agrees(target, make_drafter):
    drafter = overfitted.drafter(make_drafter, target, "osprey")
    for prompt in overfitted.SEEN:
        eos = overfitted.greedy(target, prompt, TOKENS, [])[17]
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
        output = target.generate(ids, attention_mask=torch.ones_like(ids), **how)
        tokens, _, _ = decode.speculate(target, drafter, overfitted.TAPS, prompt, 5, TOKENS, [eos])
        assert prompt + tokens == output[0].tolist()


def random_drafter(target, layers: int) -> Drafter:
    """An untrained drafter with the blocks of the target and all of its vocabulary."""
    config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": layers, "model_type": "llama"})
    config.swap_h_and_emb, config.target_hidden_size = True, config.hidden_size
    config.draft_vocab_size = config.vocab_size
    return Drafter(config).eval().requires_grad_(False)


def test_sliding_windows(make_drafter):
    """A rejection must bring back keys that have left a sliding window."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, sliding_window=6, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    target = MistralForCausalLM(config).eval()
    drafter = random_drafter(target, layers=1)
    accepted = Counter()
    for first in range(8):
        prompt = [first, 30 - first, 7]
        tokens, _, runs = decode.speculate(target, drafter, [0, 1, 2], prompt, 3, 40, [])
        assert tokens == overfitted.greedy(target, prompt, 40, [])
        accepted.update(runs)
    assert accepted[0] > 0 and accepted.total() > accepted[0], accepted


# At a temperature: the acceptance rule against the distribution it must leave unchanged, and two wrong rules that the
# same test must refuse.


def keeps_the_draft(logits_KV, drafts, temperature, generator=None):
    """Wrong: after a rejection the draft may be drawn again."""
    for accepted, draft in enumerate(drafts):
        p_V = (logits_KV[accepted].double() / temperature).softmax(-1)
        if torch.rand((), generator=generator, dtype=torch.float64) >= p_V[draft]:
            return accepted, int(torch.multinomial(p_V, 1, generator=generator))
    p_V = (logits_KV[-1].double() / temperature).softmax(-1)
    return len(drafts), int(torch.multinomial(p_V, 1, generator=generator))


def forgets_temperature(logits_KV, drafts, temperature, generator=None):
    """Wrong: temperature 1 whatever is asked for."""
    return decode_verify(logits_KV, drafts, 1.0, generator)


decode_verify = decode.verify
RULES = {"right": (decode_verify, True), "keeps": (keeps_the_draft, False), "forgets": (forgets_temperature, False)}


def p_value(counts: Counter, expected: dict) -> float:
    """Chi-square of counted outcomes against expected probabilities; outcomes too rare for it share the last bin."""
    total = sum(counts.values())
    assert set(counts) <= set(expected) and abs(sum(expected.values()) - 1) < 1e-9
    order = sorted(expected, key=expected.get, reverse=True)
    own = sum(p * total >= 8 for p in expected.values()) - 1
    observed = [counts[outcome] for outcome in order[:own]]
    wanted = [expected[outcome] * total for outcome in order[:own]]
    return chisquare([*observed, total - sum(observed)], [*wanted, total - sum(wanted)]).pvalue


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_verified_tokens_have_the_target_s_distribution(rule, temperature):
    verify, is_right = RULES[rule]
    drafts = [2, 4]
    at_one = [[0.15, 0.1, 0.35, 0.2, 0.05, 0.15], [0.3, 0.05, 0.1, 0.1, 0.35, 0.1], [0.4, 0.2, 0.1, 0.05, 0.05, 0.2]]
    logits_KV = torch.tensor(at_one).log() + 3
    p_KV = (logits_KV.double() / temperature).softmax(-1)
    generator, at = torch.Generator().manual_seed(1), [Counter(), Counter(), Counter()]
    for _ in range(10_000):
        accepted, choice = verify(logits_KV, drafts, temperature, generator)
        for place, token in enumerate([*drafts[:accepted], choice]):
            at[place][token] += 1  # given that the drafts before were accepted
    p_values = [p_value(counts, dict(enumerate(p_V.tolist()))) for counts, p_V in zip(at, p_KV)]
    assert min(sum(counts.values()) for counts in at) > 500
    assert (min(p_values) > 0.01) == is_right, p_values
    if not is_right:
        assert min(p_values) < 1e-6


@pytest.fixture(scope="module")
def toy():
    """A target of four tokens, the exact distribution of its first three at temperature 0.6 (3 ends), and a drafter."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, initializer_range=0.4, bos_token_id=0, eos_token_id=3,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    drafter = random_drafter(target, layers=1)
    prompt, outcomes = [0, 2, 1], {}

    @torch.no_grad()
    def spread(tokens, chance):
        if len(tokens) == 3 or tokens[-1:] == [3]:
            outcomes[tuple(tokens)] = chance
            return
        p_V = (target(torch.tensor([prompt + tokens])).logits[0, -1].double() / 0.6).softmax(-1).tolist()
        for token in range(4):
            spread(tokens + [token], chance * p_V[token])

    spread([], 1.0)
    return target, drafter, prompt, outcomes


@pytest.mark.parametrize("rule", RULES)
def test_sampled_responses_have_the_target_s_distribution(rule, toy, monkeypatch):
    target, drafter, prompt, outcomes = toy
    verify, is_right = RULES[rule]
    monkeypatch.setattr(decode, "verify", verify)
    generator, counts, accepted = torch.Generator().manual_seed(2), Counter(), Counter()
    for _ in range(1000):
        tokens, _, runs = decode.speculate(target, drafter, [0, 1, 2], prompt, 2, 3, [3], 0.6, generator)
        counts[tuple(tokens)] += 1
        accepted.update(runs)
    assert len(outcomes) == 1 + 3 + 9 * 4
    assert min(accepted[run] for run in (0, 1, 2)) > 20  # the first draft, and the second after it, matter
    p = p_value(counts, outcomes)
    assert (p > 0.01) == is_right, p
    if not is_right:
        assert p < 1e-4
