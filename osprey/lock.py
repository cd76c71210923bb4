"""One at a time: locks that the kernel drops when their holder dies, however it dies."""

import fcntl
from contextlib import contextmanager

from osprey.params import ROOT, UserError


@contextmanager
def alone(name: str, what: str):
    """Hold the lock `name` of this folder; gives the file, for a child process to hold it too.

    Raises UserError when another process has it.
    """
    folder = ROOT / ".dvc" / "tmp"  # ignored by git and DVC
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"osprey-{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{what} is already running in {ROOT}: wait for it or stop it, then run again") from None
        yield file
