"""Models from folders and from nothing, Stage 1, and Stage 2's loss and trainer on tiny models."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from osprey import corpus, models, pretrain, prompts, prune, rollouts, taps
from osprey.params import Corpus, Model, Pretrain, Rollouts, Text, UserError


def test_a_local_folder_is_copied_whole_and_without_pickles(target_folder, tmp_path):
    origin = tmp_path / "origin"
    shutil.copytree(target_folder, origin)
    (origin / "pytorch_model.bin").write_bytes(b"pickle")
    models.materialise("mine", Model(path=str(origin)), tmp_path / "model")
    assert not (tmp_path / "model/pytorch_model.bin").exists()
    mine, theirs = (
        models.load_model(folder, torch.float32).state_dict() for folder in (tmp_path / "model", target_folder)
    )
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_a_folder_that_is_no_model_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError, match=r"models.mine.path: .*notes is not a model folder \(it has no config.json\)"):
        models.materialise("mine", Model(path=str(tmp_path / "notes")), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]


def test_weights_cut_short_are_one_line(target_folder, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(target_folder, folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UserError, match="cannot load the weights") as caught:
        models.load_model(folder, torch.float32)
    assert "\n" not in str(caught.value)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no safetensors; the model was cut short"):
        models.load_model(folder, torch.float32)


def test_pruning_keeps_the_first_blocks_verbatim(source_folder, tmp_path):
    made = prune.prune(source_folder, 2, tmp_path / "pruned")
    whole, pruned = (models.load_model(folder, torch.float32) for folder in (source_folder, tmp_path / "pruned"))
    assert made["source_layers"] == 4 and pruned.config.num_hidden_layers == len(pruned.config.layer_types) == 2
    kept = {
        key: tensor
        for key, tensor in whole.state_dict().items()
        if not key.startswith(("model.layers.2", "model.layers.3"))
    }
    assert set(kept) == set(pruned.state_dict())
    assert all(torch.equal(pruned.state_dict()[key], tensor) for key, tensor in kept.items())
    ids = torch.arange(20)[None]
    hidden = whole.model(ids, output_hidden_states=True).hidden_states[2]  # after two blocks
    torch.testing.assert_close(pruned(ids).logits, whole.lm_head(whole.model.norm(hidden)))


def test_more_layers_than_the_source_has(source_folder, tmp_path):
    with pytest.raises(UserError, match="source.layers: 5 blocks asked for, the source has 4"):
        prune.prune(source_folder, 5, tmp_path / "pruned")
    assert not list(tmp_path.iterdir())


def test_a_source_without_model_layers(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="GPT2LMHeadModel has no model.layers"):
        prune.prune(tmp_path / "gpt2", 1, tmp_path / "pruned")


@pytest.fixture
def small_corpus(source_folder, tmp_path):
    text = Text(generate="gsm_symbolic", share=1.0)
    tokenizer = models.load_tokenizer(source_folder)
    spec = Corpus(texts={"problems": text}, characters=20_000, held_out=0.2, shard_tokens=5_000)
    corpus.build(spec, tokenizer, tokenizer.eos_token_id, 0, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_the_pretraining_loss_is_the_models_own(source_folder):
    model = pretrain.NextToken(models.load_model(source_folder, torch.float32))
    ids = torch.randint(0, 512, (3, 12), generator=torch.Generator().manual_seed(0))
    logits = model.lm(ids).logits[:, :-1]
    plain = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids)["loss"], plain)


def test_a_pad_that_is_eos_learns(source_folder):
    """With pad = eos a stock embedding freezes the row of the document separator."""
    lm = models.load_model(source_folder, torch.float32)
    assert lm.config.pad_token_id == lm.config.eos_token_id == 2
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.detach().clone())  # untied: the head would move it too
    pretrain.NextToken(lm)(torch.tensor([[5, 2, 6, 7]]))["loss"].backward()
    assert lm.model.embed_tokens.weight.grad[2].abs().sum() > 0


def test_pretraining_learns_and_a_killed_run_ends_in_the_same_weights(
    source_folder, small_corpus, tmp_path, monkeypatch
):
    prune.prune(source_folder, 1, tmp_path / "pruned")
    section = Pretrain(steps=10, window=32, batch=4, lr=3e-3, evaluations=4, held_out_windows=4, precision="fp32")

    def run(name):
        kept = tmp_path / f"kept-{name}"
        kept.mkdir(exist_ok=True)
        return pretrain.pretrain(tmp_path / "pruned", small_corpus, section, 0, kept, tmp_path / name)

    ends = run("whole")
    assert ends["held_out_loss"] < ends["held_out_loss_before"]
    assert ends["tokens"] == 10 * 4 * 32

    visit = pretrain.Watch.visit

    def killed(self, step, model):
        if step == 7:
            raise KeyboardInterrupt
        visit(self, step, model)

    monkeypatch.setattr(pretrain.Watch, "visit", killed)
    with pytest.raises(KeyboardInterrupt):
        run("resumed")
    assert not (tmp_path / "resumed").exists()
    monkeypatch.setattr(pretrain.Watch, "visit", visit)
    run("resumed")
    for file in ("backbone/model.safetensors", "short-backbone/model.safetensors", "train.csv", "held_out.csv"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes(), file


def test_a_checkpoint_that_a_kill_cut_short_is_left_out(tmp_path):
    from osprey import training

    for step, state in ((5, '{"global_step": 5}'), (10, '{"global_st'), (15, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(state)
    training.drop_half_saved(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_the_first_update_has_a_learning_rate(source_folder, small_corpus, tmp_path):
    import pandas as pd

    prune.prune(source_folder, 1, tmp_path / "pruned")
    section = Pretrain(steps=20, window=32, batch=1, lr=1e-3, warmup=0.2, evaluations=2, held_out_windows=1)
    (tmp_path / "kept").mkdir()
    pretrain.pretrain(tmp_path / "pruned", small_corpus, section, 0, tmp_path / "kept", tmp_path / "out")
    rates = pd.read_csv(tmp_path / "out/train.csv")["lr"].to_numpy()
    expected = [(step + 1) / 4 if step < 4 else 0.5 * (1 + np.cos(np.pi * (step - 4) / 16)) for step in range(20)]
    np.testing.assert_allclose(rates, 1e-3 * np.array(expected), rtol=1e-4)


def test_rollouts_that_are_all_empty_are_one_line(target_folder, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from osprey.params import Domain, Records, Target

    folder = tmp_path / "data/models/tiny"
    shutil.copytree(target_folder, folder)
    empty = [torch.tensor([9, 2]), torch.tensor([0, 1]), *torch.zeros(3, 2, 1)]
    monkeypatch.setattr(rollouts, "generate", lambda model, asked, *rest: [rollouts.Response(*empty)] * len(asked))
    section = Rollouts(prompts={"adaptation": 2, "held-out": 2}, max_new_tokens=4, batch=2)
    domain = Domain(records=[Records(generate="gsm_symbolic")])
    params = SimpleNamespace(targets={"tiny": Target()}, rollouts=section, domains={"math": domain}, seed=0)
    (tmp_path / "kept").mkdir()
    with pytest.raises(UserError, match="rollouts of tiny, math, adaptation: all 2 responses are empty"):
        rollouts.collect(params, "tiny", tmp_path / "kept", tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_responses_do_not_depend_on_the_batch_and_end_at_eos(target, target_folder):
    """Greedy, fp32: left padding and grouped heads change nothing, against a plain loop without a cache."""
    tokenizer = models.load_tokenizer(target_folder)
    requests = [
        prompts.render(tokenizer, text, None) for text in ("one", "two and three", "a longer question, this one")
    ]
    eos = [2, 17]
    model = models.load_model(target_folder, torch.float32)
    together = rollouts.generate(model, requests, [1, 3, 4], 0.0, 12, eos, seed=0)
    for request, response in zip(requests, together, strict=True):
        tokens = list(request)
        while len(tokens) < len(request) + 12 and not (len(tokens) > len(request) and tokens[-1] in eos):
            with torch.no_grad():
                tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert response.tokens.tolist() == tokens


def test_sampling_uses_the_whole_distribution_at_temperature_one(target, target_folder):
    """No top-k, top-p or repetition penalty sneaks in from generation_config: first tokens fit a chi-square test."""
    from scipy.stats import chisquare

    request = [1, 40, 41, 42]
    with torch.no_grad():
        p = target(torch.tensor([request])).logits[0, -1].double().softmax(-1).numpy()
    model = models.load_model(target_folder, torch.float32)
    model.generation_config.top_k = 5
    first = [int(made.tokens[-1]) for made in rollouts.generate(model, [request] * 4000, [1, 3, 4], 1.0, 1, [2], 0)]
    top = np.argsort(-p)[:20]
    rest = 1 - p[top].sum()
    observed = [*(first.count(token) for token in top), sum(token not in top for token in first)]
    assert chisquare(observed, 4000 * np.array([*p[top], rest])).pvalue > 1e-3


def test_multi_eos_comes_from_the_generation_config(target_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(target_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert models.eos_ids(folder, models.load_tokenizer(folder)) == [2, 5]


def test_taps_of_a_deep_target_are_eagle3s():
    assert taps.layer_ids(36, None, "qwen") == [1, 17, 32]
