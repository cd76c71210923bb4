"""The numbers in README.md are inserted from results, never typed.

In README.md a number stands between two comments, which do not show: `<!-- n: KEY -->1.58<!-- /n -->`.
data/readme.yaml says for every KEY where it is read and how it is written:

  metrics: smollm2.osprey.ID            a dotted path in results/metrics.json
  table: figure2_aggregate              results/tables/figure2_aggregate.csv
  timing: summary                       results/timings/summary.csv
    where: {cells: ID}                    the rows whose columns read so
    column: al                            the value
    take: one                             of the only such row (the default), the sum over them, count: how many rows,
                                          or positive: in how many the value is above 0
    minus: {cells: OOD}                   subtract the value of the rows that differ in this
    divide: 60
  format: .2f                           as in Python

`python -m osprey.readme` rewrites README.md; with --check it names the first number that is stale or typed.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from osprey.params import ROOT, Name, Strict, UserError, exactly_one, explain

README, NUMBERS = "README.md", "data/readme.yaml"
MARKED = re.compile(r"<!-- n: ([a-z0-9_-]+) -->([^<>]*)<!-- /n -->")


class Number(Strict):
    metrics: str | None = None
    table: str | None = None
    timing: str | None = None
    where: dict[str, str] = {}
    column: str | None = None
    take: Literal["one", "sum", "count", "positive"] = "one"
    minus: dict[str, str] | None = None
    divide: Annotated[float, Field(gt=0)] = 1
    format: str

    @model_validator(mode="after")
    def readable(self):
        exactly_one(self, "metrics", "table", "timing")
        if self.metrics and (self.where or self.column or self.minus or self.take != "one"):
            raise ValueError("metrics is a path to one number: no where, column, take or minus")
        if not self.metrics and not self.column and self.take != "count":
            raise ValueError("column is needed")
        try:
            format(1.0, self.format)
        except ValueError:
            raise ValueError(f"format: {self.format!r} is not a number's in Python") from None
        return self

    def file(self) -> str:
        """Below results/."""
        if self.metrics:
            return "metrics.json"
        return f"tables/{self.table}.csv" if self.table else f"timings/{self.timing}.csv"

    def what(self) -> str:
        """What is read there, in words."""
        if self.metrics:
            return f"`{self.metrics}`"
        words = {"one": f"`{self.column}`", "sum": f"sum of `{self.column}`", "count": "number of rows",
                 "positive": f"rows with `{self.column}` above 0"}[self.take]  # fmt: skip
        words += named(self.where) and f" where {named(self.where)}"
        words += f", minus that where {named(self.minus)}" if self.minus else ""
        return words + (f", divided by {self.divide:g}" if self.divide != 1 else "")


def named(where: dict[str, str]) -> str:
    return ", ".join(f"{column} = {value}" for column, value in where.items())


def numbers(root: Path = ROOT) -> dict[str, Number]:
    """data/readme.yaml by key. Raises UserError for what is not as described above."""
    try:
        return TypeAdapter(dict[Name, Number]).validate_python(yaml.safe_load((root / NUMBERS).read_text()))
    except FileNotFoundError:
        raise UserError(f"{NUMBERS}: no such file; take it from git") from None
    except yaml.YAMLError as error:
        raise UserError(f"{NUMBERS}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise UserError(f"{NUMBERS}: {explain(error)}") from None


def value(key: str, number: Number, root: Path) -> str:
    """The number as README.md should show it. Raises UserError when results have no such number."""
    path = root / "results" / number.file()
    if not path.is_file():
        raise UserError(f"{NUMBERS}: {key}: no results/{number.file()}; {mend(number)}")
    if number.metrics:
        found = json.loads(path.read_text())
        for step in number.metrics.split("."):
            if not isinstance(found, dict) or step not in found:
                raise UserError(f"{NUMBERS}: {key}: results/metrics.json has no {number.metrics}; {mend(number)}")
            found = found[step]
        if not isinstance(found, int | float):
            raise UserError(f"{NUMBERS}: {key}: {number.metrics} in results/metrics.json is not a number")
    else:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)  # a cell is what it reads
        found = of_rows(key, number, table, number.where)
        if number.minus is not None:
            found -= of_rows(key, number, table, number.where | number.minus)
    return format(found / number.divide, number.format)


def of_rows(key: str, number: Number, table: pd.DataFrame, where: dict[str, str]) -> float:
    here = f"{NUMBERS}: {key}: results/{number.file()} has"
    for column in [*where, *([number.column] if number.column else [])]:
        if column not in table:
            raise UserError(f"{here} no column {column}; {mend(number)}")
    for column, text in where.items():
        table = table[table[column] == text]
    if not len(table) or (number.take == "one" and len(table) > 1):
        raise UserError(f"{here} {len(table) or 'no'} rows where {named(where) or 'asked'}; {mend(number)}")
    if number.take == "count":
        return len(table)
    values = pd.to_numeric(table[number.column], errors="coerce")
    if values.isna().any():
        raise UserError(f"{here} no number in {number.column} where {named(where) or 'asked'}; {mend(number)}")
    return (values > 0).sum() if number.take == "positive" else values.sum()


def mend(number: Number) -> str:
    return "make benchmark writes it" if number.timing == "benchmark" else "make repro writes it, or mend the entry"


# README.md


def marked(text: str) -> list[tuple[str, str]]:
    """(key, value) of every number in the order of the text. Raises UserError for comments that are not pairs."""
    found = MARKED.findall(text)
    for count, line in enumerate(text.splitlines(), start=1):
        if len(re.findall(r"<!--\s*/?\s*n\b", line)) != 2 * len(MARKED.findall(line)):
            raise UserError(f"{README}, line {count}: not `<!-- n: KEY -->number<!-- /n -->` on one line")
        if re.match(r"[\s>*+-]*(\d+[.)]\s+)?<!--", line):
            raise UserError(f"{README}, line {count}: a line that begins with a comment is not read as Markdown; "
                            "move the number to the right")  # fmt: skip
    return found


def fresh(text: str, root: Path = ROOT) -> str:
    """README.md's text with every number as results have it. Raises UserError where the keys do not match."""
    known, used = numbers(root), [key for key, _ in marked(text)]
    for key in used:
        if key not in known:
            raise UserError(f"{README}: {key}: no such number in {NUMBERS}; add it")
    for key in known:
        if key not in used:
            raise UserError(f"{NUMBERS}: {key}: not used in {README}; remove it")
    values = {key: value(key, number, root) for key, number in known.items()}
    return MARKED.sub(lambda match: f"<!-- n: {match[1]} -->{values[match[1]]}<!-- /n -->", text)


# What looks like a result: a decimal fraction, a percentage, a ratio or a time. Counts (512 prompts, 135M parameters)
# are settings.
RESULT = re.compile(
    r"(?<![\w.,-])\d[\d,]*(?:\.\d+(?![\w.])|(?:\.\d+)?(?:\s?[%×]|\s(?:min|minutes?|s|seconds?|h|hours?|times)\b))"
)
# What may look like one and is none: code, where links lead, versions of Python, and the paper's own numbering.
NO_RESULTS = [
    re.compile(r"```.*?```", re.DOTALL), re.compile(r"`[^`\n]*`"), re.compile(r"\]\([^)\s]*\)"),
    re.compile(r"\bPython \d\.\d+(?: to \d\.\d+)?"),
    re.compile(r"\b(?:Sections?|Tables?|Figures?|Stages?|eq\.) \d[\d.]*"),
]  # fmt: skip


def typed(text: str) -> list[str]:
    """What looks like a result in README.md's text and is not inserted."""
    for pattern in [MARKED, *NO_RESULTS]:
        text = pattern.sub("|", text)
    return [match[0] for match in RESULT.finditer(text)]


def check(root: Path = ROOT) -> None:
    """Raises UserError, naming the first number in README.md that is stale, or typed instead of inserted."""
    text = (root / README).read_text()
    right = fresh(text, root)
    for (key, found), (_, wanted) in zip(marked(text), marked(right), strict=True):
        if found != wanted:
            source = numbers(root)[key].file()
            raise UserError(f"{README}: {key} reads {found or 'nothing'}, results/{source} gives {wanted}; "
                            "run python -m osprey.readme")  # fmt: skip
    for found in typed(text):
        raise UserError(f"{README}: {found!r} is typed; insert it by a key of {NUMBERS}")


def update(root: Path = ROOT) -> bool:
    """Insert the numbers into README.md; was there anything to change?"""
    path = root / README
    text = path.read_text()
    right = fresh(text, root)
    partial = path.with_name(f".{README}.partial")
    partial.write_text(right)
    os.replace(partial, path)
    return right != text


def refresh(root: Path = ROOT) -> None:
    """`update` where params.yaml is the laptop preset, whose numbers README.md has; elsewhere nothing."""
    if (root / "params.yaml").read_bytes() == (root / "presets/laptop.yaml").read_bytes() and update(root):
        print(f"{README}: its numbers are now those of results/")


# INDEX.md

MADE_BY = {
    "metrics": "`paper`",
    "table": "`paper`; stage and inputs are in the table's row above",
    "timing": "a clock, in every run anew",
}


def index_lines(root: Path = ROOT) -> list[str]:
    """The Markdown table of INDEX.md's section on README.md. It depends on data/readme.yaml alone, on no value."""
    lines = ["| number | read from | what | made by |", "|---|---|---|---|"]
    for key, number in numbers(root).items():
        kind = next(kind for kind in MADE_BY if getattr(number, kind))
        lines.append(f"| `{key}` | [{number.file()}]({number.file()}) | {number.what()} | {MADE_BY[kind]} |")
    return lines


def main():
    try:
        if sys.argv[1:] == ["--check"]:
            check()
        elif sys.argv[1:]:
            raise UserError("usage: python -m osprey.readme [--check]")
        else:
            update()
    except UserError as error:
        sys.exit(f"osprey: {error}")


if __name__ == "__main__":
    main()
