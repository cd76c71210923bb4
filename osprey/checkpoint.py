"""Drafter folders, in the layout of the authors' public release (design, section 6).

`config.json` with `<Llama|Qwen3>ForCausalLMEagle3`, safetensors under the release's key names, and the target's
tokenizer. One layer is called `midlayer`. d2t is an offset: target id = d + d2t[d].
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from osprey.drafter import Drafter
from osprey.params import UserError

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLMEagle3"}
WEIGHTS = "model.safetensors"


def drafter_config(
    shape, target, tokenizer, eos: list[int], taps: list[int], draft_vocabulary: int, swap: bool, layers
):
    """The drafter's config: the blocks of the config `shape`, the vocabulary and special tokens of the target's."""
    qwen3 = shape.model_type == "qwen3"
    config = (Qwen3Config if qwen3 else LlamaConfig)(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        hidden_act="silu",
        rms_norm_eps=shape.rms_norm_eps,
        # one kind of attention: targets with several (Gemma 3) have rotary settings for each
        rope_parameters=shape.rope_parameters.get("full_attention", shape.rope_parameters),
        max_position_embeddings=shape.max_position_embeddings,
        attention_bias=shape.model_type == "qwen2" or bool(getattr(shape, "attention_bias", False)),
        mlp_bias=False,
        tie_word_embeddings=False,
        vocab_size=target.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos if len(eos) > 1 else eos[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    config.architectures = [ARCHITECTURES[config.model_type]]
    config.swap_h_and_emb = swap
    config.target_hidden_size = target.hidden_size
    config.draft_vocab_size = draft_vocabulary
    # SGLang reads the nested ids and adds 1, vLLM the top-level ones as they are: both then tap the same states
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}
    config.eagle_aux_hidden_state_layer_ids = [tap + 1 for tap in taps]
    return config


def outward(name: str, layers: int) -> str:
    return name.replace("layers.0.", "midlayer.", 1) if layers == 1 else name


def save(drafter: Drafter, folder: Path) -> None:
    """Write config and weights into an existing folder (make it with `models.finished`)."""
    config = drafter.config
    config.dtype = torch.float32
    config.save_pretrained(folder)
    state = {
        outward(name, config.num_hidden_layers): tensor.contiguous() for name, tensor in drafter.state_dict().items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})  # a second key would be written in random order


def load(folder: Path) -> Drafter:
    """Read a drafter, in fp32 and eval mode. Raises UserError where the folder is not a whole one."""
    if not (folder / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: not a drafter folder (it lacks config.json or {WEIGHTS})")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # cut short, or values that do not fit together: transformers has many kinds
        raise UserError(f"{folder}/config.json: {' '.join(str(error).split())}") from None
    missing = [key for key in ("swap_h_and_emb", "draft_vocab_size", "target_hidden_size") if not hasattr(config, key)]
    if missing:
        raise UserError(f"{folder}/config.json: no {missing[0]}; not a drafter's config")
    try:
        state = load_file(folder / WEIGHTS)
    except Exception as error:  # safetensors has its own kinds, none of them public
        raise UserError(f"{folder}/{WEIGHTS}: cannot be read ({error}); it was cut short, make it again") from None
    drafter = Drafter(config)
    own = drafter.state_dict()
    wanted = {outward(name, config.num_hidden_layers): name for name in own}
    if set(wanted) != set(state):
        name = sorted(set(wanted) ^ set(state))[0]
        raise UserError(f"{folder}/{WEIGHTS}: {name} is {'missing' if name in wanted else 'unknown'}")
    for name, tensor in state.items():
        if tensor.shape != own[wanted[name]].shape:
            shapes = f"{list(tensor.shape)}, config.json says {list(own[wanted[name]].shape)}"
            raise UserError(f"{folder}/{WEIGHTS}: {name} is {shapes}")
    drafter.load_state_dict({wanted[name]: tensor for name, tensor in state.items()})
    return drafter.eval()
