"""Stage 3: a backbone becomes a drafter for one target (osprey), or a drafter starts from random (eagle3).

Vocabulary alignment is align.py's; here are the expansion of q, k, v (eq. 2), the projection of the taps (eq. 1)
and the baseline's start.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from osprey import align, checkpoint, models, taps
from osprey.drafter import Drafter
from osprey.params import Recipe, Target, UserError

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
BODIES = {
    "backbone": "data/pretrained/backbone",
    "short-backbone": "data/pretrained/short-backbone",
    "pruned": "data/pruned",
}


def expand_qkv(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Eq. 2: [0 W], `width` zero columns for the context in front of the pretrained ones. [out, width + in]."""
    return torch.cat([weight.new_zeros(len(weight), width), weight], dim=1)


def identity_fc(width: int, target_width: int) -> torch.Tensor:
    """W_c of eq. 1 at the start, [width, 3 · target_width]: the deepest tap, cut or zero-padded to the width.

    Zero would leave it without gradient for ever: behind zero columns neither it nor they would move.
    """
    fc = torch.zeros(width, 3 * target_width)
    fc[:, 2 * target_width :].fill_diagonal_(1.0)
    return fc


def check_blocks(config, where: str) -> None:
    """Raises UserError unless the blocks are what the drafter network computes."""
    if config.model_type not in LLAMA_SHAPED:
        raise UserError(f"{where}: {config.model_type} blocks cannot become a drafter (can: {', '.join(LLAMA_SHAPED)})")
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        raise UserError(f"{where}: {config.model_type} with {config.hidden_act} or biased MLPs cannot become a drafter")
    sliding = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    if sliding or (config.model_type == "mistral" and config.sliding_window):
        raise UserError(f"{where}: blocks with {(sliding or ['sliding_attention'])[0]} cannot become a drafter")


def osprey_state(lm, alignment: align.Alignment, ids: torch.Tensor, target_width: int) -> dict[str, torch.Tensor]:
    """The drafter's weights from the backbone's: aligned rows, expanded q/k/v, both norms the source's input norm."""
    width = lm.config.hidden_size
    state = {
        "embed_tokens.weight": alignment.apply(lm.get_input_embeddings().weight.detach()),
        "lm_head.weight": alignment.apply(lm.get_output_embeddings().weight.detach())[ids],
        "norm.weight": lm.model.norm.weight,
        "fc.weight": identity_fc(width, target_width),
    }
    for index, block in enumerate(lm.model.layers):
        prefix = f"layers.{index}."
        for name, tensor in block.state_dict().items():
            if name.split(".")[1] in ("q_proj", "k_proj", "v_proj") and name.endswith("weight"):
                tensor = expand_qkv(tensor, width)
            state[prefix + name] = tensor
            if name == "input_layernorm.weight":
                state[prefix + "hidden_norm.weight"] = tensor
            if name == "self_attn.q_proj.bias":  # the release's layout has biases on all four projections or none
                state.setdefault(prefix + "self_attn.o_proj.bias", tensor.new_zeros(width))
    return state


def eagle3_start(drafter: Drafter, target_embedding_VD: torch.Tensor, seed: int) -> None:
    """EAGLE-3's start: everything random but the embedding, which is the target's."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, drafter.config.initializer_range, generator=generator)
        elif name.endswith("bias"):  # torch's own start is random and not ours to seed
            parameter.data.zero_()
    drafter.embed_tokens.weight.data.copy_(target_embedding_VD)


def set_vocabulary(drafter: Drafter, ids: torch.Tensor) -> None:
    """t2d and d2t for the sorted target ids of the draft vocabulary."""
    drafter.t2d[ids] = True
    drafter.d2t.copy_(ids - torch.arange(len(ids)))


def convert(
    recipe: Recipe, body: Path | None, source: Path, target: Path, spec: Target, ids, seed: int, out: Path
) -> dict:
    """Write the drafter folder `out` of `recipe` for the target in the folder `target`.

    `body`: the backbone's folder (osprey) or None; `source`: the folder whose tokenizer the backbone has; `ids`: the
    sorted target ids of the draft vocabulary. Beside the drafter lies what teaches it, teacher.safetensors: the
    target head's rows of that vocabulary, and its softcap (0: none). Returns parameter and alignment counts.
    """
    tokenizer = models.load_tokenizer(target)
    teacher = models.load_model(target, torch.bfloat16)
    target_config = teacher.config.get_text_config()
    tapped = taps.layer_ids(target_config.num_hidden_layers, spec.taps, target.name)
    ids = torch.as_tensor(ids)
    shape = models.load_config(body) if body else target_config
    if body:
        check_blocks(shape, "source.model")
    elif not hasattr(shape, "intermediate_size") or not hasattr(shape, "rope_parameters"):
        raise UserError(
            f"targets.{target.name}: EAGLE-3's layer copies a Llama-like shape, {shape.model_type} has none"
        )
    config = checkpoint.drafter_config(
        shape, target_config, tokenizer, models.eos_ids(target, tokenizer), tapped, len(ids),
        swap=recipe.interface == "osprey", layers=recipe.layers or shape.num_hidden_layers,
    )  # fmt: skip
    drafter = Drafter(config)
    set_vocabulary(drafter, ids)
    with models.finished(out) as made:
        counts = {}
        if body:
            source_tokenizer = models.load_tokenizer(source)
            alignment = align.align(source_tokenizer, shape.vocab_size, tokenizer, target_config.vocab_size)
            state = osprey_state(models.load_model(body, torch.float32), alignment, ids, target_config.hidden_size)
            drafter.load_state_dict(state | {"t2d": drafter.t2d, "d2t": drafter.d2t})
            alignment.to_csv(made / "alignment.csv", tokenizer, source_tokenizer)
            counts = alignment.counts()
        else:
            eagle3_start(drafter, teacher.get_input_embeddings().weight.detach(), seed)
        checkpoint.save(drafter, made)
        tokenizer.save_pretrained(made)
        head_VH = teacher.get_output_embeddings().weight.detach()[ids]
        softcap = torch.tensor(taps.softcapping(teacher.config) or 0.0)
        save_file({"head": head_VH, "softcap": softcap}, made / "teacher.safetensors", metadata={"target": target.name})
    body_size = sum(p.numel() for n, p in drafter.named_parameters() if n.startswith(("layers", "fc")))
    return {"body_parameters": body_size, "taps": tapped, "draft_vocabulary": len(ids), **counts}


def stage(params, name: str, ids, coverage, root: Path) -> dict:
    """Make `name` of params.drafters from the stage outputs under `root`; the coverage table goes beside it."""
    drafter = params.drafters[name]
    recipe = params.recipes[drafter.recipe]
    body = root / BODIES[recipe.body] if recipe.body in BODIES else None
    source, target = root / "data/models" / params.source.model, root / "data/models" / drafter.target
    out = root / "data/converted" / name
    with models.finished(out) as made:
        about = convert(recipe, body, source, target, params.targets[drafter.target], ids, params.seed, made)
        coverage.to_csv(made / "coverage.csv", index=False, float_format="%.6g")
    return about
