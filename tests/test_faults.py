"""What goes wrong outside the code: a full disk, damaged files, two at once. One line each, nothing half-written,
and the next run recovers."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from osprey import checkpoint, corpus, models, prune, rollouts
from osprey.distill import distill
from osprey.params import ROOT, Corpus, Distill, Model, Random, Text, UserError


@contextmanager
def full_disk(limit=20_000):
    """No file can grow beyond `limit` bytes: what a full disk is to the writer of a large file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def told(error: BaseException) -> str | None:
    import papermill  # noqa: F401, which loads the engine

    from osprey import engine

    return engine.one_line("stage", type(error).__name__, str(error))


WRITERS = {
    "torch": lambda path: torch.save({"a": torch.zeros(50_000)}, path),
    "safetensors": lambda path: save_file({"a": torch.zeros(50_000)}, path),
    "pandas": lambda path: pd.DataFrame({"a": np.arange(50_000)}).to_csv(path),
    "json": lambda path: path.write_text(json.dumps(list(range(50_000)))),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_known_by_what_each_library_says(writer, tmp_path):
    with full_disk(), pytest.raises(Exception) as limited:
        WRITERS[writer](tmp_path / "file")
    errors = [limited.value]
    if os.path.exists("/dev/full") and writer != "safetensors":  # which writes beside the name it was given
        (tmp_path / "full").symlink_to("/dev/full")
        with pytest.raises(Exception) as no_space:
            WRITERS[writer](tmp_path / "full")
        errors.append(no_space.value)
    for error in errors:
        line = told(error)
        assert line.startswith("osprey: stage: a file could not be written, the disk is full (") and "\n" not in line
        assert "free some space and run again" in line
    assert told(FileNotFoundError(2, "No such file or directory")) is None
    assert told(RuntimeError("shapes differ")) is None


@pytest.fixture
def writes(tmp_path, source_folder, make_converted, make_response):
    """Functions that make stage outputs, as tmp_path/out."""
    tokenizer = models.load_tokenizer(source_folder)
    texts = Corpus(texts={"problems": Text(generate="aiw", share=1.0)}, characters=50_000, held_out=0.2)
    responses = [make_response("000" + "1" * 9, seed) for seed in range(24)]
    tiny = Random(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, vocabulary=512)
    converted, section = make_converted("osprey"), Distill(tokens=24, batch=2)

    def drafter():
        distill(converted, responses, section, 1e-3, 0, "run", tmp_path / "kept", tmp_path / "out")

    def shards():
        corpus.build(texts, tokenizer, tokenizer.eos_token_id, 0, tmp_path / "out")

    def model():
        models.materialise("tiny", Model(random=tiny), tmp_path / "out")

    def responses_file():
        rollouts.write(responses, tmp_path / "out")

    return {
        "drafter": drafter,
        "corpus": shards,
        "model": model,
        "pruned": lambda: prune.prune(source_folder, 2, tmp_path / "out"),
        "rollouts": responses_file,
    }


@pytest.mark.parametrize("output", ["drafter", "corpus", "model", "pruned", "rollouts"])
def test_a_full_disk_leaves_nothing_half_written_and_the_next_run_recovers(output, writes, tmp_path, monkeypatch):
    save = checkpoint.save

    def on_a_full_disk(*arguments):
        with full_disk():
            save(*arguments)

    if output == "drafter":  # only the finished one: its training's checkpoints are the next test's
        monkeypatch.setattr(checkpoint, "save", on_a_full_disk)
        with pytest.raises(Exception) as error:
            writes[output]()
    else:
        with full_disk(), pytest.raises(Exception) as error:
            writes[output]()
    assert told(error.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"kept"}
    monkeypatch.setattr(checkpoint, "save", save)
    writes[output]()
    assert {path.name for path in tmp_path.iterdir()} <= {"kept", "out"} and (tmp_path / "out").exists()


FILLS_UP = """
from osprey import training
import resource

def full(report, args, state, control, **kwargs):
    if state.global_step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

training.Report.on_step_end = full
"""
PRETRAIN = """
from pathlib import Path
from osprey import pretrain, stages
from osprey.params import Pretrain

stages.settle(1, 0)
section = Pretrain(steps=10, window=32, batch=4, lr=3e-3, evaluations=4, held_out_windows=4)
pretrain.pretrain(Path("pruned"), Path("corpus"), section, 0, Path("kept"), Path("kept/out"))
"""


class Stage:
    """A copy of the package, against which notebooks run as stages do."""

    def __init__(self, folder):
        self.folder = folder
        shutil.copytree(ROOT / "osprey", folder / "osprey", ignore=shutil.ignore_patterns("__pycache__"))
        self.environment = os.environ | {"PYTHONPATH": str(folder)}

    def start(self, cells: list[str], output: str):
        kernel = {"name": "python3", "display_name": "python3", "language": "python"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
        notebook.cells = [nbformat.v4.new_code_cell(cell, id=f"cell-{index}") for index, cell in enumerate(cells)]
        nbformat.write(notebook, self.folder / f"in-{output}")
        command = [sys.executable, "-m", "papermill", "--engine", "osprey", "--no-progress-bar", f"in-{output}", output]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, cells: list[str], output: str = "out.ipynb") -> tuple[int, list[str]]:
        """Exit status and the lines on stderr that begin with osprey: and there is no traceback."""
        process = self.start(cells, output)
        _, errors = process.communicate()
        self.errors = errors.split("ERROR:tornado.general")[0]  # a kernel may say so when its socket closes under it
        assert "Traceback" not in self.errors, self.errors
        return process.returncode, [line for line in self.errors.splitlines() if line.startswith("osprey: ")]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_a_disk_that_fills_up_between_checkpoints(stage, source_folder, tmp_path):
    prune.prune(source_folder, 1, tmp_path / "pruned")
    tokenizer = models.load_tokenizer(source_folder)
    texts = Corpus(texts={"problems": Text(generate="aiw", share=1.0)}, characters=20_000, held_out=0.2)
    corpus.build(texts, tokenizer, tokenizer.eos_token_id, 0, tmp_path / "corpus")

    status, lines = stage.run([FILLS_UP, PRETRAIN], "pretrain.ipynb")
    assert status and len(lines) == 1
    assert lines[0].startswith("osprey: pretrain: a file could not be written, the disk is full (")
    assert not (tmp_path / "pretrain.ipynb").exists() and not (tmp_path / "kept/out").exists()
    assert [path.name for path in (tmp_path / "kept/trainer").iterdir()] == ["checkpoint-4"]

    assert stage.run([PRETRAIN], "pretrain.ipynb") == (0, [])
    assert "pretrain: continues from checkpoint-4" in stage.errors and (tmp_path / "kept/out/train.csv").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_disk_too_full_for_the_notebook(stage, tmp_path):
    (tmp_path / "out.ipynb").symlink_to("/dev/full")
    status, lines = stage.run(["1 + 1"])
    assert status and len(lines) == 1
    assert lines[0].startswith("osprey: out: a file could not be written, the disk is full ([Errno 28]")
    assert not os.path.lexists(tmp_path / "out.ipynb")
    assert stage.run(["1 + 1"]) == (0, [])


def waits_for(path, process=None):
    for _ in range(600):
        if path.exists():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"{path} never came")


def test_a_stage_left_over_from_a_stopped_run(stage, tmp_path):
    """DVC was killed and its stage was not: a second one would write over the same files."""
    waiting = "import os, time\nopen('begun', 'w')\nwhile not os.path.exists('go'):\n    time.sleep(0.05)"
    left_over = stage.start([waiting], "out.ipynb")
    waits_for(tmp_path / "begun", left_over)
    status, lines = stage.run(["1 + 1"])
    what = "out (perhaps left over from a stopped run) is already running"
    assert status and lines == [f"osprey: {what} in {tmp_path}: wait for it or stop it, then run again"]
    assert left_over.poll() is None
    (tmp_path / "go").touch()
    left_over.communicate()
    assert left_over.returncode == 0 and "begun" in (tmp_path / "out.ipynb").read_text()
    assert stage.run(["1 + 1"]) == (0, [])


@pytest.mark.parametrize("damage", ["cut", "header"])
def test_damaged_weights_and_rollouts(damage, make_converted, make_response, tmp_path):
    shutil.copytree(make_converted("osprey"), tmp_path / "drafter")
    rollouts.write([make_response("000111")], tmp_path / "rollouts.safetensors")
    for path, read, mend in (
        (tmp_path / "drafter/model.safetensors", lambda path: checkpoint.load(path.parent), "make it again"),
        (tmp_path / "rollouts.safetensors", rollouts.read, "run the rollouts stage again"),
    ):
        read(path)
        content = bytearray(path.read_bytes())
        if damage == "cut":
            content = content[: len(content) // 2]
        else:
            content[3] ^= 1
        path.write_bytes(content)
        with pytest.raises(UserError) as error:
            read(path)
        assert str(path) in str(error.value) and mend in str(error.value) and "\n" not in str(error.value)


FAKE_DVC = """
import os, sys, time
open(f"begun-{os.getpid()}", "w")
try:
    while not os.path.exists("go"):
        time.sleep(0.05)
except KeyboardInterrupt:
    sys.exit(1)
"""


class Repro:
    """A copy of the package and its parameters, in which `dvc` waits for a file named go."""

    def __init__(self, folder):
        self.folder, self.notes, self.started = folder, folder / ".dvc/tmp/rwlock", []
        shutil.copytree(ROOT / "osprey", folder / "osprey", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("dvc.yaml", "data/packages.yaml", "presets/laptop.yaml"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        shutil.copy(ROOT / "presets/smoke.yaml", folder / "params.yaml")
        (folder / "dvc").mkdir()
        (folder / "dvc/__init__.py").touch()
        (folder / "dvc/__main__.py").write_text(FAKE_DVC)
        self.notes.parent.mkdir(parents=True)

    def start(self, module: str = "osprey.repro"):
        process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=self.folder, env=os.environ | {"PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            # tests that run in the background ignore this signal, and so would what they start
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.started.append(process)
        return process

    def refused(self) -> str:
        """The one line of a `make repro` that does nothing else."""
        begun, process = self.begun(), self.start()
        output, errors = process.communicate(timeout=60)
        assert process.returncode and output == "" and errors.count("\n") == 1 and self.begun() == begun
        return errors.strip()

    def begun(self) -> list[int]:
        return sorted(int(path.name.removeprefix("begun-")) for path in self.folder.glob("begun-*"))

    def waiting(self, process) -> int:
        """The process number of the dvc that a started process runs or is."""
        before = self.begun()
        for _ in range(600):
            if new := set(self.begun()) - set(before):
                return new.pop()
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        raise AssertionError("no dvc was started")


@pytest.fixture
def repro(tmp_path):
    repro = Repro(tmp_path)
    yield repro
    for process in repro.started:  # and what they started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_two_make_repro_in_one_folder(repro):
    first = repro.start()
    dvc = repro.waiting(first)
    line = f"osprey: make repro is already running in {repro.folder}: wait for it or stop it, then run again"
    assert repro.refused() == line
    first.kill()  # alone: its dvc goes on
    first.wait()
    assert repro.refused() == line
    os.kill(dvc, signal.SIGKILL)
    (repro.folder / "go").touch()
    for _ in range(100):
        again = repro.start()
        output, errors = again.communicate()
        if again.returncode == 0:
            break
        assert errors.strip() == line  # the killed dvc is still being buried
    assert again.returncode == 0 and "Done in" in output


def test_stopped_by_hand(repro):
    process = repro.start()
    repro.waiting(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate()
    assert process.returncode and errors == "osprey: stopped; run it again and it continues\n"


def test_make_repro_while_a_dvc_is_at_work(repro):
    plain = repro.start("dvc")
    number = repro.waiting(plain)
    notes = {"write": {"/a/data": {"pid": number, "cmd": "repro"}}, "read": {"/a/b": [{"pid": number, "cmd": "repro"}]}}
    repro.notes.write_text(json.dumps(notes))
    wait = f"at work in {repro.folder}: wait for it or stop it, then run again"
    assert repro.refused() == f"osprey: dvc (process {number}) is {wait}"
    assert json.loads(repro.notes.read_text()) == notes
    plain.kill()
    os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT)  # dead, but nobody has buried it: DVC takes it for alive
    (repro.folder / "go").touch()
    notes["write"]["/a/data"]["pid"] = os.getpid()  # a number that another program has by now
    repro.notes.write_text(json.dumps(notes))
    again = repro.start()
    again.communicate()
    assert again.returncode == 0 and not repro.notes.exists()
    repro.notes.write_text('{"write": {"/a')
    assert repro.refused() == (
        f"osprey: {repro.notes} was cut short by a kill: if no other dvc runs here, delete it and run again"
    )
