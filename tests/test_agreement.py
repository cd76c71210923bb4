"""Recorded responses against decoding: what is compared, and what counts as equal."""

import shutil
from types import SimpleNamespace

import overfitted
import pandas as pd
import pytest
import torch

from osprey import agreement, checkpoint, decode, models, rollouts, taps
from osprey.params import Agreement, Evaluate, Run, Target, UserError

TAPS, STEPS, TOKENS = overfitted.TAPS, 5, 24
PROMPTS = overfitted.SEEN + overfitted.UNSEEN


@pytest.fixture(scope="module")
def drafter(make_drafter, target):
    return overfitted.drafter(make_drafter, target, "osprey")


def recorded(target, prompt: list[int], limit: int = TOKENS, eos=()) -> rollouts.Response:
    """The target's own response without a cache, and its taps in one pass, as rollouts records them."""
    made = overfitted.greedy(target, prompt, limit, eos)
    tokens_T, mask_T = torch.tensor(prompt + made), torch.tensor([0] * len(prompt) + [1] * len(made))
    taps_TC, last_TH, greedy_T = taps.forward(target, tokens_T, TAPS)
    return rollouts.Response(tokens_T, mask_T, greedy_T, taps_TC, last_TH)


@torch.no_grad()
def slow_run(drafter, response: rollouts.Response, place: int) -> int:
    """Accepted drafts of the chain whose last token in hand is number `place` of the response: drafted alone, from
    scratch at every step, compared token by token."""
    begin, tokens = int((response.response == 0).sum()), response.tokens.tolist()
    held = tokens[1 : begin + place + 1]
    chain, states = [], []
    for _ in range(STEPS):
        context = torch.cat([drafter.fc(response.taps[: len(held)].float()), *states])[None]
        length = context.shape[1]
        index = torch.arange(length)
        hidden, _ = drafter(torch.tensor([held + chain]), context, index[None], (index[:, None] >= index)[None])
        states.append(hidden[0, -1:])
        chain.append(int(drafter.draft(hidden[:, -1:])))
    rest, run = tokens[begin + place + 1 :], 0
    while run < STEPS and run < len(rest) and chain[run] == rest[run]:
        run += 1
    return run


def slow_counts(target, drafter, response, limit: int = TOKENS, eos=()) -> dict:
    """`compare`, token by token."""
    prompt = response.tokens[response.response == 0].tolist()
    one = response.tokens[response.response > 0].tolist()
    other, _, accepted = decode.speculate(target, drafter, TAPS, prompt, STEPS, limit, eos)
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    step_of = [None]  # of every decoded token: the prefill, then which step emitted it
    for number, run in enumerate(accepted):
        step_of += [number] * (run + 1)
    step_of = step_of[: len(other)]
    steps = equal = 0
    for number, run in enumerate(accepted):
        places = [place for place, emitter in enumerate(step_of) if emitter == number]
        if places[-1] < common:
            steps += 1
            equal += slow_run(drafter, response, places[0] - 1) == run
    replayed, place = 0, 0
    while place < len(one) - 1:
        place += slow_run(drafter, response, place) + 1
        replayed += 1
    return {
        "tokens": len(one), "common": common, "steps": steps, "equal": equal, "decoded_tokens": len(other),
        "decoded_verifications": len(accepted), "replayed_tokens": len(one), "replayed_verifications": replayed,
    }  # fmt: skip


def compare(target, drafter, response, limit=TOKENS, eos=(), precision="fp32"):
    return agreement.compare(target, drafter, TAPS, response, STEPS, limit, eos, precision)


@pytest.mark.parametrize("limit", [1, 2, 9, TOKENS])
def test_in_fp32_everything_agrees(limit, target, drafter):
    for prompt in PROMPTS:
        row = compare(target, drafter, recorded(target, prompt, limit), limit)
        assert row["common"] == row["tokens"] == row["decoded_tokens"] == limit
        assert row["equal"] == row["steps"] == row["decoded_verifications"] == row["replayed_verifications"]
        assert (row["steps"] > 0) == (limit > 1)


def test_responses_end_at_the_same_eos(target, drafter):
    for prompt in overfitted.SEEN:
        eos = overfitted.greedy(target, prompt, TOKENS, [])[7:8]
        response = recorded(target, prompt, eos=eos)
        row = compare(target, drafter, response, eos=eos)
        assert row == slow_counts(target, drafter, response, eos=eos)
        assert row["common"] == row["tokens"] <= 8 and row["equal"] == row["steps"] == row["decoded_verifications"]


def test_a_recorded_token_that_decoding_does_not_give(target, drafter):
    """Steps are compared as long as all they emit is common, and no longer."""
    steps = []
    for prompt in PROMPTS[2:5]:
        whole = compare(target, drafter, recorded(target, prompt))
        for place in (0, 1, 13, TOKENS - 1):
            response = recorded(target, prompt)
            response.tokens[len(prompt) + place] = (response.tokens[len(prompt) + place] + 1) % 512
            row = compare(target, drafter, response)
            assert row["common"] == place and row["tokens"] == row["decoded_tokens"] == TOKENS
            assert row == slow_counts(target, drafter, response)
            assert row["equal"] == row["steps"] <= whole["steps"]  # what lies before is as it was
            steps.append(row["steps"])
    assert min(steps) == 0 and max(steps) > 5


def test_a_recorded_response_that_ends_early(target, drafter):
    """Nothing beyond its end is compared, even where decoding went on."""
    for prompt in PROMPTS:
        row = compare(target, drafter, recorded(target, prompt, 10))
        assert row == slow_counts(target, drafter, recorded(target, prompt, 10))
        assert row["common"] == row["tokens"] == 10 and row["decoded_tokens"] == TOKENS
        assert row["equal"] == row["steps"] < row["decoded_verifications"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_that_are_not_decoding_s(dtype, target_folder, drafter):
    """Noise on the recorded taps makes some steps differ, in a target of either precision; each is found."""
    target, total = models.load_model(target_folder, dtype), []
    for seed, prompt in enumerate(PROMPTS):
        response = recorded(target, prompt)
        assert response.taps.dtype == dtype
        noise = torch.randn(response.taps.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        response.taps += response.taps.std() * noise
        total.append(compare(target, drafter, response))
        assert total[-1] == slow_counts(target, drafter, response)
    sums = pd.DataFrame(total).sum()
    assert 0 < sums["equal"] < sums["steps"], sums
    assert sums["replayed_verifications"] != sums["decoded_verifications"]


# The stage


def run(recipe, domain, target="tiny"):
    return Run(target=target, recipe=recipe, domain=domain, lr=1e-3)


RUNS = {
    "other": run("osprey", "chat", "another"), "one": run("eagle3-1l", "chat"), "two": run("osprey", "chat"),
    "three": run("osprey", "chat"), "four": run("eagle3-1l", "math"),
}  # fmt: skip


def test_the_first_osprey_run_of_every_domain_is_compared():
    assert agreement.contestants(RUNS, "tiny", ["math", "chat"]) == {"chat": "two"}
    runs = RUNS | {"five": run("osprey", "math")}
    assert list(agreement.contestants(runs, "tiny", ["math", "chat"]).items()) == [("math", "five"), ("chat", "two")]
    others = {name: one for name, one in RUNS.items() if one.recipe != "osprey"} | {"six": run("dflash", "law")}
    assert agreement.contestants(others, "tiny", ["chat", "math", "law"]) == {"chat": "one", "math": "four"}
    with pytest.raises(UserError, match="^targets.new: no run drafts for it, .*; add one to runs$"):
        agreement.contestants(RUNS, "new", ["chat"])


@pytest.fixture
def root(tmp_path, target_folder, target, drafter):
    """Stage outputs of one target: the model, one drafter under three names, two splits."""
    shutil.copytree(target_folder, tmp_path / "data/models/tiny")
    eos = models.eos_ids(target_folder, models.load_tokenizer(target_folder))
    for name in ("two", "three"):
        folder = tmp_path / "data/drafters/tiny/osprey" / name
        folder.mkdir(parents=True)
        checkpoint.save(drafter, folder)
    folder = tmp_path / "data/rollouts/tiny/chat"
    folder.mkdir(parents=True)
    for split, prompts in (("held-out", overfitted.SEEN), ("validation", overfitted.UNSEEN)):
        responses = [recorded(target, prompt, eos=eos) for prompt in prompts]
        rollouts.write(responses, folder / f"{split}.safetensors")
    return tmp_path


def settings(**evaluate):
    return SimpleNamespace(
        targets={"tiny": Target()}, runs=RUNS, domains={"chat": None, "math": None}, agreement=Agreement(requests=2),
        rollouts=SimpleNamespace(precision="fp32", max_new_tokens=TOKENS), evaluate=Evaluate(**evaluate),
    )  # fmt: skip


@pytest.mark.parametrize("split", ["held-out", "validation"])
def test_the_stage_writes_a_row_per_request(root, split, drafter, target):
    out = root / "data/agreement/tiny.csv"
    table = agreement.agree(settings(split=split), "tiny", root, out)
    responses = rollouts.read(root / f"data/rollouts/tiny/chat/{split}.safetensors")[:2]
    eos = models.eos_ids(root / "data/models/tiny", models.load_tokenizer(root / "data/models/tiny"))
    expected = [
        {"run": "two", "evaluation": "chat", "request": number, **slow_counts(target, drafter, response, eos=eos)}
        for number, response in enumerate(responses)
    ]
    assert len(expected) == 2
    pd.testing.assert_frame_equal(pd.read_csv(out), pd.DataFrame(expected))
    pd.testing.assert_frame_equal(table, pd.DataFrame(expected))
    assert [path.name for path in out.parent.iterdir()] == ["tiny.csv"]


def test_the_drafter_s_precision_is_not_the_target_s(root):
    """With the drafter in bf16 an fp32 target still gives its own text, and both sides draft alike."""
    table = agreement.agree(settings(precision="bf16"), "tiny", root, root / "tiny.csv")
    assert (table["common"] == table["tokens"]).all()
    assert (table["equal"] >= 0.8 * table["steps"]).all() and (table["steps"] > 0).all()


def test_summary():
    rows = [("chat", 10, 5, 4, 3), ("math", 8, 8, 6, 6), ("chat", 10, 10, 4, 3)]
    table = pd.DataFrame(rows, columns=["evaluation", "tokens", "common", "steps", "equal"])
    expected = [[20, 15, 8, 6, 0.75, 0.75], [8, 8, 6, 6, 1.0, 1.0], [28, 23, 14, 12, 0.821, 0.857]]
    assert agreement.summary(table).values.tolist() == expected
    assert agreement.summary(table).index.tolist() == ["chat", "math", "all"]
