"""Shards hold every document once, each with one EOS; windows are disjoint, repeatable and inside one shard."""

import hashlib
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from osprey import corpus, params
from osprey.params import UserError

EOS = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def document(name: str, number: int) -> str:
    return f"{name} {number}: " + " ".join(hashlib.sha256(f"{name}{number}".encode()).hexdigest())


def spec(folder, characters=4000, **keys) -> params.Corpus:
    """Two texts of 100 documents each, on disk; the first has duplicates, a short one and untidy white space."""
    for name in ("alpha", "beta"):
        lines = [document(name, number) for number in range(100)]
        extra = [lines[0], "short", lines[1].replace(" ", "  ") + " \r\n\n\n"] if name == "alpha" else [lines[5]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines + extra))
    texts = {
        name: {"path": str(folder / f"{name}.jsonl"), "field": "text", "share": share, "min_characters": 10}
        for name, share in (("alpha", 0.75), ("beta", 0.25))
    }
    return params.Corpus.model_validate({"texts": texts, "characters": characters, "held_out": 0.2, **keys})


def documents(folder, split, tokenizer) -> list[str]:
    ids = corpus.load_tokens(folder, split, 10**9)
    assert ids[-1] == EOS
    ends = np.flatnonzero(ids == EOS)
    return [tokenizer.decode(ids[start:end]) for start, end in zip([0, *ends[:-1] + 1], ends, strict=True)]


def test_documents_whole_once_and_with_one_eos(tmp_path, tokenizer):
    info = corpus.build(spec(tmp_path, shard_tokens=1000), tokenizer, EOS, 0, tmp_path / "out")
    sides = {split: documents(tmp_path / "out", split, tokenizer) for split in ("train", "held-out")}
    everything = sides["train"] + sides["held-out"]
    known = {document(name, number) for name in ("alpha", "beta") for number in range(100)}
    assert set(everything) <= known and len(everything) == len(set(everything))  # so no document on both sides
    for name, share in (("alpha", 0.75), ("beta", 0.25)):
        lengths = [len(text) for text in everything if text.startswith(name)]
        assert sum(lengths) == info["texts"][name]["characters"] and len(lengths) == info["texts"][name]["documents"]
        assert share * 4000 <= sum(lengths) < share * 4000 + max(lengths)
    assert info == json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert [info[split]["documents"] for split in sides] == [len(side) for side in sides.values()]
    sizes = info["train"]["shards"]
    assert len(sizes) > 2 and set(sizes[:-1]) == {1000} and sum(sizes) == info["train"]["tokens"]


def test_shards_differ_only_by_their_cuts(tmp_path, tokenizer):
    corpus.build(spec(tmp_path, shard_tokens=77), tokenizer, EOS, 0, tmp_path / "small")
    corpus.build(spec(tmp_path), tokenizer, EOS, 0, tmp_path / "whole")
    whole = np.fromfile(tmp_path / "whole" / "train-00000.bin", "<u4")
    assert np.array_equal(corpus.load_tokens(tmp_path / "small", "train", 10**9), whole)
    assert np.array_equal(corpus.load_tokens(tmp_path / "small", "train", 200), whole[:200])


def test_same_seed_same_bytes(tmp_path, tokenizer):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        corpus.build(spec(tmp_path), make_tokenizer(), EOS, seed, tmp_path / name)
    files = {name: [path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in "abc"}
    assert files["a"] == files["b"] != files["c"]


def test_a_spelled_out_special_token_stays_text(tmp_path, tokenizer):
    texts = [f"{document('x', number)} <eos> more" for number in range(40)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps([text]) + "\n" for text in texts))
    text = {"path": str(tmp_path / "x.jsonl"), "field": "0", "share": 1.0}
    made = params.Corpus.model_validate({"texts": {"x": text}, "characters": 3000, "held_out": 0.3})
    corpus.build(made, tokenizer, EOS, 0, tmp_path / "out")
    assert set(documents(tmp_path / "out", "train", tokenizer)) < set(texts)


def test_too_short_a_text_leaves_nothing(tmp_path, tokenizer):
    unique = sum(len(document("alpha", number)) for number in range(100))
    with pytest.raises(UserError, match=f"corpus.texts.alpha: has {unique:,} characters, its share asks for 75,000"):
        corpus.build(spec(tmp_path, 100_000), tokenizer, EOS, 0, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["alpha.jsonl", "beta.jsonl"]


def test_an_empty_side_is_an_error(tmp_path, tokenizer):
    with pytest.raises(UserError, match="corpus.held_out: 0.0001 of .* leaves held-out empty"):
        corpus.build(spec(tmp_path, held_out=0.0001), tokenizer, EOS, 0, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_held_out_documents_stay_held_out_when_the_corpus_grows(tmp_path, tokenizer):
    for characters in (3000, 9000):
        corpus.build(spec(tmp_path, characters), tokenizer, EOS, 0, tmp_path / str(characters))
    small, large = (set(documents(tmp_path / size, "held-out", tokenizer)) for size in ("3000", "9000"))
    assert small < large


def test_generated_text_needs_no_files(tmp_path, tokenizer):
    text = {"generate": "aiw", "share": 1.0}
    made = params.Corpus.model_validate({"texts": {"puzzles": text}, "characters": 20_000, "held_out": 0.2})
    info = corpus.build(made, tokenizer, EOS, 0, tmp_path / "out")
    assert info["texts"]["puzzles"]["characters"] >= 20_000


@pytest.mark.parametrize(
    ("raw", "markup", "text"),
    [
        ("  a \t b\u00a0c  \r\n    d\r\n\r\n\r\n\r\ne \n", False, "a b c\n    d\n\ne"),
        ("<p>x &lt; <strong>y</strong></p><br/>z &eacute;", True, "x < y\n\nz é"),
        ("a<b and c>d &amp;", False, "a<b and c>d &amp;"),
    ],
)
def test_clean(raw, markup, text):
    assert corpus.clean(raw, markup) == text


def test_shuffle_loses_nothing(monkeypatch):
    assert list(corpus.shuffle(iter(range(100)), "s")) != list(range(100))
    monkeypatch.setattr(corpus, "SHUFFLE", 10)
    out = list(corpus.shuffle(iter(range(100)), "s"))
    assert sorted(out) == list(range(100)) != out and out == list(corpus.shuffle(iter(range(100)), "s"))


def numbered(folder, sizes, held_out=(50,)):
    """A corpus whose tokens are their own positions: shard s, place p is 1000 s + p."""
    folder.mkdir()
    info = {}
    for split, counts in (("train", sizes), ("held-out", held_out)):
        shards = [(1000 * number + np.arange(count, dtype="<u4")).tobytes() for number, count in enumerate(counts)]
        for number, content in enumerate(shards):
            corpus.shard(folder, split, number).write_bytes(content)
        info[split] = {"shards": list(counts), "sha256": [hashlib.sha256(content).hexdigest() for content in shards]}
    (folder / "corpus.json").write_text(json.dumps(info))
    return folder


def items(windows, numbers) -> list[list[int]]:
    return [windows[n]["input_ids"].tolist() for n in numbers]


def test_windows_of_an_epoch_are_disjoint_whole_and_in_one_shard(tmp_path):
    folder = numbered(tmp_path / "c", [95, 23, 7, 10])
    windows = corpus.Windows(folder, "train", 10, 300, 0)
    assert windows.per_epoch == 8 + 1 + 0 + 1 and len(windows) == 300
    cuts = set()
    for epoch in range(30):
        taken = items(windows, range(epoch * 10, epoch * 10 + 10))
        flat = [token for window in taken for token in window]
        assert len(set(flat)) == 100
        assert all(window == list(range(window[0], window[0] + 10)) for window in taken)  # so none crosses a shard
        cuts.add(tuple(sorted(window[0] for window in taken)))
    assert len(cuts) > 15  # the cuts move from epoch to epoch
    seen = {token for window in items(windows, range(300)) for token in window}
    assert seen == {*range(95), *range(1000, 1023), *range(3000, 3010)}  # no token is out of reach


def test_ranks_are_disjoint_and_every_item_stands_alone(tmp_path):
    folder = numbered(tmp_path / "c", [95, 500])
    windows = corpus.Windows(folder, "train", 10, 400, 3)
    assert windows.per_epoch == 8 + 49
    ranks = [[token for w in items(windows, range(rank, windows.per_epoch, 4)) for token in w] for rank in range(4)]
    assert sum(map(len, ranks)) == len(set().union(*ranks)) == 570
    resumed = corpus.Windows(folder, "train", 10, 400, 3)
    assert items(resumed, [399, 200, 0]) == items(windows, [399, 200, 0])
    assert items(corpus.Windows(folder, "train", 10, 400, 4), range(20)) != items(windows, range(20))
    item = windows[0]["input_ids"]
    assert item.dtype == torch.int64 and item.shape == (10,)
    with pytest.raises(IndexError):
        windows[400]


def test_held_out_windows(tmp_path):
    folder = numbered(tmp_path / "c", [50], held_out=(25, 12))
    assert corpus.held_out(folder, 10, 9)[:, 0].tolist() == [0, 10, 1000]
    assert torch.equal(corpus.held_out(folder, 10, 2), torch.arange(20).view(2, 10))
    with pytest.raises(UserError, match="held-out has 37 tokens, the longest shard 25; not one window of 30"):
        corpus.held_out(folder, 30, 4)


def test_damaged_missing_and_short_corpora(tmp_path):
    with pytest.raises(UserError, match="no corpus here"):
        corpus.Windows(tmp_path / "none", "train", 10, 1, 0)
    folder = numbered(tmp_path / "c", [50, 20])
    with pytest.raises(UserError, match="train has 70 tokens, the longest shard 50; not one window of 64"):
        corpus.Windows(folder, "train", 64, 1, 0)
    path = corpus.shard(folder, "train", 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="train-00001.bin: 76 bytes, corpus.json says 80: cut short"):
        corpus.Windows(folder, "train", 10, 1, 0)
    path.unlink()
    with pytest.raises(UserError, match="train-00001.bin: 0 bytes"):
        corpus.load_tokens(folder, "train", 55)
    assert len(corpus.load_tokens(folder, "train", 5)) == 5  # which are in the first shard


def test_a_damaged_shard_of_the_right_size(tmp_path):
    folder = numbered(tmp_path / "c", [50, 20])
    path = corpus.shard(folder, "train", 1)
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        corpus.Windows(folder, "train", 10, 1, 0)
    message = str(error.value)
    assert message.startswith(f"{path}: sha256 is {hashlib.sha256(content).hexdigest()[:12]}…, corpus.json says ")
    assert message.endswith(f"damaged; delete {folder} and run again") and "\n" not in message


def test_fingerprint_knows_the_ids_but_not_the_order():
    def of(vocabulary):
        return corpus.fingerprint(SimpleNamespace(get_vocab=lambda: vocabulary))

    assert of({"a": 0, "b": 1}) == of({"b": 1, "a": 0}) != of({"a": 1, "b": 0})
