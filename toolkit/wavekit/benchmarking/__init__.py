"""Measuring how fast a bundle writes: modes side by side, peers beside them, and what the numbers are worth."""
