"""The papermill engine `osprey`: executed notebooks whose bytes depend on nothing but their inputs.

It also shows a stage's progress on the terminal, records its wall-clock time and peak memory apart from the
results, and turns a mistake in the parameters, or a full disk, into one line.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from papermill.engines import NBClientEngine

from osprey.lock import alone
from osprey.params import ROOT, UserError

# how Python, safetensors and torch say that a file could not be written to its end
FULL = ("No space left on device", "Disk quota exceeded", "File too large", "inline_container.cc")


class OspreyEngine(NBClientEngine):
    @classmethod
    def execute_notebook(cls, nb, kernel_name, output_path=None, **kwargs):
        begun = time.monotonic()
        name = Path(output_path or "notebook").stem
        if output_path:  # DVC has deleted the folder if it is an output
            Path(output_path).parent.mkdir(parents=True, exist_ok=True)
        sys.excepthook = told(name, output_path)
        try:
            with alone(name, f"{name} (perhaps left over from a stopped run)"), shown_progress():
                nb = super().execute_notebook(nb, kernel_name, output_path=output_path, **kwargs)
        except UserError as error:
            sys.exit(f"osprey: {error}")
        refuse(nb, name, output_path)
        scrub(nb)
        if output_path:
            record_timing(name, time.monotonic() - begun)
        return nb


def scrub(nb) -> None:
    """Remove what differs between two equal runs: times, random cell ids, library versions, stderr."""
    for key in ("papermill", "language_info"):
        nb.metadata.pop(key, None)
    for index, cell in enumerate(nb.cells):
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.id = "injected-parameters"
        if cell.cell_type == "code":
            cell.outputs = joined(output for output in cell.outputs if output.get("name") != "stderr")


def joined(outputs) -> list:
    """Neighbouring pieces of printed text as one: where the kernel cuts it depends on time."""
    whole = []
    for output in outputs:
        if whole and output.output_type == whole[-1].output_type == "stream":
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def refuse(nb, name: str, output_path) -> None:
    """A UserError or a full disk ends the stage with one line and leaves no notebook behind."""
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error" and (line := one_line(name, output.ename, output.evalue)):
                if output_path:
                    Path(output_path).unlink(missing_ok=True)
                sys.exit(line)


def one_line(name: str, kind: str, message: str) -> str | None:
    """What to say of an error instead of its traceback, or None."""
    if kind == "UserError":
        return f"osprey: {message}"
    if any(sign in message for sign in FULL):
        return (
            f"osprey: {name}: a file could not be written, the disk is full ({' '.join(message.split())}): "
            "free some space and run again, it continues from what is whole"
        )
    return None


def told(name: str, output_path):
    """An excepthook for when it is papermill that cannot write, the notebook itself."""

    def hook(kind, error, traceback):
        line = one_line(name, kind.__name__, str(error))
        if line is None:
            return sys.__excepthook__(kind, error, traceback)
        if output_path:
            Path(output_path).unlink(missing_ok=True)
        print(line, file=sys.stderr)

    return hook


class shown_progress:
    """Copies the lines that the kernel writes with `progress.say` to this process's stderr as they come."""

    def __enter__(self):
        handle, self.path = tempfile.mkstemp(prefix="osprey-progress-")
        os.close(handle)
        os.environ["OSPREY_PROGRESS"] = self.path  # the kernel inherits it
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.follow)
        self.thread.start()

    def follow(self):
        with open(self.path) as file:
            while True:
                ending = self.done.is_set()
                for line in file:
                    print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
                if ending:
                    return
                self.done.wait(0.5)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        del os.environ["OSPREY_PROGRESS"]
        os.unlink(self.path)


def record_timing(name: str, seconds: float) -> None:
    """results/timings/<notebook>.json; no stage output, since it differs every time."""
    folder = ROOT / "results" / "timings"
    folder.mkdir(parents=True, exist_ok=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    timing = {"stage": name, "seconds": round(seconds, 1), "peak_gib": round(peak, 2)}
    (folder / f"{name}.json").write_text(json.dumps(timing) + "\n")
