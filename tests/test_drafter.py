"""Conversion keeps the backbone's function, training moves what starts at zero, and folders read back as written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)  # fmt: skip

from osprey import checkpoint, models, prune
from osprey.convert import convert
from osprey.distill import distill
from osprey.params import Distill, Recipe, Target, UserError
from osprey.unroll import unroll

PRUNED, EAGLE3 = Recipe(interface="osprey", body="pruned"), Recipe(interface="eagle3", body="random", layers=2)
SHAPE = {
    "vocab_size": 512, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SOURCES = {
    "llama": LlamaConfig(**SHAPE, head_dim=20, rms_norm_eps=1e-5),  # 4 heads of 20 are not 48 wide
    "llama-biased-rope": LlamaConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3),
    "llama-tied-wider": LlamaConfig(**SHAPE | {"hidden_size": 96, "tie_word_embeddings": True}),  # the target has 64
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),  # biases on q, k, v and not on o
    "qwen3": Qwen3Config(**SHAPE, head_dim=24),
    "qwen3-yarn": Qwen3Config(**SHAPE, head_dim=24, rope_parameters=YARN),
}


def write_source(config, target_folder, folder):
    """A model with every parameter random, norms and biases too, and the target's tokenizer."""
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.3 * noise
    models.save(model, models.load_tokenizer(target_folder), folder)


@pytest.fixture(scope="module")
def preserved(tmp_path_factory, target_folder):
    """preserved(kind) → the pruned backbone as Hugging Face's own model, and the drafter made of it."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            write_source(SOURCES[kind], target_folder, folder / "source")
            prune.prune(folder / "source", 2, folder / "pruned")
            body, out = folder / "pruned", folder / "drafter"
            convert(PRUNED, body, folder / "source", target_folder, Target(), range(512), 0, out)
            made[kind] = models.load_model(body, torch.float32), checkpoint.load(out)
        return made[kind]

    return make


def relative(a, b) -> float:
    return float((a - b).abs().max() / b.abs().max())


def drafted(drafter, tokens_T, taps_TC, steps: int):
    """Teacher-forced logits of all chains, [steps, T - 1, V]."""
    starts_BS = torch.arange(len(tokens_T) - 1)[None]
    states = unroll(drafter, tokens_T[None], taps_TC[None], starts_BS, steps)
    return torch.stack([drafter.logits(hidden_BSD)[0] for hidden_BSD in states])


@torch.no_grad()
@pytest.mark.parametrize("kind", SOURCES)
def test_a_converted_drafter_computes_what_its_backbone_does_whatever_the_taps(preserved, kind):
    backbone, drafter = preserved(kind)
    tokens_T = torch.randint(512, (24,), generator=torch.Generator().manual_seed(3))
    expected = backbone(tokens_T[None, 1:]).logits[0]  # index i holds token i + 1 at position i
    assert len(backbone.model.layers) == len(drafter.layers) == 2
    for scale in (0.0, 1.0, 1e4):
        assert relative(drafted(drafter, tokens_T, scale * torch.randn(24, 192), 1)[0], expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", SOURCES)
def test_at_the_start_a_later_step_equals_the_first_step_of_a_later_chain(preserved, kind):
    _, drafter = preserved(kind)
    tokens_T = torch.randint(512, (12,), generator=torch.Generator().manual_seed(4))
    logits_KTV = drafted(drafter, tokens_T, torch.randn(12, 192), 4)
    for k in range(1, 4):
        assert relative(logits_KTV[k, :-k], logits_KTV[0, k:]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind,width", [("qwen3", 48), ("llama-tied-wider", 96)])
def test_the_context_starts_as_the_deepest_tap(preserved, kind, width):
    taps_C = torch.randn(192)
    deepest_H = taps_C[128:]
    cut_or_padded = torch.cat([deepest_H, torch.zeros(32)])[:width]
    assert torch.equal(preserved(kind)[1].fc(taps_C), cut_or_padded)


def test_rows_are_the_sources_or_means_of_them(make_drafter, other_source_folder, target_folder, make_pruned):
    drafter = make_drafter("osprey", source=other_source_folder, stirred=False)
    rows = models.load_model(make_pruned(other_source_folder), torch.float32).get_input_embeddings().weight
    source, target = models.load_tokenizer(other_source_folder), models.load_tokenizer(target_folder)
    known, spelled = source.get_vocab(), 0
    for token, v in target.get_vocab().items():
        text = target.decode([v])
        pieces = [token] if token in known else list(token) if "\ufffd" in text else source.tokenize(text)
        ids = [known[piece] for piece in pieces]
        spelled += len(ids) > 1
        for matrix in (drafter.embed_tokens.weight, drafter.lm_head.weight):
            torch.testing.assert_close(matrix[v], rows[ids].mean(0), rtol=0, atol=1e-6)
    assert spelled > 100


def test_a_reduced_vocabulary_keeps_its_rows_and_drafts_target_ids(make_drafter):
    ids = [0, 1, 2, 7, 100, 300, 511]
    reduced, full = make_drafter("osprey", ids=ids, stirred=False), make_drafter("osprey", stirred=False)
    assert reduced.config.draft_vocab_size == 7 and reduced.embed_tokens.weight.shape[0] == 512
    assert torch.equal(reduced.lm_head.weight, full.lm_head.weight[ids])
    assert (torch.arange(7) + reduced.d2t).tolist() == ids
    assert torch.nonzero(reduced.t2d).squeeze(1).tolist() == ids
    hidden_BSD = torch.randn(1, 50, 48)
    best = full.logits(hidden_BSD)[..., ids].argmax(-1)
    assert torch.equal(reduced.draft(hidden_BSD), torch.tensor(ids)[best])
    assert torch.equal(full.draft(hidden_BSD), full.logits(hidden_BSD).argmax(-1))


def test_an_eagle3_start_is_random_but_for_the_targets_embedding(make_converted, target):
    state = load_file(make_converted("eagle3", layers=2) / "model.safetensors")
    assert torch.equal(state["embed_tokens.weight"], target.get_input_embeddings().weight)
    matrices = {name: tensor for name, tensor in state.items() if tensor.dim() == 2}
    del matrices["embed_tokens.weight"]
    assert len(matrices) == 2 + 2 * 7  # head, fc, and seven a layer
    for name, tensor in matrices.items():
        assert abs(float(tensor.std()) - 0.02) < 0.002 and abs(float(tensor.mean())) < 0.002, name


@pytest.mark.parametrize("interface", ["osprey", "eagle3"])
def test_training_moves_zeros_and_leaves_what_is_frozen(interface, make_converted, make_response, tmp_path):
    converted = make_converted(interface)
    responses = [make_response("000" + "1" * 9, seed) for seed in range(6)]
    section = Distill(tokens=6 * 8, steps=3, precision="fp32")
    distill(converted, responses, section, 1e-3, 0, "run", tmp_path / "kept", tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, tmp_path / "out"))
    assert before.keys() == after.keys()
    frozen = {"d2t", "t2d"} | ({"embed_tokens.weight"} if interface == "eagle3" else set())
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    if interface == "osprey":
        width = 48
        for name in (f"layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "qkv"):
            assert not before[name][:, :width].any() and before[name][:, width:].any()
            assert (after[name][:, :width] != 0).float().mean() > 0.99
        changed = (before["embed_tokens.weight"] != after["embed_tokens.weight"]).any(1)
        # the first token is never seen, the last one only predicted
        read = {int(token) for response in responses for token in response.tokens[1:-1]}
        assert set(torch.nonzero(changed).squeeze(1).tolist()) == read


REFUSED = {
    "gemma": (GemmaConfig(**SHAPE, head_dim=12), "gemma blocks"),
    "olmo2": (Olmo2Config(**SHAPE), "olmo2 blocks"),
    "sliding-mistral": (MistralConfig(**SHAPE, sliding_window=8), "sliding_attention"),
    "sliding-qwen3": (
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding_attention",
    ),
    "gelu": (LlamaConfig(**SHAPE, hidden_act="gelu"), "gelu"),
    "biased-mlp": (LlamaConfig(**SHAPE, mlp_bias=True), "biased MLPs"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_source_of_another_shape_is_refused_by_name(kind, target_folder, tmp_path):
    config, named = REFUSED[kind]
    source = tmp_path / "source"
    write_source(config, target_folder, source)
    with pytest.raises(UserError, match=named) as refused:
        convert(PRUNED, source, source, target_folder, Target(), range(512), 0, tmp_path / "out")
    assert "\n" not in str(refused.value) and "source.model" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


MLP = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]
ATTENTION = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"]
NARROW = ["input_layernorm.weight", "post_attention_layernorm.weight", *MLP, *ATTENTION]
WIDE = [*NARROW, "hidden_norm.weight"]
QWEN3 = [*WIDE, "self_attn.q_norm.weight", "self_attn.k_norm.weight"]
ALWAYS = ["embed_tokens.weight", "fc.weight", "lm_head.weight", "norm.weight", "t2d", "d2t"]
KEYS = {
    ("osprey", "qwen3", 1): {"midlayer.": QWEN3},
    ("osprey", "qwen3", 2): {"layers.0.": QWEN3, "layers.1.": QWEN3},
    ("osprey", "llama", 1): {"midlayer.": WIDE},
    ("osprey", "llama", 2): {"layers.0.": WIDE, "layers.1.": WIDE},
    ("eagle3", "llama", 1): {"midlayer.": WIDE},
    ("eagle3", "llama", 2): {"layers.0.": WIDE, "layers.1.": NARROW},
}


@pytest.mark.parametrize("interface,architecture,layers", KEYS)
def test_a_folder_reads_back_as_written_under_the_releases_names(
    interface, architecture, layers, make_drafter, make_model, source_folder, tmp_path
):
    source = source_folder if architecture == "qwen3" else make_model("llama", width=48, head_dim=24, seed=1)
    ids = [0, 1, 2, 40, 500]
    drafter = make_drafter(interface, layers=layers, source=source, ids=ids)
    checkpoint.save(drafter, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    expected = [prefix + name for prefix, names in KEYS[interface, architecture, layers].items() for name in names]
    assert sorted(state) == sorted(expected + ALWAYS)
    assert state["d2t"].tolist() == [0, 0, 0, 37, 496] and state["d2t"].dtype == torch.int64
    assert state["t2d"].nonzero().squeeze(1).tolist() == ids and state["t2d"].dtype == torch.bool

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [{"qwen3": "Qwen3", "llama": "Llama"}[architecture] + "ForCausalLMEagle3"]
    assert config["swap_h_and_emb"] is (interface == "osprey")
    assert (config["target_hidden_size"], config["draft_vocab_size"], config["vocab_size"]) == (64, 5, 512)
    assert config["num_hidden_layers"] == layers and config["tie_word_embeddings"] is False
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang adds 1
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM does not

    loaded = checkpoint.load(tmp_path)
    assert not loaded.training
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens_T, taps_TC = torch.arange(100, 108), torch.randn(8, 192)
    assert torch.equal(drafted(loaded, tokens_T, taps_TC, 3), drafted(drafter, tokens_T, taps_TC, 3))


@pytest.mark.parametrize("config", [Qwen2Config, Gemma3TextConfig])
@pytest.mark.parametrize("recipe", [PRUNED, EAGLE3])
def test_equal_inputs_make_equal_bytes(recipe, config, source_folder, target_folder, make_pruned, tmp_path):
    target = tmp_path / "target"
    write_source(config(**SHAPE | {"num_hidden_layers": 8}), target_folder, target)
    body = make_pruned(source_folder) if recipe == PRUNED else None
    for run in (0, 1):
        torch.manual_seed(run)
        convert(recipe, body, source_folder, target, Target(), range(512), 0, tmp_path / str(run))
    names = sorted(file.name for file in (tmp_path / "0").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "1").iterdir()) and "model.safetensors" in names
    for name in names:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes(), name


def test_a_target_with_two_kinds_of_attention_lends_eagle3_one(target_folder, source_folder, tmp_path):
    target = tmp_path / "target"
    config = Gemma3TextConfig(**SHAPE | {"num_hidden_layers": 8})
    write_source(config, target_folder, target)
    convert(EAGLE3, None, source_folder, target, Target(), range(512), 0, tmp_path / "out")
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    made = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert made == {"rope_type": "default", "rope_theta": 1e6}


def test_the_teacher_is_the_targets_head_rows(target_folder, source_folder, make_converted, tmp_path):
    ids = [0, 1, 2, 7, 300]
    capped = tmp_path / "target"
    write_source(Gemma2Config(**SHAPE | {"num_hidden_layers": 8}, head_dim=12), target_folder, capped)
    convert(EAGLE3, None, source_folder, capped, Target(), ids, 0, tmp_path / "out")
    for target, out, softcap in ((target_folder, make_converted("eagle3", ids=ids), 0), (capped, tmp_path / "out", 30)):
        teacher = load_file(out / "teacher.safetensors")
        head = models.load_model(target, torch.bfloat16).get_output_embeddings().weight[ids]
        assert torch.equal(teacher["head"], head) and float(teacher["softcap"]) == softcap


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_config(folder):
    file = folder / "config.json"
    file.write_text(file.read_text()[:200])


def drop_weight(folder, name):
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors")


def set_weight(folder, name, tensor):
    save_file(load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors")


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


FAULTS = {
    "weights cut short": (cut_weights, "model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "config cut short": (cut_config, "config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no embedding": (lambda folder: drop_weight(folder, "embed_tokens.weight"), "embed_tokens.weight is missing"),
    "unknown key": (lambda folder: set_weight(folder, "extra", torch.ones(1)), "extra is unknown"),
    "other shape": (lambda folder: set_weight(folder, "fc.weight", torch.ones(2, 2)), "fc.weight is [2, 2]"),
    "no drafter's config": (lambda folder: edit_config(folder, lambda c: c.pop("swap_h_and_emb")), "swap_h_and_emb"),
    "other layers": (lambda folder: edit_config(folder, lambda c: c.update(num_hidden_layers=1)), "num_hidden_layers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_a_whole_drafter_is_refused_in_one_line(fault, make_drafter, tmp_path):
    spoil, named = FAULTS[fault]
    checkpoint.save(make_drafter("osprey"), tmp_path)
    checkpoint.load(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError) as refused:
        checkpoint.load(tmp_path)
    assert named in str(refused.value) and str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_model_that_is_no_drafter_is_refused_in_one_line(target_folder):
    with pytest.raises(UserError, match="not a drafter") as refused:
        checkpoint.load(target_folder)
    assert "\n" not in str(refused.value)
