"""Executed notebooks: equal bytes from equal runs, progress for the eye only, and a mistake told in one line.

The notebooks run as the stages do, `papermill --engine osprey` in a process of its own, but against a copy of the
package, so that the engine's timings go beside the copy.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from osprey.params import ROOT

CHATTY = """import os, sys, time, warnings
from osprey.progress import Progress, say
warnings.warn("a path and a line number")
print("pid", os.getpid(), file=sys.stderr)
say(f"kernel {os.getpid()}")
progress = Progress("work", 3, every=0)
for _ in range(3):
    progress.advance()"""
RESULT = """import matplotlib.pyplot as plt
plt.plot([1, 2, word]);
print("result", word)
time.sleep(float(open('pause').read()))  # the kernel sends what is printed at its own times
print("later")
word + 1"""


@pytest.fixture
def papermill(tmp_path):
    """papermill(cells, ...) → the finished process and the path of its output notebook."""
    shutil.copytree(ROOT / "osprey", tmp_path / "osprey", ignore=shutil.ignore_patterns("__pycache__"))

    def run(cells: list[str], *arguments: str):
        kernel = {"name": "python3", "display_name": "python3", "language": "python"}
        notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
        notebook.cells = [nbformat.v4.new_code_cell(cell, id=f"cell-{index}") for index, cell in enumerate(cells)]
        notebook.cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(notebook, tmp_path / "in.ipynb")
        output = tmp_path / "out.ipynb"
        command = [sys.executable, "-m", "papermill", "--engine", "osprey", "in.ipynb", output.name, *arguments]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True), output

    return run


def test_equal_runs_give_equal_bytes(papermill, tmp_path):
    contents = []
    for pause in ("0", "0.6"):
        (tmp_path / "pause").write_text(pause)
        done, output = papermill(["word = 1", CHATTY, RESULT], "-p", "word", "7")
        assert done.returncode == 0, done.stderr
        contents.append(output.read_bytes())
    assert contents[0] == contents[1]

    cells = json.loads(contents[0])["cells"]
    assert [cell["id"] for cell in cells] == ["cell-0", "injected-parameters", "cell-1", "cell-2"]
    kinds = [item["output_type"] for cell in cells for item in cell["outputs"]]
    assert sorted(kinds) == ["display_data", "execute_result", "stream"]  # results stay, figures too
    assert "".join(cells[-1]["outputs"][0]["text"]) == "result 7\nlater\n"

    assert done.stderr.count("  kernel ") == 1
    assert re.findall(r"^  work: (\d/\d), .* min left$", done.stderr, re.MULTILINE) == ["1/3", "2/3", "3/3"]

    timing = json.loads((tmp_path / "results/timings/out.json").read_text())
    assert timing["stage"] == "out" and 0 < timing["seconds"] < 600 and 0 < timing["peak_gib"] < 64


def test_a_user_error_is_one_line_and_leaves_no_notebook(papermill, tmp_path):
    mistake = 'from osprey.params import UserError\nraise UserError("targets.tiny: no such target; name another")'
    done, output = papermill(["word = 1", mistake, "print('never')"])
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "osprey: targets.tiny: no such target; name another"
    assert "UserError" not in done.stderr + done.stdout  # no traceback of it (the kernel's sockets may log their own)
    assert not output.exists() and not (tmp_path / "results").exists()


def test_any_other_error_is_shown_whole(papermill):
    done, output = papermill(["word = 1", "def inner():\n    return 1 / 0\ninner()"])
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr and "Traceback" in done.stderr and "inner()" in done.stderr
