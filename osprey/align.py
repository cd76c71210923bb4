"""Stage 3, vocabulary alignment (eq. 4): the source's embedding and head, rearranged to the target's vocabulary.

A target token takes the source row of the same token, or else the mean of the source rows that spell its text.
Tokens are compared by their bytes, since tokenizers write the same bytes differently: byte-level ones in an
alphabet where a space is `Ġ`, SentencePiece ones with `▁` for a space and `<0x0A>` for a byte outside their pieces.
Special tokens have no bytes; they are matched by what they are for (design, section 5).
"""

import csv
import json
import os
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from osprey.params import UserError

PROVENANCE = ("shared", "single", "mean", "byte", "special", "padding")

# What chat templates call the same thing (ChatML, Llama 3, Gemma, Phi, Mistral, MiniMax). A target token takes the
# first name of its row that the source has; a name in two rows tries the upper one first.
OPENINGS = ("<|assistant|>", "[/INST]", "<|user|>", "[INST]", "<|system|>", "[SYSTEM_PROMPT]")  # turn and role in one
ROLES = {
    "assistant": ("<|assistant|>", "[/INST]"),
    "user": ("<|user|>", "[INST]"),
    "system": ("<|system|>", "[SYSTEM_PROMPT]"),
    "turn start": ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "]~b]", *OPENINGS),
    "header end": ("<|end_header_id|>", "<|im_sep|>"),
    "turn end": ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "[e~[", "</s>"),
    "text end": ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>"),
}
NAMED = {name for names in ROLES.values() for name in names}

# Bytes that no written text holds: control characters, bytes that are not UTF-8, and the lead bytes of planes 4-11,
# where Unicode has no characters. Tokenizers trained without a complete byte alphabet lack them (SmolLM2: 21).
UNWRITTEN = {*range(0x20), 0x7F, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)} - set(b"\t\n\r")

# The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others are numbered from U+0100.
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_OF = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF |= {chr(0x100 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}


class Vocabulary(NamedTuple):
    """The tokens of a tokenizer that have a row in its model; the lists are indexed by id."""

    tokens: list[str | None]  # as the tokenizer writes them; None: no such token
    bytes: list[bytes | None]  # None: special, or no such token
    fallback: set[int]  # ids of byte-fallback tokens such as <0x0A>
    added: dict[str, int]  # the tokens outside the trained vocabulary, special or not
    special: set[int]
    space: str  # what stands for a space in a text once the tokenizer has normalised it


def named(tokenizer) -> str:
    return f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"


def backend_json(tokenizer) -> dict:
    """The tokenizer.json of a fast tokenizer. Raises UserError for a tokenizer without one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{named(tokenizer)}: not a fast tokenizer; choose a model that ships tokenizer.json")
    return json.loads(backend.to_str())


def parts(node: dict | None) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder, nested sequences laid flat."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    steps = (step for key in ("normalizers", "pretokenizers", "decoders") for step in node.get(key, ()))
    return [part for step in steps for part in parts(step)]


def vocabulary(tokenizer, rows: int | None = None) -> Vocabulary:
    """Read a tokenizer, ids below `rows` only. Raises UserError for a kind whose tokens' bytes are not known."""
    spec = backend_json(tokenizer)
    decoders, pre_tokenizers = parts(spec["decoder"]), parts(spec["pre_tokenizer"])
    byte_level = any(part["type"] == "ByteLevel" for part in decoders + pre_tokenizers)
    spaces = [part["replacement"] for part in decoders + pre_tokenizers if part["type"] == "Metaspace"]
    replaced = [part for part in decoders if part["type"] == "Replace" and part["content"] == " "]
    spaces += [part["pattern"]["String"] for part in replaced if "String" in part["pattern"]]
    if not byte_level and not spaces:
        kinds = ", ".join(part["type"] for part in decoders) or "none"
        raise UserError(
            f"{named(tokenizer)}: cannot tell the bytes of {spec['model']['type']} tokens (decoder: {kinds}); "
            "choose a model with a byte-level or SentencePiece tokenizer"
        )
    bytes_fall_back = spec["model"].get("byte_fallback", False)

    every = {token: i for token, i in tokenizer.get_vocab().items() if rows is None or i < rows}
    size = max(every.values(), default=-1) + 1
    added = {token["content"]: token["id"] for token in spec["added_tokens"] if token["content"] in every}
    special = {token["id"] for token in spec["added_tokens"] if token["special"]} | set(tokenizer.all_special_ids)
    tokens, spelled, fallback = [None] * size, [None] * size, set()
    for token, i in every.items():
        tokens[i] = token
        if i in special:
            continue
        if byte_level:
            # An added token is literal text, and so is (as in the decoder) anything outside the alphabet.
            written = token not in added and all(char in BYTE_OF for char in token)
            spelled[i] = bytes(BYTE_OF[char] for char in token) if written else token.encode()
        elif bytes_fall_back and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            spelled[i] = bytes.fromhex(match[1])
            fallback.add(i)
        else:  # added tokens too: Gemma's runs of spaces are added as ▁▁ and decode to spaces
            spelled[i] = token.replace(spaces[0], " ").encode()
    return Vocabulary(tokens, spelled, fallback, added, special, " " if byte_level else spaces[0])


def token_bytes(tokenizer) -> list[bytes | None]:
    """The bytes of every id of a fast tokenizer; None for special tokens and ids without a token.

    How tokens are written is read off the tokenizer's own decoder, never guessed from a name. Raises UserError
    for a slow tokenizer and for kinds other than byte-level BPE and SentencePiece.
    """
    return vocabulary(tokenizer).bytes


def text_reader(tokenizer, special: set[int]) -> Tokenizer:
    """A copy of the backend that reads a piece from the middle of a text: no prefix space, no special tokens."""
    spec = backend_json(tokenizer)
    spec |= {"truncation": None, "padding": None, "post_processor": None}
    steps = [part for part in parts(spec["normalizer"]) if part["type"] != "Prepend"]
    spec["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    for part in parts(spec["pre_tokenizer"]):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    for token in spec["added_tokens"]:
        token["special"] = token["id"] in special
    reader = Tokenizer.from_str(json.dumps(spec))
    reader.encode_special_tokens = True  # despite its name: special tokens written out in a text stay text
    return reader


def read_texts(texts: list[str], tokenizer, source: Vocabulary) -> list[list[int] | None]:
    """The source ids of each text; None where they do not spell it (unknown or dropped characters, missing rows)."""
    reader = text_reader(tokenizer, source.special)
    read = []
    for text, encoding in zip(texts, reader.encode_batch_fast(texts, add_special_tokens=False)):
        normal = reader.normalizer.normalize_str(text) if reader.normalizer else text
        pieces = [source.bytes[i] if i < len(source.bytes) else None for i in encoding.ids]
        spells = pieces and None not in pieces and b"".join(pieces) == normal.replace(source.space, " ").encode()
        read.append(encoding.ids if spells else None)
    return read


def read_bytes(spelled: bytes, by_bytes: dict[bytes, int], i: int) -> list[int]:
    """The source's single-byte tokens of a target token; bytes in UNWRITTEN may lack one and are left out.

    Raises UserError for any other byte without a source token.
    """
    ids = [by_bytes.get(bytes([byte])) for byte in spelled]
    for byte, found in zip(spelled, ids):
        if found is None and byte not in UNWRITTEN:
            raise UserError(
                f"the source's tokenizer has no token for byte 0x{byte:02X} of target token {i} ({spelled!r}); "
                "choose a source whose tokenizer covers every byte"
            )
    return [found for found in ids if found is not None]


def tokenizer_roles(tokenizer, own: Vocabulary) -> dict[str, int]:
    """Role → id, by the tokenizer's settings. A pad or unk that doubles as another token (pad = eos) is that token:
    with one source row for both, the target's pad would tie with its end of turn.
    """
    found = {}
    for role in ("eos", "bos", "unk", "pad"):
        i = getattr(tokenizer, f"{role}_token_id")
        if i is None or i >= len(own.tokens):
            continue
        if role in ("eos", "bos") or (i not in found.values() and own.tokens[i] not in NAMED):
            found[role] = i
    return found


def special_row(v: int, target: Vocabulary, target_roles: dict, source: Vocabulary, source_roles: dict, by_bytes: dict):
    """Provenance and sources of the target's special token v: same content, else same role, else no counterpart."""
    name = target.tokens[v]
    if source.added.get(name) in source.special:  # a </s> that is not special is HTML
        return "shared", [source.added[name]]
    for other in (other for names in ROLES.values() if name in names for other in names):
        if source.added.get(other) in source.special:
            return "special", [source.added[other]]
    for role, i in target_roles.items():
        if i == v and role in source_roles:
            return "special", [source_roles[role]]
    if name.encode() in by_bytes:  # an ordinary token of the source, as Gemma's <unk> is to Qwen
        return "shared", [by_bytes[name.encode()]]
    return "special", []


@dataclass
class Alignment:
    """Where every target row comes from.

    `sources[v]` are the source ids whose mean is row v, as many times as they spell it. It is empty for padding
    (a row of zeros) and for tokens without any counterpart, which take the mean over `known`, the source ids that
    have both a token and a row.
    """

    provenance: list[str]  # [target_rows], each one of PROVENANCE
    sources: list[list[int]]  # [target_rows]
    known: list[int]

    @torch.no_grad()
    def apply(self, weight_SD: torch.Tensor) -> torch.Tensor:
        """Eq. 4 for embedding and head alike: [source_rows, D] → [target_rows, D], same dtype and device.

        Rows with one source are copied bit by bit, means are taken in fp32, padding is zero.
        """
        weight_TD = weight_SD.new_zeros(len(self.sources), weight_SD.shape[1])
        copied = [v for v, ids in enumerate(self.sources) if len(ids) == 1]
        averaged = [v for v, ids in enumerate(self.sources) if len(ids) > 1]
        without = [v for v, ids in enumerate(self.sources) if not ids and self.provenance[v] != "padding"]
        on_device = {"device": weight_SD.device, "dtype": torch.long}
        weight_TD[copied] = weight_SD[torch.tensor([self.sources[v][0] for v in copied], **on_device)]
        if averaged:
            ids = torch.tensor([i for v in averaged for i in self.sources[v]], **on_device)
            starts = torch.tensor([0, *accumulate(len(self.sources[v]) for v in averaged[:-1])], **on_device)
            used, ids = ids.unique(return_inverse=True)  # an fp32 copy of the rows in use, not of the whole matrix
            mean_VD = F.embedding_bag(ids, weight_SD[used].float(), starts, mode="mean")
            weight_TD[averaged] = mean_VD.to(weight_SD.dtype)
        if without:
            known = torch.tensor(self.known, **on_device)
            sum_D = sum(weight_SD[ids].sum(0, dtype=torch.float32) for ids in known.split(8192))
            weight_TD[without] = (sum_D / len(known)).to(weight_SD.dtype)
        return weight_TD

    def counts(self) -> dict[str, int]:
        """Rows by provenance, in the order of PROVENANCE, zeros included."""
        return {name: self.provenance.count(name) for name in PROVENANCE}

    def to_csv(self, path: Path, target_tokenizer, source_tokenizer):
        """Write `alignment.csv`, one line a target row; `all` stands for the mean over every known source row."""
        target, source = vocabulary(target_tokenizer), vocabulary(source_tokenizer)
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["target_id", "token", "provenance", "source_ids", "source_tokens"])
            for v, (provenance, ids) in enumerate(zip(self.provenance, self.sources)):
                shown = " ".join(show(source, i) for i in ids)
                listed = " ".join(map(str, ids)) if ids or provenance == "padding" else "all"
                lines.writerow([v, show(target, v), provenance, listed, shown])
        os.replace(partial, path)


def show(own: Vocabulary, i: int) -> str:
    """A token in print: 'text' in quotes, b'bytes' for fragments and byte fallback, special tokens bare."""
    if i >= len(own.tokens) or own.tokens[i] is None:
        return ""
    spelled = own.bytes[i]
    if spelled is None:
        return own.tokens[i]
    text = as_text(spelled)
    return repr(spelled) if text is None or i in own.fallback else repr(text)


def as_text(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def align(source_tokenizer, source_rows: int, target_tokenizer, target_rows: int) -> Alignment:
    """Find every target row's source rows (eq. 4).

    `source_rows` and `target_rows` are the rows of the models' embeddings. They may exceed the tokenizer (padding:
    never used in the source, zero in the target) or fall short of it (tokens past the last row do not exist).
    Raises UserError for unknown kinds of tokenizers and for bytes that the source cannot spell.
    """
    source, target = vocabulary(source_tokenizer, source_rows), vocabulary(target_tokenizer, target_rows)
    source_ids = {token: i for i, token in enumerate(source.tokens) if token is not None}
    source_roles, target_roles = tokenizer_roles(source_tokenizer, source), tokenizer_roles(target_tokenizer, target)
    by_bytes = {}
    for i in sorted(source_ids.values(), key=lambda i: (i in source.fallback, i)):  # fallback only if nothing else fits
        if source.bytes[i] is not None:
            by_bytes.setdefault(source.bytes[i], i)
    pieces = {spelled for i, spelled in enumerate(target.bytes) if i not in target.fallback}

    provenance = ["padding"] * target_rows
    sources = [[] for _ in range(target_rows)]
    texts = {}
    for v, token in enumerate(target.tokens):
        if token is None:
            continue
        spelled = target.bytes[v]
        if v in target.special:
            provenance[v], sources[v] = special_row(v, target, target_roles, source, source_roles, by_bytes)
            continue
        same = source_ids.get(token)  # the same bytes in the same spelling, so that equal tokenizers align one to one
        if same is None or source.bytes[same] != spelled:
            same = by_bytes.get(spelled)
        if same is not None:
            # Where the target has both a and <0x61>, the fallback is a spare that text never needs: not shared twice.
            spare = v in target.fallback and spelled in pieces and same not in source.fallback
            provenance[v], sources[v] = "byte" if spare else "shared", [same]
        elif (text := as_text(spelled)) is not None:
            texts[v] = text
        else:
            provenance[v], sources[v] = "byte", read_bytes(spelled, by_bytes, v)

    for v, ids in zip(texts, read_texts(list(texts.values()), source_tokenizer, source)):
        if ids is None:
            provenance[v], sources[v] = "byte", read_bytes(target.bytes[v], by_bytes, v)
        else:
            provenance[v], sources[v] = "single" if len(ids) == 1 else "mean", ids
    return Alignment(provenance, sources, sorted(source_ids.values()))
