"""Texts and prompts out of package members, local files, hub datasets and generators, one string at a time.

`field` says where the text is in a record. It is a dotted path: a part is a key of an object or the index of a
list (negative from the end), `*` walks every element or value, and a closing `**` takes every string below.

    passage               the value of "passage"
    input.-1.content      the content of the last message
    paragraphs.*.text     the text of every paragraph, each a text of its own
    **                    every string of the record, each a text of its own

A field with braces is one text made of several paths: "{question}\\n{options}".
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator

from osprey import packages
from osprey.params import ROOT, Records, UserError

BLOCK = 1_000  # problems a generator makes at a time
EXHAUSTED = 10_000  # problems in a row without a new one


def texts(records: Records, seed: int = 0) -> Iterator[str]:
    """The texts in their own order; a null is an empty text. `seed` belongs to generators.

    Raises UserError for a missing file, member, dataset or field, and for what is not text.
    """
    if records.generate:
        yield from (problem["question"] for problem in problems(records.generate, seed))
        return
    for where, record in entries(records):
        if isinstance(record, str) and records.field is None:
            yield record
        elif isinstance(record, str):
            raise UserError(f"{where}: a plain text has no field {records.field!r}; leave field out")
        elif records.field is None:
            raise UserError(f"{where}: needs field, where the text is in a record")
        else:
            yield from pick(record, records.field, where)


def problems(name: str, seed: int) -> Iterator[dict]:
    """Distinct problems of a reasoning-gym dataset, without end unless it runs out of new ones.

    Each is a dict with "question", "answer" and "metadata". reasoning-gym seeds problem i with seed + i, so blocks
    that start BLOCK seeds apart never repeat one another, but seeds 0 and 1 would: the seed is hashed first.
    """
    import reasoning_gym

    first = int(position(seed, name) * 2**31)
    seen, repeated, block = set(), 0, 0
    while repeated < EXHAUSTED:
        try:
            dataset = reasoning_gym.create_dataset(name, size=BLOCK, seed=first + block * BLOCK)
        except ValueError as error:
            raise UserError(f"generate: {error} by reasoning-gym") from None
        for problem in dataset:
            repeated += 1
            if problem["question"] not in seen:
                seen.add(problem["question"])
                repeated = 0
                yield problem
        block += 1


def position(seed: int, text: str) -> float:
    """A number in [0, 1) that only the text and the seed decide: for splits and orders that outlive new records."""
    digest = hashlib.sha256(f"{seed}\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def entries(records: Records) -> Iterator[tuple[str, dict | list | str]]:
    """(where it is, for messages; the record, or the whole text of a .txt file)."""
    if records.hub:
        yield from rows(records)
    elif records.path:
        path = ROOT / records.path
        if not path.is_file():
            raise UserError(f"{path}: no such file (path is relative to the repository)")
        yield from parse(records.path, path.read_bytes())
    else:
        for member in packages.members(records.package, records.members):
            yield from parse(f"{records.package}: {member}", packages.read(records.package, member))


def rows(records: Records) -> Iterator[tuple[str, dict]]:
    """The rows of a hub dataset, streamed: nothing larger than a batch is kept. A local folder works too."""
    import datasets

    folder = ROOT / records.hub
    source = str(folder) if folder.is_dir() else records.hub
    try:
        dataset = datasets.load_dataset(
            source, records.subset, split=records.split, revision=records.revision, streaming=True
        )
        for row in dataset:
            yield records.hub, row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{records.hub} (split {records.split}): {reason}") from None


def parse(where: str, data: bytes) -> Iterator[tuple[str, dict | list | str]]:
    """The records of one file, by its suffix; blank lines of .jsonl are skipped."""
    at = where
    try:
        content = (gzip.decompress(data) if where.endswith(".gz") else data).decode()
        if where.endswith(".txt"):
            yield at, content
        elif where.endswith(".json"):
            document = json.loads(content)
            for record in document if isinstance(document, list) else [document]:
                yield at, structured(record)
        elif where.endswith((".jsonl", ".jsonl.gz")):
            for number, line in enumerate(content.split("\n"), start=1):  # splitlines would also cut at U+2028
                if line.strip():
                    at = f"{where}:{number}"
                    yield at, structured(json.loads(line))
        else:
            raise UserError(f"{where}: unknown suffix; known are .jsonl, .jsonl.gz, .json and .txt")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{at}: not readable: {error}") from None


def structured(record) -> dict | list:
    if not isinstance(record, dict | list):
        raise ValueError("a record must be an object or a list")
    return record


def pick(record: dict | list, field: str, where: str) -> list[str]:
    """The texts that `field` names in one record. Raises UserError when there are none."""
    if "{" in field:

        def fill(match: re.Match) -> str:
            found = pick(record, match[1], where)
            if len(found) != 1:
                raise UserError(f"{where}: {match[1]!r} in field gives {len(found)} texts, braces hold one")
            return found[0]

        return [re.sub(r"\{([^{}]+)\}", fill, field)]
    try:
        values = walk(record, field.split("."))
    except (KeyError, IndexError, TypeError, ValueError):
        has = f"it has {', '.join(map(str, record))}" if isinstance(record, dict) else f"a list of {len(record)}"
        raise UserError(f"{where}: no field {field!r} ({has})") from None
    for value in values:
        if not isinstance(value, str | None):
            raise UserError(f"{where}: field {field!r} is not text but {type(value).__name__}")
    # JSON can hold half of a surrogate pair, which no UTF-8 and no tokenizer can.
    return [(value or "").encode(errors="ignore").decode() for value in values]


def walk(node, path: list[str]) -> list:
    """Every value at the end of the path. Raises Key-, Index-, Type- or ValueError when it leads nowhere."""
    if not path:
        return [node]
    part, rest = path[0], path[1:]
    if part == "**" and not rest:
        return strings(node)
    if part == "*":
        return [value for child in below(node) for value in walk(child, rest)]
    return walk(node[int(part)] if isinstance(node, list) else node[part], rest)


def below(node) -> list:
    if not isinstance(node, dict | list):
        raise TypeError("a plain value has nothing below it")
    return list(node.values()) if isinstance(node, dict) else node


def strings(node) -> list[str]:
    if isinstance(node, dict | list):
        return [text for child in below(node) for text in strings(child)]
    return [node] if isinstance(node, str) else []
