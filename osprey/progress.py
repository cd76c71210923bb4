"""Progress lines that reach the terminal but never an executed notebook, which must not depend on time."""

import os
import time


def say(line: str) -> None:
    """Print a line where the person is looking: the terminal behind papermill, else the notebook itself."""
    path = os.environ.get("OSPREY_PROGRESS")
    if path is None:
        print(line, flush=True)
        return
    with open(path, "a") as file:
        file.write(line + "\n")


class Progress:
    """Says `what: done/total, per second, time left` at most every `every` seconds."""

    def __init__(self, what: str, total: int, done: int = 0, every: float = 10.0):
        self.what, self.total, self.done, self.every = what, total, done, every
        self.begun, self.begun_at, self.said = time.monotonic(), done, time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said < self.every and self.done < self.total:
            return
        self.said = now
        rate = (self.done - self.begun_at) / max(now - self.begun, 1e-9)
        left = (self.total - self.done) / max(rate, 1e-9)
        say(f"{self.what}: {self.done}/{self.total}, {rate:.3g}/s, {left / 60:.1f} min left{note and ', ' + note}")
