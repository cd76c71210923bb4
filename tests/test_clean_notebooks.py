"""`make clean-notebooks` undoes what JupyterLab does to a notebook that was run and saved; a dirty one is found."""

import copy
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output
from walk import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LANGUAGE = {
    "codemirror_mode": {"name": "ipython", "version": 3}, "file_extension": ".py", "mimetype": "text/x-python",
    "name": "python", "nbconvert_exporter": "python", "pygments_lexer": "ipython3", "version": "3.11.7",
}  # fmt: skip
OUTPUTS = [
    new_output("stream", name="stdout", text="printed\n"),
    new_output("stream", name="stderr", text="Loading weights: 100%|██████████| 20/20\n"),
    new_output("display_data", data={"image/png": "aGVsbG8=", "text/plain": "<Figure>"}),
    new_output("execute_result", data={"text/html": "<table></table>", "text/plain": "a table"}, execution_count=1),
    new_output("error", ename="KeyError", evalue="'x'", traceback=["\x1b[31mKeyError\x1b[39m: 'x'"]),
]


def saved_in_lab(notebook, path: Path, kernel: str) -> None:
    """Write it as JupyterLab 4 does once it has run, its cells timed, one output folded away."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata.language_info = LANGUAGE
    notebook.metadata.kernelspec.display_name = kernel
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}, "version_major": 2}}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
        cell.outputs = copy.deepcopy(OUTPUTS)
        cell.metadata.execution = {"iopub.status.busy": "2026-01-01T00:00:00.000000Z"}
    cells[-1].metadata |= {"collapsed": True, "scrolled": True}
    nbformat.write(notebook, path, version=nbformat.NO_CONVERT)  # what the server behind JupyterLab calls


@pytest.mark.parametrize("kernel", ["Python 3 (ipykernel)", "Python 3.13 [conda env:osprey]"])
def test_saved_notebooks_come_back_byte_for_byte(tmp_path, kernel):
    """Should one in notebooks/ be dirty itself, it is named here: `make clean-notebooks` makes it clean."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "notebooks").mkdir()
    for path in NOTEBOOKS:
        saved_in_lab(nbformat.read(path, nbformat.NO_CONVERT), tmp_path / "notebooks" / path.name, kernel)
        assert (tmp_path / "notebooks" / path.name).read_bytes() != path.read_bytes()
    environment = ["--assume-old=.venv/ready", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(["make", "--silent", *environment, "clean-notebooks"], cwd=tmp_path, check=True)
    assert sorted(path.name for path in (tmp_path / "notebooks").iterdir()) == [path.name for path in NOTEBOOKS]
    assert [p.name for p in NOTEBOOKS if p.read_bytes() != (tmp_path / "notebooks" / p.name).read_bytes()] == []
