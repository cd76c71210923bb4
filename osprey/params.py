"""The schema of params.yaml, and what of it a stage may see.

Every key is checked before anything runs: an unknown key, a wrong type or an impossible value is one line
that names the key. `for_stage` hands a notebook only the keys that its stage in dvc.yaml declares, so a
result can never depend on a parameter that DVC does not watch.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ROOT = Path(__file__).resolve().parent.parent

Name = Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")]  # dots break DVC's params paths, slashes its stage addresses
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]


class UserError(Exception):
    """What the person running this can mend; shown as one line, without a traceback."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def exactly_one(item: BaseModel, *keys: str):
    given = [key for key in keys if getattr(item, key) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(keys)} (given: {', '.join(given) or 'none'})")


class Random(Strict):
    """A tiny model with random weights and a tokenizer trained on the spot: tests and the smoke preset."""

    architecture: Literal["llama", "qwen3"] = "llama"
    layers: Count
    width: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocabulary: Annotated[int, Field(ge=300)]
    seed: int = 0


class Model(Strict):
    """Where a model comes from: a GGUF inside a package, a hub repository at a revision, a folder, or random."""

    package: str | None = None
    gguf: str | None = None  # the member of the package
    hub: str | None = None
    revision: str | None = None
    path: str | None = None
    random: Random | None = None

    @model_validator(mode="after")
    def one_origin(self):
        exactly_one(self, "package", "hub", "path", "random")
        if self.package and not self.gguf:
            raise ValueError("package needs gguf, the name of the weights inside it")
        if self.hub and not self.revision:
            raise ValueError("hub needs revision (a commit hash), or the run cannot be repeated")
        return self


class Records(Strict):
    """Where texts or prompts come from: members of a package, a local file, a hub dataset, or a generator."""

    package: str | None = None
    members: list[str] | None = None  # glob patterns inside the package
    path: str | None = None  # .jsonl, .jsonl.gz, .json, .txt; relative to the repository
    hub: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    generate: str | None = None  # the name of a reasoning-gym dataset
    field: str | None = None  # where the text is in a record (osprey/records.py); none for plain text

    @model_validator(mode="after")
    def one_origin(self):
        exactly_one(self, "package", "path", "hub", "generate")
        if self.package and not self.members:
            raise ValueError("package needs members, the files to read inside it")
        if self.hub and not self.field:
            raise ValueError("hub needs field, the column that holds the text")
        return self


class Text(Records):
    share: Share  # of corpus.characters
    min_characters: int = 0  # shorter documents are dropped
    html: bool = False  # the texts hold HTML tags and entities


class Domain(Strict):
    """One domain's prompts; adaptation and held-out prompts are disjoint draws from the same records."""

    records: list[Records]
    template: str = "{prompt}"  # wraps every prompt

    @model_validator(mode="after")
    def holds_prompt(self):
        if "{prompt}" not in self.template:
            raise ValueError("template must contain {prompt}")
        return self


class Source(Strict):
    model: Name
    layers: Count = 2


class Corpus(Strict):
    texts: dict[Name, Text]
    characters: Count
    held_out: Rate = 0.01  # share of documents
    shard_tokens: Count = 100_000_000

    @model_validator(mode="after")
    def shares(self):
        total = sum(text.share for text in self.texts.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of texts add up to {total:.4f}, not 1")
        return self


Precision = Literal["bf16", "fp32"]


class Pretrain(Strict):
    steps: Annotated[int, Field(ge=5)]
    window: Annotated[int, Field(ge=2)]
    batch: Count  # windows per device and micro-batch
    accumulation: Count = 1
    lr: Annotated[float, Field(gt=0)]
    warmup: Rate = 0.01
    weight_decay: float = 0.1
    clip: float = 1.0
    short: Share = 0.2  # where in the run the short backbone is taken
    evaluations: Count = 20  # held-out perplexity, spread evenly on a log axis
    held_out_windows: Count = 32
    precision: Precision = "bf16"
    fsdp: str | None = None  # passed to the Trainer


class Target(Strict):
    """A model that is drafted for, by its name in models."""

    taps: Annotated[list[int], Field(min_length=3, max_length=3)] | None = None  # 0-based layers; default: EAGLE-3's
    system: str | None = None  # system prompt; none: the template's own


# adaptation: what drafters are distilled on. held-out: what tables are about, a seeded sample. validation: for choosing
# a learning rate, in no table. first: the records' first prompts in their own order, to show what taking them would do.
Split = Literal["adaptation", "held-out", "validation", "first"]


class Rollouts(Strict):
    prompts: dict[Split, Count]  # of each domain
    adaptation_temperature: Annotated[float, Field(ge=0)] = 1.0
    held_out_temperature: Annotated[float, Field(ge=0)] = 0.0  # of every split but adaptation
    max_prompt_tokens: Count = 512
    max_new_tokens: Count
    batch: Count
    precision: Precision = "bf16"


class Vocabulary(Strict):
    draft: Annotated[int, Field(ge=2)] | Literal["full"]
    generic_tokens: Count = 1_000_000  # of the corpus, counted for the list


class Recipe(Strict):
    """How a drafter is made. `osprey` keeps the source's embedding as residual stream, `eagle3` the taps."""

    interface: Literal["osprey", "eagle3"]
    body: Literal["backbone", "short-backbone", "pruned", "random"]
    layers: Count | None = None  # of a random body; otherwise the backbone's

    @model_validator(mode="after")
    def known(self):
        if (self.interface == "eagle3") != (self.body == "random"):
            raise ValueError("an eagle3 recipe has a random body, an osprey recipe a pretrained or pruned one")
        if (self.body == "random") != (self.layers is not None):
            raise ValueError("layers belongs to a random body, and only there")
        return self


class Drafter(Strict):
    target: Name
    recipe: Name


class Run(Strict):
    target: Name
    recipe: Name
    domain: Name
    lr: Annotated[float, Field(gt=0)]


class Distill(Strict):
    tokens: Count  # chain starts of one pass over the rollouts, equal for every run
    batch: Count = 1  # responses per device and micro-batch
    accumulation: Count = 1
    steps: Count = 5  # K, the length of the training-time test
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8  # lambda of eq. 5
    depth: Literal["whole", "drawn"] = "whole"  # unroll all steps every time, or step k with probability decay^k
    warmup: Rate = 0.04
    clip: float = 1.0
    precision: Precision = "bf16"


class Evaluate(Strict):
    split: Literal["held-out", "validation"] = "held-out"  # whose prompts the tables are about
    steps: Count = 5  # draft tokens per verification
    precision: Precision = "fp32"


class Agreement(Strict):
    requests: Count  # of each domain, decoded token by token beside their replay


class Report(Strict):
    resamples: Count = 10_000  # of the bootstrap


class Params(Strict):
    seed: int
    threads: Count
    models: dict[Name, Model]
    source: Source
    corpus: Corpus
    pretrain: Pretrain
    targets: dict[Name, Target]
    domains: dict[Name, Domain]
    rollouts: Rollouts
    vocabulary: Vocabulary
    recipes: dict[Name, Recipe]
    drafters: dict[Name, Drafter]
    runs: dict[Name, Run]
    distill: Distill
    evaluate: Evaluate
    agreement: Agreement
    report: Report

    @model_validator(mode="after")
    def references(self):
        def known(where, name, among):
            if name not in getattr(self, among):
                raise ValueError(f"{where}: {name!r} is not among {among} ({', '.join(getattr(self, among))})")

        for split in ("adaptation", self.evaluate.split):
            if split not in self.rollouts.prompts:
                raise ValueError(f"rollouts.prompts: has no {split}, which is needed (evaluate.split)")
        known("source.model", self.source.model, "models")
        for name in self.targets:
            known(f"targets.{name}", name, "models")
        for kind in ("drafters", "runs"):
            for name, item in getattr(self, kind).items():
                known(f"{kind}.{name}.target", item.target, "targets")
                known(f"{kind}.{name}.recipe", item.recipe, "recipes")
        for name, item in self.drafters.items():
            if name != f"{item.target}-{item.recipe}":
                raise ValueError(f"drafters.{name}: must be named {item.target}-{item.recipe}, its files are")
            if not any((run.target, run.recipe) == (item.target, item.recipe) for run in self.runs.values()):
                raise ValueError(f"drafters.{name}: no run uses it; add one to runs, or leave it out")
        for name, run in self.runs.items():
            known(f"runs.{name}.domain", run.domain, "domains")
            known(f"runs.{name}: drafter", f"{run.target}-{run.recipe}", "drafters")
        return self


def explain(error: ValidationError) -> str:
    """The first fault as one line: key, what is wrong, what would be right."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"] if not str(part).startswith(("int", "literal", "constrained")))
    if fault["type"] == "extra_forbidden":
        return f"{key}: no such key"
    message = fault["msg"].removeprefix("Value error, ")
    given = "" if fault["type"] in ("missing", "value_error") else f" (given: {fault['input']!r})"
    return f"{key}: {message}{given}" if key else message + given


def load(path: Path | None = None) -> Params:
    """Read and check a parameter file; by default the repository's params.yaml. Raises UserError."""
    path = path or ROOT / "params.yaml"
    try:
        return Params.model_validate(yaml.safe_load(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; copy one from presets/") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path.name}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise UserError(f"{path.name}: {explain(error)}") from None


def stage(name: str, key: str | None = None, root: Path = ROOT) -> dict:
    """The stage's entry in dvc.yaml with ${key} and ${item.x} filled in. Raises UserError for an unknown key."""
    entry = yaml.safe_load((root / "dvc.yaml").read_text())["stages"][name]
    if "foreach" not in entry:
        return entry
    mapping = entry["foreach"].strip("${}")
    items = yaml.safe_load((root / "params.yaml").read_text())[mapping]
    if key not in items:
        raise UserError(f"{mapping}: no {key!r} in params.yaml (there are: {', '.join(items)})")

    def fill(node):
        if isinstance(node, dict):
            return {fill(k): fill(v) for k, v in node.items()}
        if isinstance(node, list):
            return [fill(v) for v in node]
        if not isinstance(node, str):
            return node
        node = node.replace("${key}", key)
        return re.sub(r"\$\{item\.(\w+)\}", lambda match: str(items[key][match[1]]), node)

    return fill(entry["do"])


def for_stage(name: str, key: str | None = None) -> SimpleNamespace:
    """The parameters that dvc.yaml declares for this stage, and no others, as `p.distill.steps`, `p.runs[key]`."""
    params = load()
    view = SimpleNamespace()
    for declared in stage(name, key)["params"]:
        section, _, entry = declared.partition(".")
        if entry:
            vars(view).setdefault(section, {})[entry] = getattr(params, section)[entry]
        else:
            setattr(view, section, getattr(params, section))
    return view


def main():
    """`python -m osprey.params [FILE]`: check a parameter file."""
    import sys

    try:
        params = load(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    except UserError as error:
        sys.exit(f"osprey: {error}")
    print(f"{len(params.runs)} runs of {len(params.recipes)} recipes on {len(params.targets)} targets: fine")


if __name__ == "__main__":
    main()
