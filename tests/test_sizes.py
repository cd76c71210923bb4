"""Parameters counted from a checkpoint's header against those of the network itself."""

import json
import struct

import pytest

from osprey import checkpoint, sizes
from osprey.params import UserError


@pytest.mark.parametrize("interface, layers", [("osprey", 2), ("eagle3", 1), ("eagle3", 2)])
def test_counts_are_the_networks(make_converted, interface, layers):
    folder = make_converted(interface, layers=layers)
    drafter = checkpoint.load(folder)
    counted = sizes.count(folder / checkpoint.WEIGHTS)
    part = {"body": [drafter.layers, drafter.fc], "embedding": [drafter.embed_tokens], "head": [drafter.lm_head]}
    for name, modules in part.items():
        assert counted[name] == sum(p.numel() for module in modules for p in module.parameters())
    assert counted["total"] == sum(p.numel() for p in drafter.parameters())
    assert (counted["layers"], counted["width"]) == (layers, drafter.config.hidden_size)


def test_a_missing_or_cut_file_is_one_line(make_converted, tmp_path):
    with pytest.raises(UserError, match="none.safetensors: cannot be read .* make it with dvc repro"):
        sizes.count(tmp_path / "none.safetensors")
    whole = (make_converted("eagle3", layers=1) / checkpoint.WEIGHTS).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match="cut.safetensors: cannot be read"):
        sizes.count(tmp_path / "cut.safetensors")


def test_no_weight_is_loaded(tmp_path):
    """64 GB of weights, which exist only as a hole in the file, are counted at once and in no memory."""
    rows, columns = 2_000_000, 8_000
    tensor = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}
    header = json.dumps({"fc.weight": tensor}).encode()
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * rows * columns)
    assert sizes.count(tmp_path / "large.safetensors")["body"] == rows * columns
