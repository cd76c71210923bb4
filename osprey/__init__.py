"""Osprey: target-agnostic pre-training makes stronger drafters in speculative decoding."""
