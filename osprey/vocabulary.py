"""The draft vocabulary: which target tokens a drafter can propose; one list per target, the same for every recipe."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from osprey import corpus, models, rollouts
from osprey.params import UserError


def generic_counts(corpus_folder: Path, source_tokenizer, target_tokenizer, limit: int) -> np.ndarray:
    """How often each target token occurs in the first `limit` tokens of the generic corpus, [tokenizer size]."""
    tokens = corpus.load_tokens(corpus_folder, "train", limit)
    eos = json.loads((corpus_folder / "corpus.json").read_text())["eos"]
    documents = np.split(tokens, np.flatnonzero(tokens == eos) + 1)
    texts = source_tokenizer.batch_decode([document[document != eos] for document in documents])
    encoded = target_tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.bincount(
        np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded]), minlength=len(target_tokenizer)
    )


def choose(counts: list[np.ndarray], special: list[int], rows: int, size: int | str) -> np.ndarray:
    """The sorted target ids of the draft vocabulary.

    `counts` are token counts over sources of text that weigh alike, each [tokenizer size]; `rows` is the target
    model's vocabulary. Only ids that both tokenizer and model have can be drafted, so a padded row never wins an
    argmax. `size` "full" takes them all. Special tokens are kept. When fewer tokens occur than there is room for,
    the lowest unseen ids fill it (merge order is frequency order, roughly).
    """
    possible = min(rows, len(counts[0]))
    if size == "full":
        return np.arange(possible)
    if size > possible:
        raise UserError(f"vocabulary.draft: {size} tokens asked for, the target has {possible}; use full")
    frequency = sum(count[:possible] / max(count[:possible].sum(), 1) for count in counts)
    kept = [token for token in special if token < possible]
    if len(kept) > size:
        raise UserError(f"vocabulary.draft: {size} tokens cannot hold the {len(kept)} special ones")
    frequency[kept] = np.inf
    return np.sort(np.argsort(-frequency, kind="stable")[:size])


def draft_vocabulary(params, target: str, root: Path) -> tuple[np.ndarray, pd.DataFrame]:
    """The target's draft vocabulary, and its coverage: domain, split, response tokens, share that can be drafted.

    By frequency over generic text and *all* domains' adaptation rollouts, each half (design, "Draft vocabulary").
    """
    folder = root / "data/models" / target
    tokenizer = models.load_tokenizer(folder)
    rows = models.load_config(folder).get_text_config().vocab_size
    responses = {
        (domain, split): rollouts.response_tokens(root / "data/rollouts" / target / domain / f"{split}.safetensors")
        for domain in params.domains
        for split in params.rollouts.prompts
        if split != "first"
    }
    adaptation = np.concatenate([responses[domain, "adaptation"] for domain in params.domains])
    source_tokenizer = models.load_tokenizer(root / "data/models" / params.source.model)
    counts = [
        generic_counts(root / "data/corpus", source_tokenizer, tokenizer, params.vocabulary.generic_tokens),
        np.bincount(adaptation, minlength=len(tokenizer)),
    ]
    special = sorted({*tokenizer.all_special_ids, *models.eos_ids(folder, tokenizer)})
    ids = choose(counts, special, rows, params.vocabulary.draft)
    coverage = [
        {"domain": domain, "split": split, "tokens": len(tokens), "covered": float(np.isin(tokens, ids).mean())}
        for (domain, split), tokens in responses.items()
    ]
    return ids, pd.DataFrame(coverage)
