"""A stage that is killed continues, and one that runs twice gives the same bytes.

Resume state lives outside the outputs, which DVC deletes before it runs a stage.
"""

import ctypes
import hashlib
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from osprey import params

KEPT = params.ROOT / "data" / ".resume"


def digest(name: str, key: str | None) -> str:
    """A hash of all that the stage's result depends on: its parameters and the bytes of its dependencies."""
    total = hashlib.sha256(repr(params.for_stage(name, key)).encode())
    for dependency in sorted(params.stage(name, key)["deps"]):
        path = params.ROOT / dependency
        if not path.exists():
            raise params.UserError(f"{dependency}: no such file; make it with dvc repro")
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            if "__pycache__" not in file.parts:
                total.update(str(file.relative_to(params.ROOT)).encode())
                with open(file, "rb") as handle:
                    total.update(hashlib.file_digest(handle, "sha256").digest())
    return total.hexdigest()[:16]


@contextmanager
def folder(name: str, key: str | None = None):
    """The stage's resume folder for exactly these inputs; removed when the block ends well."""
    stem = f"{name}-{key}" if key else name
    path, gone = KEPT / f"{stem}-{digest(name, key)}", KEPT / f"{stem}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    for other in KEPT.glob(f"{stem}-{'[0-9a-f]' * 16}"):
        if other != path:  # of inputs that are no longer these
            discard(other, gone)
    path.mkdir(parents=True, exist_ok=True)
    yield path
    discard(path, gone)


def discard(path: Path, gone: Path) -> None:
    """Remove a resume folder, out of sight first: a half of it, left by a kill, would pass for a whole one."""
    path.rename(gone)
    shutil.rmtree(gone)


def settle(threads: int, seed: int) -> None:
    """Make what follows repeatable on this machine, and its memory cheap."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Stop glibc from returning every large buffer to the system: the page faults of fetching it again cost more
    than the arithmetic (a chunked-loss step at vocabulary 49,152 runs 2.3 times faster without them)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large buffer
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
