"""A run that is killed (SIGKILL) and continued ends in the same bytes as one that was left alone: weights, the loss
of every update (so the sampler stood where it stopped), the learning rates and the held-out losses.

The killed runs die at points drawn at random from those that the whole run passed: between two updates, in the
middle of writing an optimizer or a trainer state, while an old checkpoint is being removed, before the finished
folder is put in place.
"""

import random
import signal

import killed
import pandas as pd
import pytest
import torch

from osprey import corpus, models, params, prune, stages
from osprey.params import Corpus, Distill, Pretrain, Text

KINDS = ("update", "optimizer.pt", "trainer_state.json", "rotation", "end")


@pytest.fixture(scope="module")
def inputs(source_folder, make_converted, make_response, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    prune.prune(source_folder, 1, folder / "pruned")
    tokenizer = models.load_tokenizer(source_folder)
    texts = Corpus(texts={"problems": Text(generate="aiw", share=1.0)}, characters=20_000, held_out=0.2)
    corpus.build(texts, tokenizer, tokenizer.eos_token_id, 0, folder / "corpus")
    torch.save([make_response("000" + "1" * 9, seed) for seed in range(24)], folder / "responses")
    section = Pretrain(steps=12, window=32, batch=4, lr=3e-3, evaluations=4, held_out_windows=4)
    return {
        "pretrain": (folder / "pruned", folder / "corpus", section),
        "distill": (make_converted("osprey"), folder / "responses", Distill(tokens=24 * 8, batch=2)),
    }


@pytest.fixture(scope="module", params=["pretrain", "distill"])
def whole(request, inputs, tmp_path_factory):
    """A stage, its inputs, and the folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp(f"whole-{request.param}")
    assert killed.run(request.param, inputs[request.param], folder) == 0
    return request.param, inputs[request.param], folder


def made(folder) -> dict[str, bytes]:
    files = sorted(path for path in (folder / "out").rglob("*") if path.is_file())
    return {str(path.relative_to(folder / "out")): path.read_bytes() for path in files}


def test_killed_at_random_points(whole, tmp_path):
    stage, given, left_alone = whole
    passed = killed.points(left_alone)
    assert {kind for kind, _ in passed} >= set(KINDS)
    rng = random.Random(stage)
    chains = {
        "every kind": sorted((rng.choice([point for point in passed if point[0] == kind]) for kind in KINDS),
                             key=lambda point: (point[1], passed.index(point))),
        "updates": sorted(rng.sample([point for point in passed if point[0] == "update"], 3), key=lambda p: p[1]),
    }  # fmt: skip
    expected = made(left_alone)
    assert {name for name in expected if name.endswith((".safetensors", ".csv"))} == {
        "pretrain": {
            "backbone/model.safetensors", "short-backbone/model.safetensors", "train.csv", "held_out.csv"
        },
        "distill": {"model.safetensors", "history.csv"},
    }[stage]  # fmt: skip
    for name, chain in chains.items():
        folder = tmp_path / name
        for point in chain:
            assert killed.run(stage, given, folder, kill=point) == -signal.SIGKILL, point
            assert not (folder / "out").exists()
        assert killed.run(stage, given, folder) == 0
        found = made(folder)
        assert found.keys() == expected.keys()
        assert [file for file in expected if found[file] != expected[file]] == [], (name, chain)


def test_without_its_optimizer_or_its_place_a_run_ends_elsewhere(whole, tmp_path):
    """What the test above would miss if a checkpoint lacked them."""
    stage, given, left_alone = whole
    weights = "backbone/model.safetensors" if stage == "pretrain" else "model.safetensors"
    history = "train.csv" if stage == "pretrain" else "history.csv"
    expected = pd.read_csv(left_alone / "out" / history)
    for missing in ("optimizer", "place"):
        folder = tmp_path / missing
        killed.run(stage, given, folder, kill=("update", 8))
        if missing == "optimizer":
            (checkpoint,) = (folder / "kept/trainer").glob("checkpoint-*")
            (checkpoint / "optimizer.pt").unlink()
        assert killed.run(stage, given, folder, forget_position=missing == "place") == 0
        assert (folder / "out" / weights).read_bytes() != (left_alone / "out" / weights).read_bytes()
        found = pd.read_csv(folder / "out" / history)
        assert found[:6].equals(expected[:6]) and not found["loss"][8:].equals(expected["loss"][8:])


def test_a_resume_folder_is_for_one_set_of_inputs_and_goes_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "KEPT", tmp_path / ".resume")
    monkeypatch.setattr(stages, "digest", lambda name, key: "0" * 16)
    with pytest.raises(KeyboardInterrupt), stages.folder("distill", "a") as kept:
        (kept / "state").write_text("half")
        raise KeyboardInterrupt
    with stages.folder("distill", "a-b"):  # another run, whose name begins alike
        pass
    with stages.folder("distill", "a") as kept:
        assert (kept / "state").read_text() == "half"
        removed = []
        monkeypatch.setattr(stages.shutil, "rmtree", lambda path, **more: removed.append(path))
    assert not kept.exists()  # a kill in the middle of the removal would leave nothing under this name
    (gone,) = [path for path in removed if path.exists()]
    monkeypatch.undo()
    monkeypatch.setattr(stages, "KEPT", tmp_path / ".resume")
    monkeypatch.setattr(stages, "digest", lambda name, key: "1" * 16)
    (tmp_path / ".resume" / ("distill-a-" + "0" * 16)).mkdir()  # of inputs that are no longer these
    with stages.folder("distill", "a") as kept:
        assert [path.name for path in (tmp_path / ".resume").iterdir()] == [kept.name]
    assert list((tmp_path / ".resume").iterdir()) == []
    assert not gone.exists()


def test_the_digest_sees_parameters_and_bytes(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a").write_text("1")
    monkeypatch.setattr(params, "ROOT", tmp_path)
    monkeypatch.setattr(params, "stage", lambda name, key: {"deps": ["in"]})
    monkeypatch.setattr(params, "for_stage", lambda name, key: {"lr": lr})
    lr = 1
    digests = [stages.digest("distill", "a")]
    lr = 2
    digests.append(stages.digest("distill", "a"))
    (tmp_path / "in/a").write_text("2")
    digests.append(stages.digest("distill", "a"))
    (tmp_path / "in/a").rename(tmp_path / "in/b")
    digests.append(stages.digest("distill", "a"))
    assert len(set(digests)) == 4 and stages.digest("distill", "a") == digests[-1]
