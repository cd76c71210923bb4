"""Stage 1: keep the embedding, the first N blocks, the final norm and the head of a pretrained LM."""

from pathlib import Path

from osprey import models
from osprey.params import UserError


def prune(source: Path, layers: int, folder: Path) -> dict:
    """Write the first `layers` blocks of `source` as a model of its own; returns its parameter counts.

    Everything kept is inherited verbatim; per-layer lists of the config (`layer_types`, ...) are cut with the
    blocks (paper, Appendix C). Raises UserError when the source is shallower or has no `model.layers`.
    """
    model = models.load_model(source, "auto")
    decoder = model.model if hasattr(model, "model") else None
    if not hasattr(decoder, "layers"):
        raise UserError(f"{source}: {type(model).__name__} has no model.layers; its blocks cannot be pruned")
    depth = len(decoder.layers)
    if layers > depth:
        raise UserError(f"source.layers: {layers} blocks asked for, the source has {depth}")
    decoder.layers = decoder.layers[:layers]
    config = model.config
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:layers])
    config.num_hidden_layers = layers
    with models.finished(folder) as made:
        models.save(model, models.load_tokenizer(source), made)
    blocks = sum(p.numel() for p in decoder.layers.parameters())
    return {"source_layers": depth, "layers": layers, "parameters": model.num_parameters(), "in_blocks": blocks}
