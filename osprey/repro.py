"""`make repro`: check params.yaml, say what will run, run `dvc repro`, say where the results are."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from osprey import plan, readme
from osprey.lock import alone
from osprey.params import ROOT, UserError, load

NOTES = ROOT / ".dvc" / "tmp" / "rwlock"  # where DVC writes down which of its processes is at work on what
RESULTS = {
    "figure": "results/figures/figure2.png",
    "tables": "results/tables/",
    "executed notebooks": "results/notebooks/",
    "index of every number": "results/INDEX.md",
}


def main():
    try:
        params = load()
        with alone("repro", "make repro") as held:
            refuse_other_dvc()
            print(plan.describe(params), flush=True)
            begun = time.monotonic()
            code = dvc_repro(held)
            if not code:
                readme.refresh()
    except UserError as error:
        sys.exit(f"osprey: {error}")
    if code:
        sys.exit(code)
    print(f"\nDone in {(time.monotonic() - begun) / 60:.1f} minutes.")
    for what, where in RESULTS.items():
        print(f"  {what:24}{where}")


def dvc_repro(held) -> int:
    """`dvc repro`, which holds the lock too: should this process be killed alone, it goes on. Returns its status."""
    process = subprocess.Popen([sys.executable, "-m", "dvc", "repro"], cwd=ROOT, pass_fds=[held.fileno()])
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal has told dvc and the stage as well: let them end in order
        process.wait()
        raise UserError("stopped; run it again and it continues") from None


def refuse_other_dvc() -> None:
    """Raises UserError when a `dvc` started by hand is at work here, in fewer words than DVC's.

    What a killed dvc has noted down, DVC forgets by itself, unless another program has its process number by now:
    then the notes are nobody's and go.
    """
    if not NOTES.exists() or not Path("/proc/self").exists():  # where there is no /proc, DVC's words must do
        return
    try:
        notes = json.loads(NOTES.read_text())
    except json.JSONDecodeError:
        raise UserError(
            f"{NOTES} was cut short by a kill: if no other dvc runs here, delete it and run again"
        ) from None
    found = [*notes.get("write", {}).values(), *itertools.chain(*notes.get("read", {}).values())]
    for number in sorted({note["pid"] for note in found}):
        if is_dvc(number):
            raise UserError(f"dvc (process {number}) is at work in {ROOT}: wait for it or stop it, then run again")
    NOTES.unlink()


def is_dvc(number: int) -> bool:
    try:
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(os.path.basename(word) == b"dvc" for word in words)


if __name__ == "__main__":
    main()
