"""The benchmark compares things that compute the same, and keeps its ratios only for the preset's own models."""

import overfitted
import pandas as pd
import pytest
import torch

from osprey import benchmark, checkpoint, rollouts


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Shapes that take no time, one repetition, no settings that outlive a test."""
    sizes = {"PROMPT": 12, "RESPONSE": 10, "WIDTH": 36, "VOCABULARY": 700, "REDUCED": 300, "REPEATS": 2, "DECODINGS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(benchmark, name, size)
    monkeypatch.setattr(benchmark.stages, "settle", lambda threads, seed: torch.manual_seed(seed))
    for name in ("TARGET", "DRAFTER", "RECORDED", "OUT"):
        monkeypatch.setattr(benchmark, name, tmp_path / "timings" / name.lower())


def test_both_formulations_have_the_same_loss():
    losses = benchmark.distillation()["loss"].unstack("formulation")
    assert losses.index.tolist() == [300, 700]
    assert losses["ours"].tolist() == pytest.approx(losses["plain"].tolist(), rel=1e-3)
    assert losses["ours"].nunique() == 2


def test_random_weights_are_not_kept(monkeypatch, capsys):
    monkeypatch.setattr(benchmark.readme, "refresh", lambda: pytest.fail("README.md is not theirs"))
    benchmark.main()
    assert not benchmark.OUT.exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "replay with random weights, since make repro has not run: not kept"
    assert sum("times as fast" in line for line in lines) == 4


def test_the_preset_s_own_are_kept(monkeypatch, target, target_folder, make_drafter, tmp_path, capsys):
    drafter = overfitted.drafter(make_drafter, target, "osprey")
    folder = tmp_path / "drafter"
    folder.mkdir()
    checkpoint.save(drafter, folder)
    prompt = overfitted.SEEN[0]
    tokens_T, zeros = torch.tensor(prompt + [1, 2]), torch.zeros(len(prompt) + 2)
    mask_T = torch.tensor([0] * len(prompt) + [1, 1])
    rollouts.write([rollouts.Response(tokens_T, mask_T, zeros, zeros[:, None], zeros[:, None])], tmp_path / "recorded")
    paths = {"TARGET": target_folder, "DRAFTER": folder, "RECORDED": tmp_path / "recorded"}
    for name, path in paths.items():
        monkeypatch.setattr(benchmark, name, path)
    refreshed = []
    monkeypatch.setattr(benchmark.readme, "refresh", lambda: refreshed.append(benchmark.OUT.exists()))
    benchmark.main()
    table = pd.read_csv(benchmark.OUT)
    assert table.columns.tolist() == ["name", "ratio", "slow_seconds", "fast_seconds"]
    assert table["name"].tolist() == ["distillation 700", "distillation 300", "distillation 700 to 300", "replay"]
    assert (table.iloc[:, 1:] > 0).all(axis=None)
    assert refreshed == [True] and [path.name for path in benchmark.OUT.parent.iterdir()] == ["out"]
    printed = capsys.readouterr().out
    steps = [line.split() for line in printed.splitlines() if line.split()[:1] == ["0"]]
    assert len(steps) == 1 and 0 < float(steps[0][3]) < 9  # it accepted something


def test_the_list_of_readme_s_numbers_has_its_names():
    """Those that a run at full size gives, whose sizes the README states."""
    listed = {number.where["name"] for number in benchmark.readme.numbers().values() if number.timing == "benchmark"}
    assert listed == {"distillation 49152", "distillation 49152 to 8192", "replay"}
