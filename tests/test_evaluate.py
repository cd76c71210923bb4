"""Which drafters meet which prompts: the rows of the evaluate stage's ledger."""

from types import SimpleNamespace

import overfitted
import pandas as pd
import pytest

from osprey import checkpoint, evaluate, rollouts
from osprey.params import Domain, Drafter, Evaluate, Records, Run, UserError

STORED, GENERATED = Domain(records=[Records(path="q.txt")]), Domain(records=[Records(generate="gsm_symbolic")])


@pytest.fixture
def stage(tmp_path, target, make_drafter):
    """Outputs of the stages before: two stored domains and a generated one, a drafter adapted on each, and params."""
    prompts = {"held-out": overfitted.SEEN, "first": overfitted.UNSEEN, "validation": overfitted.SEEN[:1]}
    domains = {"chat": STORED, "law": STORED, "math": GENERATED}
    for domain in domains:
        folder = tmp_path / "data/rollouts/tiny" / domain
        folder.mkdir(parents=True)
        for split, asked in prompts.items():
            if (split, domain) != ("first", "math"):
                made = rollouts.generate(target, asked, overfitted.TAPS, 0.0, 12, [511], 0)
                rollouts.write(made, folder / f"{split}.safetensors")
    drafter = make_drafter("osprey")
    runs = {f"r-{domain}": Run(target="tiny", recipe="osprey", domain=domain, lr=1e-3) for domain in domains}
    runs["other"] = Run(target="tiny", recipe="eagle3-1l", domain="chat", lr=1e-3)
    for name in ("converted/tiny-osprey", *(f"drafters/tiny/osprey/{run}" for run in runs)):
        (tmp_path / "data" / name).mkdir(parents=True)
        checkpoint.save(drafter, tmp_path / "data" / name)
    return SimpleNamespace(
        drafters={"tiny-osprey": Drafter(target="tiny", recipe="osprey")}, runs=runs, domains=domains,
        rollouts=SimpleNamespace(prompts=dict.fromkeys(["adaptation", *prompts], 4)), evaluate=Evaluate(steps=3),
    )  # fmt: skip


def rows(ledger: pd.DataFrame, split: str) -> dict:
    chosen = ledger[ledger.split == split]
    return chosen.groupby(["run", "evaluation"]).request.count().to_dict()


def test_every_drafter_meets_every_domain_and_first_prompts_only_its_own(stage, tmp_path):
    out = tmp_path / "data/evaluations/tiny-osprey.csv"
    ledger = evaluate.evaluate(stage, "tiny-osprey", tmp_path, out)
    contestants = ["undistilled", "r-chat", "r-law", "r-math"]
    assert rows(ledger, "held-out") == {(run, domain): 4 for run in contestants for domain in stage.domains}
    met = [("undistilled", "chat"), ("undistilled", "law"), ("r-chat", "chat"), ("r-law", "law")]
    assert rows(ledger, "first") == dict.fromkeys(met, 2)
    assert set(ledger.split) == {"held-out", "first"}
    pd.testing.assert_frame_equal(pd.read_csv(out, keep_default_na=False), ledger.reset_index(drop=True))


def test_a_sweep_is_judged_on_validation_prompts_alone(stage, tmp_path):
    stage.evaluate = Evaluate(split="validation", steps=3)
    stage.rollouts.prompts = {"adaptation": 4, "validation": 1}
    ledger = evaluate.evaluate(stage, "tiny-osprey", tmp_path, tmp_path / "ledger.csv")
    assert set(ledger.split) == {"validation"} and (ledger.request == 0).all()


def test_missing_rollouts_are_one_line(stage, tmp_path):
    (tmp_path / "data/rollouts/tiny/law/first.safetensors").unlink()
    with pytest.raises(UserError, match="law/first.safetensors: cannot be read .*; run the rollouts stage again"):
        evaluate.evaluate(stage, "tiny-osprey", tmp_path, tmp_path / "ledger.csv")
    assert not (tmp_path / "ledger.csv").exists()
