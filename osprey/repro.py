"""`make repro`: check params.yaml, say what will run, run `dvc repro`, say where the results are."""

import subprocess
import sys
import time

from osprey import plan
from osprey.params import ROOT, UserError, load

RESULTS = {
    "figure": "results/figures/figure2.png",
    "tables": "results/tables/",
    "executed notebooks": "results/notebooks/",
    "index of every number": "results/INDEX.md",
}


def main():
    try:
        params = load()
    except UserError as error:
        sys.exit(f"osprey: {error}")
    print(plan.describe(params), flush=True)
    begun = time.monotonic()
    code = subprocess.call([sys.executable, "-m", "dvc", "repro"], cwd=ROOT)
    if code:
        sys.exit(code)
    print(f"\nDone in {(time.monotonic() - begun) / 60:.1f} minutes.")
    for what, where in RESULTS.items():
        print(f"  {what:24}{where}")


if __name__ == "__main__":
    main()
