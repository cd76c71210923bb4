"""Replay gives the counts of token-by-token speculation; the ledger, and the recorded rollouts that it reads."""

import random
from collections import Counter

import overfitted
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from osprey import checkpoint, decode, evaluate, models, rollouts, stats, taps, vocabulary
from osprey.params import ROOT, Target, UserError

TAPS = overfitted.TAPS


@pytest.fixture(scope="module")
def target(target_folder):
    return models.load_model(target_folder, torch.float32)


def recorded(prompt: list[int], response: list[int], taps_TC: torch.Tensor) -> rollouts.Response:
    """The request as rollouts would hold it. Its last position's taps are never read: NaN."""
    whole_TC = torch.cat([taps_TC, torch.full((1, taps_TC.shape[1]), torch.nan)])
    tokens_T, mask_T = torch.tensor(prompt + response), torch.tensor([0] * len(prompt) + [1] * len(response))
    return rollouts.Response(tokens_T, mask_T, torch.zeros_like(tokens_T), whole_TC, whole_TC[:, :0])


def replayed(drafter, response: rollouts.Response, steps: int) -> list[int]:
    """Accepted drafts by verification step, by replay."""
    starts, runs = evaluate.accepted_runs(drafter, response.tokens, response.response, response.taps, steps)
    return evaluate.walk(starts, runs)


@pytest.mark.parametrize("ids", [overfitted.ALL, overfitted.TWO_THIRDS], ids=["full", "reduced"])
@pytest.mark.parametrize("interface", ["osprey", "eagle3"])
def test_replay_is_decoding(interface, ids, target, make_drafter):
    drafter = overfitted.drafter(make_drafter, target, interface, ids)
    seen = Counter()
    for steps in (1, 3, 5):
        responses, rows = [], []
        for prompt in overfitted.SEEN + overfitted.UNSEEN:
            for limit in (2, 3, 14, 24):
                tokens, taps_TC, accepted = decode.speculate(target, drafter, TAPS, prompt, steps, limit, [])
                responses.append(recorded(prompt, tokens, taps_TC))
                assert replayed(drafter, responses[-1], steps) == accepted, (prompt, steps, limit)
                rows.append(evaluate.ledger_row(accepted, len(tokens), steps))
                if steps == 5:
                    seen.update(accepted)
                seen["clipped"] += len(tokens) - 1 < sum(accepted) + len(accepted)
        ledger = evaluate.replay(drafter, responses, steps, "fp32")
        pd.testing.assert_frame_equal(ledger.drop(columns="request"), pd.DataFrame(rows))
        assert ledger["request"].tolist() == list(range(len(rows)))
    assert min(seen[0], seen[1] + seen[2] + seen[3] + seen[4], seen[5], seen["clipped"]) > 0, seen
    if ids != overfitted.ALL:
        assert any(int(token) not in ids for response in responses for token in response.tokens[-20:])


def test_replay_is_decoding_up_to_an_eos_inside_a_chain(target, make_drafter):
    drafter = overfitted.drafter(make_drafter, target, "osprey")
    inside = 0
    for prompt in overfitted.SEEN:
        for eos in overfitted.greedy(target, prompt, 24, [])[1::2]:
            tokens, taps_TC, accepted = decode.speculate(target, drafter, TAPS, prompt, 5, 24, [eos])
            if len(tokens) > 1:
                assert replayed(drafter, recorded(prompt, tokens, taps_TC), 5) == accepted
                inside += len(tokens) - 1 < sum(accepted) + len(accepted)
    assert inside > 0


SMOLLM2 = ROOT / "data/models/smollm2"
TRAINED = ROOT / "data/drafters/smollm2/osprey/smollm2-osprey-math"
HELD_OUT = ROOT / "data/rollouts/smollm2/math/held-out.safetensors"


@pytest.mark.skipif(
    not all(path.exists() for path in (SMOLLM2, TRAINED, HELD_OUT)),
    reason="needs the laptop preset's outputs (dvc repro, or dvc pull): data/models/smollm2, data/drafters/smollm2",
)
def test_replay_is_decoding_on_a_real_target():
    target, drafter = models.load_model(SMOLLM2, torch.float32), checkpoint.load(TRAINED)
    layers = taps.layer_ids(target.config.num_hidden_layers, None, "smollm2")
    eos = models.eos_ids(SMOLLM2, models.load_tokenizer(SMOLLM2))
    seen = Counter()
    for response in rollouts.read(HELD_OUT)[:3]:
        prompt = response.tokens[response.response == 0].tolist()
        tokens, taps_TC, accepted = decode.speculate(target, drafter, layers, prompt, 5, 32, eos)
        assert replayed(drafter, recorded(prompt, tokens, taps_TC), 5) == accepted
        seen.update(accepted)
    assert seen.total() > seen[0] > 0, seen


# The ledger


def simulated(rng: random.Random, tokens: int, steps: int) -> tuple[list[int], Counter]:
    """A response decoded with coin flips, place by place: accepted drafts by step; offered and accepted by position."""
    accepted, counts, place = [], Counter(), 1  # the prefill emitted place 0
    while place < tokens:
        run, missed = 0, False
        for k in range(1, steps + 1):
            if place + k - 1 >= tokens:
                break
            counts[f"offered_{k}"] += 1
            missed = missed or rng.random() < 0.4
            if not missed:
                run += 1
                counts[f"accepted_{k}"] += 1
        accepted.append(run)
        place += run + 1
    return accepted, counts


def test_ledger_rows_against_counting_place_by_place():
    rng, seen, clipped = random.Random(0), Counter(), 0
    for steps in (1, 2, 5):
        for tokens in [*range(1, 15)] * 5:
            accepted, counts = simulated(rng, tokens, steps)
            row = evaluate.ledger_row(accepted, tokens, steps)
            names = [f"{what}_{k}" for what in ("offered", "accepted") for k in range(1, steps + 1)]
            assert row == {"tokens": tokens, "verifications": len(accepted), "accepted": sum(accepted)} | {
                name: counts[name] for name in names
            }
            assert list(row)[3:] == names
            seen[len(accepted)] += 1
            clipped += sum(accepted) + len(accepted) > tokens - 1
            if accepted:
                assert 1 <= stats.measured(pd.DataFrame([row])).al.item() <= steps + 1
    assert seen[0] > 0 and clipped > 0


def test_accepted_length():
    def length(accepted, tokens):
        return stats.measured(pd.DataFrame([evaluate.ledger_row(accepted, tokens, 5)])).al.item()

    assert length([5, 5], 13) == 6  # every draft accepted, and a bonus token each
    assert length([0, 0, 0], 4) == 1
    assert length([5, 5, 1], 14) == 13 / 3  # the last step ended on its first draft
    assert length([2, 0, 1], 7) == 2


def test_requests_that_need_no_verification_are_not_averaged(target, make_drafter):
    """A response of one token has V = 0: a row of zeros in the ledger, no part of a mean."""
    drafter = overfitted.drafter(make_drafter, target, "osprey")
    prompt = overfitted.SEEN[0]
    responses = []
    for limit in (1, 24, 9):
        tokens, taps_TC, _ = decode.speculate(target, drafter, TAPS, prompt, 5, limit, [])
        responses.append(recorded(prompt, tokens, taps_TC))
    ledger = evaluate.replay(drafter, responses, 5, "fp32")
    assert ledger.loc[0, "tokens"] == 1 and (ledger.loc[0].drop(["request", "tokens"]) == 0).all()
    labels = pd.DataFrame([{"adaptation": "math", "lr": 1e-3, "evaluation": "chat", "split": "held-out"}] * 3)
    mean = ((ledger["tokens"] - 1) / ledger["verifications"])[1:].mean()
    both = pd.concat([labels.join(ledger), labels.assign(split="first").join(ledger.iloc[[0, 1, 1]])])
    assert evaluate.matrix(both, "held-out").loc[("math", 1e-3), "chat"] == round(mean, 3)


# Rollouts


def test_batched_rollouts_are_the_target_s_own(target):
    """Left padding, an eos that ends one row earlier than another, and the limit change nothing: neither the tokens
    nor, against one pass over each whole sequence, the taps, last states and greedy tokens kept on the way."""
    prompts = overfitted.SEEN + overfitted.UNSEEN
    alone = [overfitted.greedy(target, prompt, 12, []) for prompt in prompts]
    eos = [alone[0][5], alone[1][2]]
    wanted = [overfitted.greedy(target, prompt, 12, eos) for prompt in prompts]
    assert len({len(response) for response in wanted}) > 2
    for prompt, answer, made in zip(prompts, wanted, rollouts.generate(target, prompts, TAPS, 0.0, 12, eos, seed=0)):
        assert made.tokens.tolist() == prompt + answer
        assert made.response.tolist() == [0] * len(prompt) + [1] * len(answer)
        taps_TC, last_TH, greedy_T = taps.forward(target, made.tokens, TAPS)
        torch.testing.assert_close(made.taps[:-1], taps_TC[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.last[:-1], last_TH[:-1], rtol=1e-4, atol=1e-4)
        assert torch.equal(made.greedy[len(prompt) - 1 : -1], greedy_T[len(prompt) - 1 : -1])
        assert not made.taps[-1].any() and not made.last[-1].any()


def test_sampled_rollouts_repeat_with_their_seed(target):
    def sampled(temperature, seed):
        responses = rollouts.generate(target, overfitted.SEEN, TAPS, temperature, 12, [511], seed)
        return [response.tokens.tolist() for response in responses]

    assert sampled(1.0, 0) == sampled(1.0, 0) != sampled(1.0, 1)
    assert sampled(1.0, 0) != sampled(0.0, 0)


@pytest.fixture
def written(target, tmp_path):
    """A file of requests as the stage writes it, and what went in."""
    responses = rollouts.generate(target, overfitted.SEEN, TAPS, 1.0, 9, [511], 0)
    file = tmp_path / "held-out.safetensors"
    rollouts.write(responses, file)
    return file, responses


def test_rollouts_are_read_as_written(written):
    file, responses = written
    for response, wanted in zip(rollouts.read(file), responses, strict=True):
        assert torch.equal(response.tokens, wanted.tokens) and response.tokens.dtype == torch.int64
        assert response.response.tolist() == wanted.response.tolist()
        assert torch.equal(response.taps, wanted.taps.bfloat16()) and torch.equal(response.last, wanted.last.bfloat16())
        assert torch.equal(response.greedy, wanted.greedy)
    answers = [response.tokens[response.response > 0].tolist() for response in responses]
    assert rollouts.response_tokens(file).tolist() == sum(answers, [])


@pytest.mark.parametrize("left", [0, 6, 200, 4000])
def test_rollouts_cut_short(written, left):
    file, _ = written
    assert file.stat().st_size > 4000
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(UserError, match=r"held-out.safetensors: cannot be read .*; run the rollouts stage") as error:
        rollouts.read(file)
    assert "\n" not in str(error.value)


def test_rollouts_that_are_missing(tmp_path):
    with pytest.raises(UserError, match="nowhere.safetensors: cannot be read"):
        rollouts.read(tmp_path / "nowhere.safetensors")


def test_repetition():
    rng = random.Random(0)
    for length in [*range(8), 30, 60]:
        for size in (1, 2, 50):
            tokens = [rng.randrange(size) for _ in range(length)]
            again = sum(any(tokens[i : i + 4] == tokens[j : j + 4] for j in range(i)) for i in range(length - 3))
            assert rollouts.repetition(tokens) == pytest.approx(again / (length - 3) if length > 3 else 0)
    assert rollouts.repetition([1, 2, 3, 4] * 10) > 0.8 > 0 == rollouts.repetition(list(range(40)))


# The draft vocabulary


def counts(size: int, **of) -> torch.Tensor:
    made = torch.zeros(size, dtype=torch.int64)
    for token, count in of.items():
        made[int(token[1:])] = count
    return made.numpy()


def test_vocabulary_takes_the_most_frequent_of_sources_that_weigh_alike():
    generic = counts(10, t3=1000, t4=900, t5=100)  # ten times the text, the same say
    adaptation = counts(10, t7=120, t8=70, t5=10)
    assert vocabulary.choose([generic, adaptation], [], 10, 2).tolist() == [3, 7]
    assert vocabulary.choose([generic, adaptation], [], 10, 4).tolist() == [3, 4, 7, 8]
    assert vocabulary.choose([generic, adaptation], [], 10, 5).tolist() == [3, 4, 5, 7, 8]


def test_vocabulary_larger_than_what_occurs():
    """Fewer distinct tokens than slots: no crash, and the lowest unseen ids fill up."""
    ids = vocabulary.choose([counts(10, t9=4), counts(10, t6=1)], [], 10, 5).tolist()
    assert ids == [0, 1, 2, 6, 9]
    assert vocabulary.choose([counts(10), counts(10, t9=4)], [], 10, 1).tolist() == [9]  # one source is empty
    assert vocabulary.choose([counts(10), counts(10)], [8], 10, 3).tolist() == [0, 1, 8]


def test_vocabulary_keeps_special_tokens():
    generic = counts(10, t0=5, t1=4, t2=3)
    assert vocabulary.choose([generic], [7, 9], 10, 3).tolist() == [0, 7, 9]
    assert vocabulary.choose([generic], [7, 9], 10, 2).tolist() == [7, 9]
    with pytest.raises(UserError, match="vocabulary.draft: 1 tokens cannot hold the 2 special ones"):
        vocabulary.choose([generic], [7, 9], 10, 1)


@pytest.mark.parametrize(("size", "rows"), [(10, 14), (14, 10)], ids=["padded model", "padded tokenizer"])
@pytest.mark.parametrize("asked", [3, 10, "full"])
def test_rows_that_only_one_side_has_are_never_drafted(size, rows, asked):
    generic = counts(size, **{f"t{token}": 100 + token for token in range(size)})
    ids = vocabulary.choose([generic, generic], [9, 13], rows, asked)
    assert ids.max() == 9 and len(ids) == (10 if asked == "full" else asked)
    assert (ids[1:] > ids[:-1]).all()
    with pytest.raises(UserError, match="vocabulary.draft: 11 tokens asked for, the target has 10; use full"):
        vocabulary.choose([generic, generic], [9], rows, 11)


# Taps


def test_default_taps_are_eagle3_s():
    assert taps.layer_ids(36, None, "t") == [1, 17, 32]
    assert taps.layer_ids(30, None, "t") == [1, 14, 26]
    assert taps.layer_ids(62, None, "t") == [1, 30, 58]
    assert taps.layer_ids(7, None, "t") == [1, 2, 3]
    assert taps.layer_ids(4, [2, 0, 1], "t") == [0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "explicit"),
    [(6, None), (4, None), (2, None), (8, [1, 1, 5]), (8, [1, 3, 7]), (8, [1, 3, 8]), (8, [-1, 3, 5])],
)
def test_impossible_taps(layers, explicit):
    with pytest.raises(UserError, match=rf"targets.tiny: .* targets.tiny.taps to three .* between 0 and {layers - 2}$"):
        taps.layer_ids(layers, explicit, "tiny")


@pytest.mark.parametrize("explicit", [[1, 3], [1, 3, 5, 6], []])
def test_taps_must_be_three(explicit):
    with pytest.raises(ValidationError, match="taps"):
        Target(taps=explicit)


def test_taps_are_the_outputs_of_the_layers(target):
    tokens_T, caught = torch.tensor(overfitted.SEEN[3]), {}
    watched = {index: target.model.layers[index] for index in TAPS} | {"head": target.lm_head}
    hooks = [
        module.register_forward_hook(lambda _, given, made, name=name: caught.update({name: (given[0], made)}))
        for name, module in watched.items()
    ]
    taps_TC, last_TH, greedy_T = taps.forward(target, tokens_T, TAPS)
    for hook in hooks:
        hook.remove()
    assert torch.equal(taps_TC, torch.cat([caught[index][1][0] for index in TAPS], dim=-1))
    assert torch.equal(last_TH, caught["head"][0][0])
    assert torch.equal(greedy_T, caught["head"][1][0].argmax(-1))


def small(kind, **more):
    torch.manual_seed(0)
    config = kind(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.5, pad_token_id=0, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_target_must_have_logits_that_are_its_head_times_its_state(target, monkeypatch):
    tokens_T = torch.tensor(overfitted.SEEN[3])
    taps.check_head(target, tokens_T[None])
    tokens_T = tokens_T[None] % 50
    taps.check_head(small(Gemma2Config, final_logit_softcapping=3.0), tokens_T)
    taps.check_head(small(GraniteConfig, logits_scaling=1.0), tokens_T)
    with pytest.raises(UserError, match="GraniteForCausalLM: its logits are not its head times its last hidden state"):
        taps.check_head(small(GraniteConfig, logits_scaling=8.0), tokens_T)
    monkeypatch.setattr(taps, "softcapping", lambda config: None)
    with pytest.raises(UserError, match="Gemma2ForCausalLM: its logits are not"):
        taps.check_head(small(Gemma2Config, final_logit_softcapping=3.0), tokens_T)
