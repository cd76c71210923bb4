"""Training runs in processes of their own that kill themselves (SIGKILL) at a named point."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import torch
from transformers import TrainerState, TrainingArguments

from osprey import distill, pretrain, stages, training

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["osprey.distill", "osprey.pretrain"])  # imported once, not in every process


class Points:
    """The points that a run passes, as (kind, updates so far), and the one at which it dies."""

    def __init__(self, kill, out: Path, log: Path):
        self.kill, self.log, self.step = kill, log, 0
        save, to_json, rmtree, replace = torch.save, TrainerState.save_to_json, shutil.rmtree, os.replace

        def on_step_end(report, args, state, control, **kwargs):
            self.step = state.global_step
            self.passed("update")

        def save_in_halves(content, path, *rest, **more):
            save(content, path, *rest, **more)
            self.in_halves(path, Path(path).name)

        def to_json_in_halves(state, path):
            to_json(state, path)
            self.in_halves(path, "trainer_state.json")

        def remove_one_file_first(path, *rest, **more):
            if Path(path).name.startswith("checkpoint-"):
                (Path(path) / "optimizer.pt").unlink(missing_ok=True)  # an earlier kill may have
                self.passed("rotation")
            rmtree(path, *rest, **more)

        def at_the_end(made, final):
            if Path(final) == out:
                self.passed("end")
            replace(made, final)

        training.Report.on_step_end = on_step_end
        torch.save, TrainerState.save_to_json = save_in_halves, to_json_in_halves
        shutil.rmtree, os.replace = remove_one_file_first, at_the_end

    def in_halves(self, path, kind: str):
        content = Path(path).read_bytes()
        Path(path).write_bytes(content[: len(content) // 2])
        self.passed(kind)
        Path(path).write_bytes(content)

    def passed(self, kind: str):
        with open(self.log, "a") as file:
            file.write(f"{kind} {self.step}\n")
        if self.kill and kind == self.kill[0] and self.step >= self.kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)


def work(stage: str, inputs, folder: Path, kill, forget_position: bool):
    stages.settle(1, 0)
    out = folder / "out"
    Points(kill, out, folder / "points")
    if forget_position:
        made = TrainingArguments.__init__
        TrainingArguments.__init__ = lambda self, **keys: made(self, **keys, ignore_data_skip=True)
    if stage == "pretrain":
        pruned, corpus, section = inputs
        pretrain.pretrain(pruned, corpus, section, 0, folder / "kept", out)
    else:
        converted, responses, section = inputs
        distill.distill(converted, torch.load(responses, weights_only=False), section, 1e-2, 0, "run",
                        folder / "kept", out)  # fmt: skip


def run(stage: str, inputs, folder: Path, kill: tuple[str, int] | None = None, forget_position: bool = False) -> int:
    """Run a stage into folder/out, with folder/kept as its resume folder; returns the exit status (negative: signal).

    `kill`: a kind of point and a number of updates; the process dies at the first such point from there on.
    """
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    process = processes.Process(target=work, args=(stage, inputs, folder, kill, forget_position))
    process.start()
    process.join()
    return process.exitcode


def points(folder: Path) -> list[tuple[str, int]]:
    lines = (folder / "points").read_text().splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]
