"""Osprey: target-agnostic pre-training makes stronger drafters in speculative decoding."""

import os

# Read by libgomp when torch loads it. Threads that spin at every barrier until the others come slow a busy machine
# tenfold, threads that sleep at once slow the many small steps of a quiet one by a third: spin briefly, then sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
