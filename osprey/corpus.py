"""The corpus of Stage 2: texts → shards of uint32 token ids, documents separated by one EOS; random windows of them.

The layout is Appendix C's ("Data pipeline"): tokenised once with the source's own tokenizer, memory-mapped on use.

    corpus.json             tokens and documents of each split, sha256 of each shard, characters of each text, eos,
                            tokenizer fingerprint
    train-00000.bin …       little-endian uint32, at most shard_tokens each; a document may straddle two shards,
    held-out-00000.bin …    a window never does
"""

import hashlib
import html
import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from osprey import models, params, records
from osprey.params import UserError

TOKEN = np.dtype("<u4")
SHUFFLE = 50_000  # documents kept in memory to shuffle; every packaged text is smaller, so shuffled completely
BATCH = 512  # documents a tokenizer call
SPLITS = ("train", "held-out")


def build(corpus: params.Corpus, tokenizer, eos_id: int, seed: int, out: Path) -> dict:
    """Write the corpus folder `out` and return what corpus.json says.

    Nothing is held whole, so a hub dataset of any size streams through. Raises UserError when a text is too short
    for its share or when the split leaves one side empty; then nothing is written.
    """
    with models.finished(out) as part:
        read = {name: {"documents": 0, "characters": 0} for name in corpus.texts}
        shards = {split: Shards(part, split, corpus.shard_tokens) for split in SPLITS}
        stream = mix(corpus, seed, read)
        while batch := list(islice(stream, BATCH)):
            # A document that spells out a special token is still text: no EOS may appear inside it.
            encoded = tokenizer(batch, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            for text, ids in zip(batch, encoded, strict=True):
                held_out = records.position(seed, text) < corpus.held_out
                shards[SPLITS[held_out]].add(np.array([*ids, eos_id], TOKEN))
        info = {split: shard.close() for split, shard in shards.items()}
        for split in SPLITS:
            if not info[split]["documents"]:
                total = sum(text["documents"] for text in read.values())
                raise UserError(
                    f"corpus.held_out: {corpus.held_out:g} of {total} documents leaves {split} empty; "
                    "change it or raise corpus.characters"
                )
        info |= {"texts": read, "eos": eos_id, "tokenizer": fingerprint(tokenizer)}
        (part / "corpus.json").write_text(json.dumps(info, indent=1) + "\n")
    return info


def mix(corpus: params.Corpus, seed: int, read: dict) -> Iterator[str]:
    """The documents of all texts, interleaved so that each text is as far through its share as every other.

    Counts documents and characters into `read`. A document met before, in whichever text, is dropped.
    """
    seen: set[int] = set()
    streams = {name: documents(name, text, seed, seen) for name, text in corpus.texts.items()}
    wanted = {name: text.share * corpus.characters for name, text in corpus.texts.items()}
    while wanted:
        name = min(wanted, key=lambda name: read[name]["characters"] / wanted[name])
        document = next(streams[name], None)
        if document is None:
            raise UserError(
                f"corpus.texts.{name}: has {read[name]['characters']:,} characters, "
                f"its share asks for {round(wanted[name]):,}: lower share or corpus.characters"
            )
        read[name]["documents"] += 1
        read[name]["characters"] += len(document)
        if read[name]["characters"] >= wanted[name]:
            del wanted[name]
        yield document


def documents(name: str, text: params.Text, seed: int, seen: set[int]) -> Iterator[str]:
    """The clean, distinct, long enough documents of one text, shuffled (generated ones come in random order)."""
    raw = records.texts(text, seed + 1)  # a generator's problems, but not those that the domains draw with this seed
    for document in raw if text.generate else shuffle(raw, f"{seed} {name}"):
        document = clean(document, text.html)
        # 64 bits a document keep the memory small; in a billion documents a chance collision is still unlikely.
        key = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big")
        if document and len(document) >= text.min_characters and key not in seen:
            seen.add(key)
            yield document


def shuffle(stream: Iterator[str], seed: str) -> Iterator[str]:
    """A complete shuffle up to SHUFFLE items; beyond that, each item is drawn from a buffer of as many."""
    rng = random.Random(seed)
    buffer = list(islice(stream, SHUFFLE))
    for item in stream:
        at = rng.randrange(len(buffer))
        yield buffer[at]
        buffer[at] = item
    rng.shuffle(buffer)
    yield from buffer


def clean(text: str, markup: bool) -> str:
    """One spelling of white space: no trailing, no runs inside a line (indentation stays), one empty line at most.

    With `markup`, HTML tags are dropped (a break or a paragraph becomes a line end) and entities are resolved.
    """
    if markup:
        text = re.sub(r"(?i)</?(br|p|div|li|hr)\b[^<>]*>", "\n", text)
        text = html.unescape(re.sub(r"</?[a-zA-Z][^<>]*>", "", text))
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    text = re.sub(r"(?<=\S)[ \t]+", " ", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def fingerprint(tokenizer) -> str:
    """sha256 of the vocabulary: tokens and ids, added ones included."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[::-1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


class Shards:
    """Files of one split, each filled to `limit` tokens before the next is opened."""

    def __init__(self, folder: Path, split: str, limit: int):
        self.folder, self.split, self.limit = folder, split, limit
        self.documents, self.sizes, self.hashes, self.file = 0, [], [], None

    def add(self, ids: np.ndarray):
        self.documents += 1
        while len(ids):
            if not self.sizes or self.sizes[-1] == self.limit:
                self.close()
                self.file = shard(self.folder, self.split, len(self.sizes)).open("wb")
                self.sizes.append(0)
                self.hashes.append(hashlib.sha256())
            part, ids = np.split(ids, [self.limit - self.sizes[-1]])
            self.file.write(part.tobytes())
            self.hashes[-1].update(part.tobytes())
            self.sizes[-1] += len(part)

    def close(self) -> dict:
        if self.file:
            self.file.close()
        hashes = [shard.hexdigest() for shard in self.hashes]
        return {"documents": self.documents, "tokens": sum(self.sizes), "shards": self.sizes, "sha256": hashes}


def shard(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05d}.bin"


def open_shards(folder: Path, split: str) -> Iterator[np.ndarray]:
    """The shards of a split as read-only memory maps [tokens] of uint32, each checked when its turn comes.

    Raises UserError when there is no corpus or a shard is not what was written.
    """
    try:
        info = json.loads((folder / "corpus.json").read_text())[split]
    except FileNotFoundError:
        raise UserError(f"{folder}: no corpus here (corpus.json is missing); build it with: dvc repro corpus") from None
    for number, (tokens, sha256) in enumerate(zip(info["shards"], info["sha256"], strict=True)):
        path = shard(folder, split, number)
        size = path.stat().st_size if path.exists() else 0
        wrong = size != tokens * TOKEN.itemsize and (
            f"{size} bytes, corpus.json says {tokens * TOKEN.itemsize}: cut short or replaced"
        )
        if not wrong:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            wrong = found != sha256 and f"sha256 is {found[:12]}…, corpus.json says {sha256[:12]}…: damaged"
        if wrong:
            raise UserError(f"{path}: {wrong}; delete {folder} and run again")
        yield np.memmap(path, TOKEN, "r")


def too_short(folder: Path, split: str, shards: list[np.ndarray], window: int) -> UserError:
    return UserError(
        f"{folder}: {split} has {sum(map(len, shards))} tokens, the longest shard {max(map(len, shards))}; "
        f"not one window of {window}: raise corpus.characters (or shard_tokens), or lower the window"
    )


class Windows(torch.utils.data.Dataset):
    """`count` random windows of one split; item n is {"input_ids": int64 [window]} and depends on n alone.

    Epoch e (n // per_epoch) cuts every shard into adjacent windows from a random offset on and visits the windows of
    all shards in a random order, so different n of one epoch are disjoint: so are ranks and workers, which take
    different n, and a resumed run continues with item n without replaying the ones before. The offset may leave a
    window's length at either end of a shard, for the cuts to differ from epoch to epoch and no token to be left out
    of all of them. Raises UserError for a missing, damaged or too short corpus.
    """

    def __init__(self, folder: Path, split: str, window: int, count: int, seed: int):
        self.shards = list(open_shards(folder, split))
        self.window, self.count, self.seed = window, count, seed
        per_shard = [max(len(ids) // window - 1, int(len(ids) >= window)) for ids in self.shards]
        self.slack = [len(ids) - windows * window + 1 for ids, windows in zip(self.shards, per_shard, strict=True)]
        self.ends = np.cumsum(per_shard)  # of each shard's numbers among an epoch's windows
        self.per_epoch = int(self.ends[-1])
        if not self.per_epoch:
            raise too_short(folder, split, self.shards, window)
        self.epoch, self.offsets, self.order = None, None, None  # of the epoch asked for last

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        if not 0 <= n < self.count:
            raise IndexError(n)
        epoch, place = divmod(int(n), self.per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch, self.offsets, self.order = epoch, rng.integers(self.slack), rng.permutation(self.per_epoch)
        number = int(np.searchsorted(self.ends, self.order[place], side="right"))
        before = self.ends[number - 1] if number else 0
        start = self.offsets[number] + (self.order[place] - before) * self.window
        ids = self.shards[number][start : start + self.window]
        return {"input_ids": torch.from_numpy(ids.astype(np.int64))}


def held_out(folder: Path, window: int, count: int) -> torch.Tensor:
    """The first windows of the held-out split, one after the other: int64 [at most count, window].

    Raises UserError when there is not one.
    """
    shards = list(open_shards(folder, "held-out"))
    windows = [
        ids[start : start + window].astype(np.int64)
        for ids in shards
        for start in range(0, len(ids) - window + 1, window)[:count]
    ][:count]
    if not windows:
        raise too_short(folder, "held-out", shards, window)
    return torch.from_numpy(np.stack(windows))


def load_tokens(folder: Path, split: str, limit: int) -> np.ndarray:
    """The first `limit` tokens of a split, or all when it has fewer: int64 [tokens]. Raises UserError."""
    taken = []
    for ids in open_shards(folder, split):
        taken.append(ids[:limit].astype(np.int64))
        limit -= len(taken[-1])
        if not limit:
            break
    return np.concatenate(taken)


def summary(folder: Path) -> pd.DataFrame:
    """Documents and characters of each text, tokens of each split: what corpus.json says, for the eye."""
    info = json.loads((folder / "corpus.json").read_text())
    texts = pd.DataFrame(info["texts"]).T
    splits = pd.DataFrame({split: {key: info[split][key] for key in ("documents", "tokens")} for split in SPLITS}).T
    return pd.concat([texts, splits]).astype("Int64")
