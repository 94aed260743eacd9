"""Statistics of a model's layers, choice of boundaries, and training of drafts and exits.

The middle floor: it may import ``wavekit_engines``, never ``wavekit``. The text it learns from comes through a writer
that the caller hands in.
"""
