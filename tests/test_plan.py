"""The cost estimate against the committed run's own timings."""

import json

import pytest
from walk import ROOT

from osprey import params, plan


def committed(*stages: str) -> float:
    """Seconds that the committed run spent in these stages."""
    files = [file for file in (ROOT / "results/timings").glob("*.json") if file.stem.split("-")[0] in stages]
    assert files
    return sum(json.loads(file.read_text())["seconds"] for file in files)


def test_the_estimate_is_what_the_committed_run_took():
    """Each kind of stage within a third, the whole within a fifth."""
    estimate = plan.seconds(params.load(ROOT / "presets/laptop.yaml"))
    for stage in ("models", "pretrain", "rollouts", "distill", "evaluate", "agreement"):
        assert 0.67 < estimate[stage] / committed(stage) < 1.5, stage
    assert 0.8 < sum(estimate.values()) / committed(*estimate, "corpus", "prune", "convert", "paper") < 1.25


def test_twice_the_work_is_twice_the_time():
    tree = params.load(ROOT / "presets/laptop.yaml")
    double = tree.model_copy(update={"distill": tree.distill.model_copy(update={"tokens": 2 * tree.distill.tokens})})
    once, twice = plan.seconds(tree), plan.seconds(double)
    assert twice["distill"] - once["distill"] == pytest.approx(
        len(tree.runs) * tree.distill.tokens / plan.DISTILL_STARTS
    )
    assert {stage: cost for stage, cost in once.items() if stage != "distill"} == {
        stage: cost for stage, cost in twice.items() if stage != "distill"
    }
