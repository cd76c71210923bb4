"""The real dvc.yaml and notebooks with the smoke preset, in a temporary clone with an install of its own.

The clone holds the working tree (tracked and new files), so that what is tested is what would be committed.
"""

import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
import venv

import pandas as pd
import pytest
from walk import ROOT

from osprey import params


class Clone:
    def __init__(self, folder):
        self.folder, self.bin = folder, folder / ".venv" / "bin"
        # the kernel takes its interpreter from PATH
        self.environment = os.environ | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
        self.environment.pop("PYTHONPATH", None)

    def run(self, *command, check=True):
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def dvc(self, *arguments, check=True):
        return self.run(self.bin / "python", "-m", "dvc", *arguments, check=check)

    def killed(self, command, at: str, log) -> str:
        """Start a command and kill it with all of its process group as soon as a file matches `at`; returns its words.

        Jupyter puts the kernel into a group of its own; it sees within a second that papermill has gone, and ends.
        """
        with open(log, "w") as words:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=words, stderr=words, start_new_session=True
            )
            try:
                while not list(self.folder.glob(at)):
                    assert process.poll() is None, log.read_text()[-3000:]
                    time.sleep(0.02)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return log.read_text()

    def bytes(self):
        """Every file that the pipeline made, but for timings."""
        made = {"dvc.lock": (self.folder / "dvc.lock").read_bytes()}
        for top in ("data", "results"):
            for file in sorted((self.folder / top).rglob("*")):
                inside = file.relative_to(self.folder)
                if file.is_file() and inside.parts[:2] not in (("results", "timings"), ("data", ".packages")):
                    made[str(inside)] = file.read_bytes()
        return made


def make_clone(origin, folder) -> Clone:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=origin, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (origin / name).is_file() and not name.startswith("results/") and name != "dvc.lock":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin / name, folder / name)
    shutil.copy(folder / "presets/smoke.yaml", folder / "params.yaml")
    # an environment of its own that borrows the libraries: only osprey is installed into it
    venv.create(folder / ".venv")
    borrowed = sysconfig.get_path("purelib")
    site = next((folder / ".venv/lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
    clone = Clone(folder)
    clone.run(clone.bin / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ".")
    clone.run("git", "init", "--quiet")
    clone.run("git", "add", "--all")
    clone.run("git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "-m", "clone")
    return clone


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    clone = make_clone(ROOT, tmp_path_factory.mktemp("clone"))
    begun = time.monotonic()
    clone.dvc("repro")
    print(f"smoke dvc repro: {time.monotonic() - begun:.0f} s")
    clone.unbroken = clone.bytes()
    return clone


def test_the_clone_runs_its_own_install(clone):
    command = "import osprey, os; os.chdir('/'); print(osprey.__file__)"
    done = subprocess.run(
        [clone.bin / "python", "-c", command], cwd="/", env=clone.environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(clone.folder / "osprey/__init__.py")


def test_every_stage_left_an_executed_notebook_and_no_debris(clone):
    made = {path.stem for path in (clone.folder / "results/notebooks").glob("*.ipynb")}
    grid = params.load(clone.folder / "params.yaml")
    expected = {"corpus", "prune", "pretrain", "paper"} | {f"models-{name}" for name in grid.models}
    expected |= {f"{stage}-{name}" for stage in ("rollouts", "agreement") for name in grid.targets}
    expected |= {f"distill-{name}" for name in grid.runs}
    expected |= {f"{stage}-{name}" for stage in ("convert", "evaluate") for name in grid.drafters}
    assert made == expected
    assert not list((clone.folder / "data/.resume").glob("*"))
    assert not [path for path in (clone.folder / "data").rglob(".*") if path.name not in (".gitignore", ".resume")]
    for path in (clone.folder / "results/notebooks").glob("*.ipynb"):
        outputs = [out for cell in json.loads(path.read_text())["cells"] for out in cell.get("outputs", [])]
        assert outputs and not [out for out in outputs if out["output_type"] == "error"], path.name


def test_killed_twice_in_another_folder_it_ends_in_the_same_bytes(clone, tmp_path):
    """Executed notebooks and dvc.lock too: nothing depends on the folder, on the time or on how often it was begun."""
    other = make_clone(clone.folder, tmp_path / "a folder with a longer name")
    repro, log = [other.bin / "python", "-m", "dvc", "repro"], tmp_path / "log"
    other.killed(repro, "data/.resume/pretrain-*/trainer/checkpoint-*/trainer_state.json", log)
    assert not (other.folder / "data/pretrained").exists()
    assert "pretrain: continues from checkpoint-" in other.killed(repro, "data/.resume/distill-*/trainer", log)
    assert not list((other.folder / "data/drafters").rglob("*.safetensors"))
    other.run(other.bin / "python", "-m", "osprey.repro")
    made = other.bytes()
    assert made.keys() == clone.unbroken.keys()
    assert [name for name in made if made[name] != clone.unbroken[name]] == []


def test_the_figure_is_computed_from_the_ledger(clone):
    """Cells of the reported table against means taken here from the evaluate stage's rows."""
    table = pd.read_csv(clone.folder / "results/tables/figure2.csv")
    for recipe in ("osprey", "eagle3-1l"):
        ledger = pd.read_csv(clone.folder / f"data/evaluations/tiny-{recipe}.csv", keep_default_na=False)
        measured = ledger[ledger.verifications > 0]
        al = (measured.tokens - 1) / measured.verifications
        means = al.groupby([measured.adaptation, measured.evaluation]).mean()
        rows = table[table.recipe == recipe]
        assert len(rows) == len(means) == 3 * 2  # two adaptation domains and undistilled, two evaluation domains
        for row in rows.itertuples():
            assert row.al == pytest.approx(means[row.adaptation, row.evaluation], abs=1e-3)


def test_a_second_repro_does_nothing(clone):
    begun = time.monotonic()
    done = clone.dvc("repro")
    print(f"no-op dvc repro: {time.monotonic() - begun:.1f} s")
    assert "Data and pipelines are up to date." in done.stdout + done.stderr
    assert "Running stage" not in done.stdout


def test_damaged_outputs_are_noticed_and_made_good(clone):
    before = clone.bytes()
    shard = clone.folder / "data/corpus/train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1  # of the same size
    shard.write_bytes(content)
    drafter = clone.folder / "data/drafters/tiny/osprey/tiny-osprey-math/model.safetensors"
    drafter.write_bytes(drafter.read_bytes()[:1000])
    clone.dvc("repro")
    after = clone.bytes()
    assert [name for name in before if before[name] != after[name]] == []


def test_changing_a_plot_reruns_only_the_report(clone):
    path = clone.folder / "osprey/figures.py"
    as_it_was = path.read_text()
    path.write_text(as_it_was + "\n# another colour\n")
    done = clone.dvc("repro", "--dry")
    path.write_text(as_it_was)
    assert [line for line in done.stdout.splitlines() if line.startswith("Running stage")] == ["Running stage 'paper':"]


def test_a_stage_run_again_gives_the_same_bytes(clone):
    before = clone.bytes()
    clone.dvc("repro", "--force", "--single-item", "distill@tiny-osprey-math")
    clone.dvc("repro", "--force", "--single-item", "paper")
    after = clone.bytes()
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []


def test_a_mistake_is_one_line_and_nothing_half_written(clone):
    path = clone.folder / "params.yaml"
    good = path.read_text()
    path.write_text(good.replace("layers: 2}\n\ncorpus", "layers: 9}\n\ncorpus"))
    done = clone.dvc("repro", "prune", check=False)
    path.write_text(good)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("osprey: ")]
    assert done.returncode and lines == ["osprey: source.layers: 9 blocks asked for, the source has 8"]
    assert "Traceback" not in done.stdout + done.stderr
    assert not (clone.folder / "data/pruned").exists() and not (clone.folder / "data/notebooks/prune.ipynb").exists()
