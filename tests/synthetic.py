"""Synthetic stage outputs for the report's tests: everything that the stages before `paper` would have written."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from safetensors.numpy import save_file
from test_stats import STEPS, ledger_row, speculate

from osprey import inputs, params, report

DOMAINS = ("chat", "code", "commonsense", "finance", "math")
RECIPES = ("osprey", "eagle3-1l", "eagle3-2l")


def preset(
    domains=("chat", "finance", "math"), targets=("small", "large"), recipes=RECIPES, rates=(5e-4, 1e-3)
) -> dict:
    """A complete parameter file; the first target is the source itself. rates: of osprey recipes, and of the others."""
    made = {
        "osprey": {"interface": "osprey", "body": "backbone"},
        "osprey-no-pretrain": {"interface": "osprey", "body": "pruned"},
        "eagle3-1l": {"interface": "eagle3", "body": "random", "layers": 1},
        "eagle3-2l": {"interface": "eagle3", "body": "random", "layers": 2},
    }
    model = {"random": {"layers": 8, "width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "vocabulary": 300}}
    return {
        "seed": 1,
        "threads": 1,
        "models": {target: model for target in targets},
        "source": {"model": targets[0]},
        "corpus": {"texts": {"text": {"path": "a.txt", "share": 1.0}}, "characters": 1000},
        "pretrain": {"steps": 100, "window": 8, "batch": 1, "lr": 1e-3},
        "targets": {target: {} for target in targets},
        "domains": {domain: {"records": [{"path": "a.jsonl"}]} for domain in domains},
        "rollouts": {"prompts": {"adaptation": 8, "held-out": 8}, "max_new_tokens": 60, "batch": 1},
        "vocabulary": {"draft": "full"},
        "recipes": {recipe: made[recipe] for recipe in recipes},
        "drafters": {f"{t}-{r}": {"target": t, "recipe": r} for t in targets for r in recipes},
        "runs": {
            f"{t}-{r}-{d}": {"target": t, "recipe": r, "domain": d, "lr": rates[not r.startswith("osprey")]}
            for t in targets for r in recipes for d in domains
        },
        "distill": {"tokens": 1000, "steps": STEPS},
        "evaluate": {"steps": STEPS},
        "agreement": {"requests": 4},
        "report": {"resamples": 300},
    }  # fmt: skip


def second_rate(content: dict, lr: float, only=None) -> dict:
    """The same with every run (of the recipes in `only`) a second time, at `lr`."""
    more = {f"{name}-{lr:g}".replace(".", "_"): run | {"lr": lr} for name, run in content["runs"].items()
            if run["lr"] != lr and (only is None or run["recipe"] in only)}  # fmt: skip
    return content | {"runs": content["runs"] | more}


def load(content: dict, root: Path):
    (root / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return params.load(root / "params.yaml")


def weights(layers: int, width: int = 4, vocabulary: int = 20, draft: int = 8, midlayer: bool = False) -> dict:
    """A tiny drafter's tensors, in the release's names."""
    names = {"embed_tokens.weight": (vocabulary, width), "lm_head.weight": (draft, width), "norm.weight": (width,),
             "fc.weight": (width, 3 * width)}  # fmt: skip
    for layer in range(layers):
        stem = "midlayer" if midlayer else f"layers.{layer}"
        names |= {f"{stem}.self_attn.q_proj.weight": (width, 2 * width), f"{stem}.hidden_norm.weight": (width,)}
    return {name: np.zeros(shape, np.float32) for name, shape in names.items()} | {
        "t2d": np.zeros(vocabulary, bool), "d2t": np.zeros(draft, np.int64)}  # fmt: skip


def outputs(p, root: Path, requests: int = 24, seed: int = 0, luck: float = 1.0, first: tuple = ()) -> None:
    """Write them below `root`. first: the domains that have rollouts of their first prompts, too."""
    rng = np.random.default_rng(seed)
    shutil.copytree(params.ROOT / "data" / "paper", root / "data" / "paper", dirs_exist_ok=True)
    for name in ("dvc.yaml", "data/readme.yaml"):
        shutil.copy(params.ROOT / name, root / name)

    def write(path: str, rows) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(root / path, index=False)

    domains, split = list(p.domains), p.evaluate.split
    sides = [(d, split) for d in domains] + [(d, "first") for d in first]
    lengths = {(t, *side): rng.integers(2, 97, requests) for t in p.targets for side in sides}
    ease = {(t, *side): rng.normal(0, 0.08, requests) for t in p.targets for side in sides}
    for t in p.targets:
        for side in sides:
            lengths[t, *side][0] = 1  # one request without a verification step
        write(f"data/rollouts/{t}/summary.csv",
              [dict(domain=d, split=s, prompts=requests, skipped=1, tokens=int(rng.integers(2000, 9000)),
                    mean_tokens=70.25, ended=rng.uniform(0.4, 0.9), repetition=rng.uniform(0, 0.3))
               for d in domains for s in ("adaptation", split)])  # fmt: skip
        rows = []
        for d in domains:
            for request in range(4):
                common, steps = (60, int(rng.integers(20, 60)))[request % 2], int(rng.integers(10, 40))
                rows.append(dict(run=f"{t}-osprey-{d}", evaluation=d, request=request, tokens=60, common=common,
                                 steps=steps, equal=steps - int(rng.integers(0, 2)), decoded_tokens=60 + request // 2,
                                 decoded_verifications=int(rng.integers(30, 50)), replayed_tokens=60,
                                 replayed_verifications=int(rng.integers(30, 50))))  # fmt: skip
        write(f"data/agreement/{t}.csv", rows)
    for drafter in p.drafters.values():
        t, r = drafter.target, drafter.recipe
        rows = []
        runs = [(n, run.domain, run.lr) for n, run in p.runs.items() if (run.target, run.recipe) == (t, r)]
        for name, adaptation, lr in [("undistilled", "none", 0.0), *runs]:
            for d, s in sides:
                if s == "first" and adaptation not in ("none", d):
                    continue
                level = 0.12 if adaptation == "none" else 0.42 if d == adaptation else 0.3
                level += 0.06 * r.startswith("osprey") - 0.05 * (d == "math") * (adaptation != "math")
                for request in range(requests):
                    tokens = int(lengths[t, d, s][request])
                    trace = speculate(rng, luck * np.clip(level + ease[t, d, s][request], 0, 1), tokens)
                    rows.append(dict(target=t, recipe=r, run=name, adaptation=adaptation, lr=lr, evaluation=d,
                                     split=s, request=request) | ledger_row(trace, tokens))  # fmt: skip
        write(f"data/evaluations/{t}-{r}.csv", rows)
        write(f"data/converted/{t}-{r}/coverage.csv",
              [dict(domain=d, split=s, tokens=4000, covered=rng.uniform(0.9, 1))
               for d in domains for s in ("adaptation", split)])  # fmt: skip
        layers = p.recipes[r].layers or p.source.layers
        save_file(weights(layers, midlayer=layers == 1), root / f"data/converted/{t}-{r}/model.safetensors")
    for name, run in p.runs.items():
        step = np.arange(1, 241)
        loss = 8 * step**-0.12 + rng.normal(0, 0.5, 240) + (run.recipe == "eagle3-1l")
        write(f"data/drafters/{run.target}/{run.recipe}/{name}/history.csv",
              dict(step=step, tokens=step * 34, lr=run.lr, loss=loss))  # fmt: skip
    step = np.arange(1, p.pretrain.steps + 1)
    loss = 6 + 12 * np.exp(-((step / 25) ** 0.6)) + rng.normal(0, 0.08, len(step))
    write("data/pretrained/train.csv", dict(step=step, tokens=step * 2048, lr=1e-3, loss=loss))
    step = np.unique(np.r_[0, np.geomspace(1, p.pretrain.steps, 20).astype(int)])
    loss = 6.2 + 11.8 * np.exp(-((step / 25) ** 0.6))
    write("data/pretrained/held_out.csv", dict(step=step, tokens=step * 2048, loss=loss, perplexity=np.exp(loss)))


def made(root: Path, content: dict, **how):
    p = load(content, root)
    outputs(p, root, **how)
    return p


def tabled(p, root: Path):
    """What the report gathers, with its tables and without its pictures."""
    data = inputs.gather(p, root)
    for item in report.REGISTRY:
        if item.name.startswith("tables/"):
            data.tables[item.name.removeprefix("tables/")] = item.make(data)
    return data


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


def lines(root: Path, target: str, recipe: str) -> list[dict]:
    """The ledger's file, line by line."""
    header, *rest = (root / f"data/evaluations/{target}-{recipe}.csv").read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","))) for line in rest]


def al(root: Path, target: str, recipe: str, run: str, evaluation: str, split: str = "held-out", first=None) -> float:
    """Mean AL of a cell (its first so many requests), read line by line from the ledger's file."""
    values = []
    for row in lines(root, target, recipe):
        if (row["run"], row["evaluation"], row["split"]) == (run, evaluation, split) and int(row["verifications"]):
            if first is None or int(row["request"]) < first:
                values.append((int(row["tokens"]) - 1) / int(row["verifications"]))
    return sum(values) / len(values)
