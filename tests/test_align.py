"""Vocabulary alignment against tokenizers built by hand, whose bytes are known without reading them back."""

import csv
import random
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from osprey.align import PROVENANCE, align, token_bytes
from osprey.params import UserError


def alphabet() -> dict[int, str]:
    """Byte → its character in byte-level BPE, asked from the library with texts whose UTF-8 is known."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for code in [*range(0x800), *range(0x1000, 0x10000, 0x1000), 0x10000, 0x40000, 0x80000, 0xC0000, 0x100000]:
        if not 0xD800 <= code < 0xE000:
            found |= zip(chr(code).encode(), split.pre_tokenize_str(chr(code))[0][0])
    unused = set(pre_tokenizers.ByteLevel.alphabet()) - set(found.values())  # C0, C1, F5-FF: never in UTF-8, in order
    return found | dict(zip(sorted(set(range(256)) - set(found)), sorted(unused)))


ALPHABET = alphabet()


def finish(backend, special, added, settings):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def build(kind, words, special=(), added=(), prefix="none", lacks=(), fallback=True, **settings):
    """A byte-level ("bytes") or SentencePiece-like ("pieces") BPE tokenizer, each word merged from left to right.

    Returns the tokenizer, its tokens' bytes by id (None for special ones), its merges by rank, its start symbols.
    """
    if kind == "bytes":
        start = [(bytes([byte]), ALPHABET[byte]) for byte in range(256) if byte not in lacks]
        symbols = [[(bytes([byte]), ALPHABET[byte]) for byte in word] for word in words]
    else:
        start = [(bytes([byte]), f"<0x{byte:02X}>") for byte in range(256) if fallback and byte not in lacks]
        symbols = [[(char.encode(), char.replace(" ", "▁")) for char in word.decode()] for word in words]
        start += sorted({symbol for word in symbols for symbol in word})
    tokens, merges = dict.fromkeys(start), {}
    for word in symbols:
        left = word[0]
        for right in word[1:]:
            whole = left[0] + right[0], left[1] + right[1]
            tokens[whole] = None
            merges.setdefault((left[1], right[1]), len(merges))
            left = whole
    vocabulary = {written: i for i, (_, written) in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=list(merges), byte_fallback=kind == "pieces" and fallback)
    backend = Tokenizer(model)
    if kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix == "bytes", use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        replace = normalizers.Replace(" ", "▁")
        if prefix == "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
        else:
            steps = [normalizers.Prepend("▁"), replace] if prefix == "prepend" else [replace]
            backend.normalizer = normalizers.Sequence(steps)
    truth = [spelled for spelled, _ in tokens] + [None] * len(special) + [token.encode() for token in added]
    tokenizer = finish(backend, special, added, settings)
    return SimpleNamespace(kind=kind, tokenizer=tokenizer, truth=truth, merges=merges, ids=vocabulary, start=start)


def slow_bpe(own, text: str) -> list[int]:
    """BPE as it is defined: merge the lowest-ranked neighbours until none is left."""
    if own.kind == "bytes":
        symbols = [ALPHABET[byte] for byte in text.encode()]
    else:
        characters = text.replace(" ", "▁")
        symbols = [s for c in characters for s in ([c] if c in own.ids else [f"<0x{b:02X}>" for b in c.encode()])]
    while True:
        ranks = [own.merges.get(pair, len(own.merges)) for pair in zip(symbols, symbols[1:])]
        if not ranks or min(ranks) == len(own.merges):
            return [own.ids[symbol] for symbol in symbols]
        at = ranks.index(min(ranks))
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def slow_eq4(source, target, weight_SD):
    rows = []
    for v, spelled in enumerate(target.truth):
        same = [i for i, other in enumerate(source.truth) if other == spelled]
        written = target.tokenizer.convert_ids_to_tokens(v)
        spelt_alike = [i for i in same if source.tokenizer.convert_ids_to_tokens(i) == written]
        if same:
            proper = [i for i in same if not source.tokenizer.convert_ids_to_tokens(i).startswith("<0x")]
            ids = (spelt_alike or proper or same)[:1]
        else:
            try:
                ids = slow_bpe(source, spelled.decode())
            except UnicodeDecodeError:
                singles = {other: i for i, other in reversed(list(enumerate(source.truth)))}
                if source.kind == "pieces":  # a piece of its own is preferred to byte fallback
                    singles |= {other: i for i, other in enumerate(source.truth) if i >= 256}
                ids = [singles[bytes([byte])] for byte in spelled]
        total = torch.zeros(weight_SD.shape[1], dtype=torch.float64)
        for i in ids:
            total += weight_SD[i].double()
        rows.append(total / len(ids))
    return torch.stack(rows)


def random_words(seed, count, fragments):
    rng = random.Random(seed)
    letters = ["a", "b", "c", " ", "é", "中", "\n"]
    words = ["".join(rng.choices(letters, k=rng.randint(2, 5))).encode() for _ in range(count)]
    if fragments:
        words += [word[:-1] for word in words if word[-1] >= 0x80] + ["中".encode()[1:], "aé".encode()[:2]]
    return words


@pytest.mark.parametrize("target_kind", ["bytes", "pieces"])
@pytest.mark.parametrize("source_kind", ["bytes", "pieces"])
def test_matches_a_slow_eq4(source_kind, target_kind):
    source = build(source_kind, random_words(1, 40, source_kind == "bytes"))
    target = build(target_kind, random_words(2, 60, target_kind == "bytes") + random_words(1, 5, False))
    alignment = align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth))
    weight_SD = torch.randn(len(source.truth), 7, generator=torch.Generator().manual_seed(0))
    expected = slow_eq4(source, target, weight_SD)
    assert torch.allclose(alignment.apply(weight_SD).double(), expected, atol=1e-6)
    counts = alignment.counts()
    assert counts["shared"] > 256 and counts["mean"] > 40 and (target_kind == "pieces" or counts["byte"] > 20)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_token_bytes(kind):
    words = [b" ab", "é中".encode(), b"\n", b"<0x0A>" if kind == "bytes" else b"<0x0A"]  # text, in a byte-level one
    own = build(kind, words, special=["<|im_end|>"], added=["<think>", "Ġé"], eos_token="<|im_end|>")
    assert token_bytes(own.tokenizer) == own.truth
    assert None in own.truth and b" ab" in own.truth and "Ġé".encode() in own.truth


def test_ids_without_a_token():
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    holes = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert token_bytes(holes) == [b"a", None, None, b"b"]
    alignment = align(holes, 4, holes, 4)
    assert alignment.provenance == ["shared", "padding", "padding", "shared"]
    assert alignment.known == [0, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_identical_tokenizers_copy_every_bit(kind, dtype):
    own = build(kind, random_words(3, 20, kind == "bytes"), special=["<s>", "</s>"], added=["<think>", "  "],
                bos_token="<s>", eos_token="</s>", pad_token="</s>")  # fmt: skip
    rows = len(own.truth)
    alignment = align(own.tokenizer, rows, own.tokenizer, rows)
    assert alignment.counts() == {name: rows if name == "shared" else 0 for name in PROVENANCE}
    weight = torch.randn(rows, 5).to(dtype)
    weight[:, 0] = -0.0
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(alignment.apply(weight).view(integers), weight.view(integers))


def test_half_precision_means_are_taken_in_fp32():
    source = build("bytes", [])
    target = build("bytes", [b"x" * n for n in range(2, 300)])
    weight = torch.full((256, 1), 1.0, dtype=torch.bfloat16)
    weight[ord("x")] = 1.0078125  # summed in bf16, 299 of these would stall at 256
    assert (align(source.tokenizer, 256, target.tokenizer, len(target.truth)).apply(weight)[256:] == 1.0078125).all()


@pytest.mark.parametrize("kind, prefix", [("pieces", "prepend"), ("pieces", "metaspace"), ("bytes", "bytes")])
def test_no_prefix_space_truncation_or_padding(kind, prefix):
    source = build(kind, [b"ab", b" a", b"cd", b" c"], prefix=prefix)
    assert source.tokenizer.encode("abcd") == slow_bpe(source, " abcd")  # the source by itself adds a space
    source.tokenizer.backend_tokenizer.enable_truncation(1)
    source.tokenizer.backend_tokenizer.enable_padding(length=8)
    target = build("bytes", [b"abcd", b" abcd"])
    alignment = align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth))
    for text in (b"abcd", b" abcd"):
        v = target.truth.index(text)
        assert alignment.provenance[v] == "mean" and alignment.sources[v] == slow_bpe(source, text.decode())


def test_single_where_the_source_normalises():
    source = build("bytes", ["é".encode()])
    source.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    target = build("bytes", ["e\u0301".encode(), "ae\u0301".encode()])
    alignment = align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth))
    v = target.truth.index("e\u0301".encode())
    assert alignment.provenance[v] == "single" and alignment.sources[v] == [source.truth.index("é".encode())]
    assert alignment.sources[target.truth.index("ae\u0301".encode())] == [ord("a"), *alignment.sources[v]]


def test_special_strings_in_text_stay_text():
    source = build("bytes", [], special=["<|im_end|>"], added=["<p>"], eos_token="<|im_end|>")
    source.tokenizer.pad_token = "<p>"  # special to the tokenizer, though not to its backend
    assert token_bytes(source.tokenizer)[-1] is None
    target = build("bytes", [b"<|im_end|>", b"a<|im_end|>", b"a<p>"])
    alignment = align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth))
    for text in (b"<|im_end|>", b"a<|im_end|>", b"a<p>"):
        v = target.truth.index(text)
        assert alignment.provenance[v] == "mean" and alignment.sources[v] == list(text)


def sources_of(source, target, **rows):
    """Target token → (provenance, source tokens) for the target's added tokens."""
    source_rows, target_rows = rows.get("source", len(source.truth)), rows.get("target", len(target.truth))
    alignment = align(source.tokenizer, source_rows, target.tokenizer, target_rows)
    read = {}
    for token, v in target.tokenizer.get_added_vocab().items():
        read[token] = alignment.provenance[v], source.tokenizer.convert_ids_to_tokens(alignment.sources[v])
    return read, alignment


CHATML = {
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
}  # fmt: skip


def test_special_tokens_by_role():
    llama = build(
        "bytes", [], eos_token="<|eot_id|>", bos_token="<|begin_of_text|>",
        special=["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    )  # fmt: skip
    gemma = build(
        "pieces", [b"a"], special=["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        added=["</s>"], pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
    )  # fmt: skip
    chatml = build("bytes", [b"<unk>"], **CHATML)
    to_llama, alignment = sources_of(chatml, llama)
    assert to_llama == {
        "<|begin_of_text|>": ("special", []),
        "<|end_of_text|>": ("special", ["<|endoftext|>"]),
        "<|start_header_id|>": ("special", ["<|im_start|>"]),
        "<|end_header_id|>": ("special", []),
        "<|eot_id|>": ("special", ["<|im_end|>"]),
    }
    weight = torch.randn(len(chatml.truth), 3)
    bos = llama.tokenizer.bos_token_id
    assert torch.allclose(alignment.apply(weight)[bos], weight.mean(0), atol=1e-6)
    assert sources_of(chatml, gemma)[0] == {
        "<pad>": ("special", []),  # ChatML's pad is its end of text
        "<eos>": ("special", ["<|endoftext|>"]),
        "<bos>": ("special", []),
        "<unk>": ("shared", ["<unk>"]),  # no unknown in the source, but the same bytes
        "<start_of_turn>": ("special", ["<|im_start|>"]),
        "<end_of_turn>": ("special", ["<|im_end|>"]),
        "</s>": ("mean", list("</s>")),  # not special: HTML
    }
    back, _ = sources_of(gemma, llama)
    assert back["<|begin_of_text|>"] == ("special", ["<bos>"]) and back["<|eot_id|>"] == ("special", ["<end_of_turn>"])
    phi = build("bytes", [], special=["<|user|>", "<|assistant|>", "<|end|>", "<pad>"], pad_token="<pad>")
    assert sources_of(phi, chatml)[0]["<|im_start|>"] == ("special", ["<|assistant|>"])
    assert sources_of(chatml, phi)[0]["<|user|>"] == ("special", ["<|im_start|>"])
    assert sources_of(gemma, phi)[0]["<pad>"] == ("shared", ["<pad>"])
    mistral = build("pieces", [b"a"], special=["<s>", "</s>", "[INST]", "[/INST]"], bos_token="<s>", eos_token="</s>")
    minimax = build("bytes", [], special=["]~!b[", "]~b]", "[e~["], bos_token="]~!b[", eos_token="[e~[")
    assert sources_of(mistral, minimax)[0] == {
        "]~!b[": ("special", ["<s>"]), "]~b]": ("special", ["[/INST]"]), "[e~[": ("special", ["</s>"]),
    }  # fmt: skip
    plain = build("bytes", [], special=["<e>"], added=["</s>"], eos_token="<e>")
    assert sources_of(plain, minimax)[0]["[e~["] == ("special", ["<e>"])
    assert sources_of(gemma, mistral)[0]["</s>"] == ("special", ["<end_of_turn>"])  # its role, not Gemma's HTML tag


def test_pad_equal_to_eos():
    both = build("bytes", [], special=["<e>"], eos_token="<e>", pad_token="<e>")
    apart = build("bytes", [], special=["<p>", "<end>"], eos_token="<end>", pad_token="<p>")
    assert sources_of(apart, both)[0] == {"<e>": ("special", ["<end>"])}
    assert sources_of(both, apart)[0] == {"<end>": ("special", ["<e>"]), "<p>": ("special", [])}


def test_padded_and_missing_rows():
    source = build("bytes", [b"ab"], special=["<e>"], eos_token="<e>")  # ab: 256, <e>: 257
    target = build("bytes", [b"ab", b"abc"], special=["<x>", "<y>"], eos_token="<x>")
    weight = torch.randn(300, 4)
    weight[258:] = torch.nan  # padding rows of the source are never used
    alignment = align(source.tokenizer, 300, target.tokenizer, 270)
    assert alignment.provenance[256:] == ["shared", "mean", "special", "special"] + ["padding"] * 10
    rows = alignment.apply(weight)
    assert rows.shape == (270, 4) and not rows.isnan().any() and not rows[260:].any()
    assert torch.equal(rows[258], weight[257]) and torch.allclose(rows[259], weight[:258].mean(0), atol=1e-6)
    fewer = align(source.tokenizer, 256, target.tokenizer, 258)  # neither ab nor <e> in the source, no specials here
    assert fewer.provenance[256:] == ["byte", "byte"] and fewer.sources[256:] == [list(b"ab"), list(b"abc")]
    assert align(source.tokenizer, 256, target.tokenizer, 259).sources[258] == []  # its eos has no row
    assert fewer.apply(weight[:256]).shape == (258, 4)


def test_byte_fragments():
    fragment = "中".encode()[:2]
    target = build("bytes", [b"a" + fragment, fragment])
    pieces = build("pieces", [b"a"])
    alignment = align(pieces.tokenizer, len(pieces.truth), target.tokenizer, len(target.truth))
    v = target.truth.index(fragment)
    assert alignment.provenance[v] == "byte" and alignment.sources[v] == list(fragment)
    assert alignment.sources[target.truth.index(b"a" + fragment)] == [256, *fragment]  # the piece a, not <0x61>
    assert alignment.provenance[0xE4] == "shared" and alignment.sources[ord("a")] == [256]
    back = align(target.tokenizer, len(target.truth), pieces.tokenizer, len(pieces.truth))
    assert back.provenance[ord("a")] == "byte" and back.provenance[ord("b")] == "shared"  # pieces has no piece b
    assert back.provenance[256] == "shared" and back.counts()["shared"] == 256


def test_bytes_no_text_holds_may_be_missing():
    source = build("bytes", [], lacks=[0x04, 0xFF])
    target = build("bytes", [b"a\x04b"])
    alignment = align(source.tokenizer, 254, target.tokenizer, len(target.truth))
    assert alignment.provenance[0xFF] == "byte" and alignment.sources[0xFF] == []
    v = target.truth.index(b"a\x04b")
    assert alignment.provenance[v] == "byte" and [source.truth[i] for i in alignment.sources[v]] == [b"a", b"b"]
    weight = torch.randn(254, 2)
    assert torch.allclose(alignment.apply(weight)[0xFF], weight.mean(0), atol=1e-6)


def test_uncovered_text_is_an_error():
    target = build("bytes", ["中".encode()])
    with pytest.raises(UserError, match=r"byte 0xE4 of target token 228 \(b'\\xe4'\)"):
        source = build("bytes", [], lacks=[0xE4])
        align(source.tokenizer, 255, target.tokenizer, len(target.truth))
    with pytest.raises(UserError, match="no token for byte 0x80 of target token 128 "):
        source = build("pieces", [b"abc"], fallback=False)
        align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth))


def test_unknown_kinds_are_errors():
    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"WordPiece tokens \(decoder: WordPiece\)"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(UserError, match="tokenizer old: not a fast tokenizer"):
        token_bytes(SimpleNamespace(name_or_path="old"))


def test_csv(tmp_path):
    source = build("pieces", [b"a", b'",'], special=["<e>"], eos_token="<e>")
    words = ["é,".encode(), b"\xc3a", rb"\xff"]
    target = build("bytes", words, special=["<x>", "<y>"], eos_token="<x>")
    alignment = align(source.tokenizer, len(source.truth), target.tokenizer, len(target.truth) + 1)
    path = tmp_path / "alignment.csv"
    alignment.to_csv(path, target.tokenizer, source.tokenizer)
    written = path.read_bytes()
    alignment.to_csv(path, target.tokenizer, source.tokenizer)
    assert path.read_bytes() == written and list(tmp_path.iterdir()) == [path]
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["target_id"]) for row in rows] == list(range(len(target.truth) + 1))
    assert [row["provenance"] for row in rows] == alignment.provenance
    assert len({row["token"] for row in rows}) == len(rows)  # byte FF and the text \xff read differently
    by_token = {row["token"]: row for row in rows}
    comma = source.ids[","]
    assert by_token["'é,'"]["source_ids"] == f"195 169 {comma}"
    assert by_token["'é,'"]["source_tokens"] == r"b'\xc3' b'\xa9' ','"
    assert by_token["<x>"]["source_ids"] == str(source.tokenizer.eos_token_id)
    assert by_token["<y>"]["source_ids"] == "all" and by_token[""]["source_ids"] == ""
    assert by_token[r"b'\xff'"]["provenance"] == "shared" and by_token[r"'\\xff'"]["provenance"] == "mean"
