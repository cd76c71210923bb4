"""How large the drafters are, counted from their checkpoints' headers (Table 11). No weight is loaded."""

from pathlib import Path

from safetensors import safe_open

from osprey.params import UserError

BUFFERS = {"t2d", "d2t"}  # the draft vocabulary's tables, not parameters


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a safetensors file. Raises UserError when it is missing or cut short."""
    try:
        with safe_open(file, "np") as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
    except Exception as error:  # safetensors has its own kinds, none of them public
        raise UserError(f"{file}: cannot be read ({error}); make it with dvc repro") from None


def parameters(found: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Layers, width and parameters of a drafter with these tensors (design, section 6).

    body: layers and fc, as the paper counts (Appendix E); embedding; head; total: these and the final norm.
    """
    counted = {"layers": set(), "width": found["fc.weight"][0], "body": 0, "embedding": 0, "head": 0, "total": 0}
    for name, shape in found.items():
        if name in BUFFERS:
            continue
        size = 1
        for length in shape:
            size *= length
        part = name.split(".")[0]
        if part in ("layers", "midlayer"):
            counted["layers"].add(name.split(".")[1] if part == "layers" else part)
        kind = {"layers": "body", "midlayer": "body", "fc": "body", "embed_tokens": "embedding", "lm_head": "head"}
        if part in kind:
            counted[kind[part]] += size
        counted["total"] += size
    return counted | {"layers": len(counted["layers"])}


def count(file: Path) -> dict[str, int]:
    return parameters(shapes(file))
