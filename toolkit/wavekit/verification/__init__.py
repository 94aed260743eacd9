"""Whether a bundle can be trusted: what ``wavekit verify`` checks, and how it tells what is wrong.

Modules here know engines, texts and numbers. What needs torch or a checkpoint's weights is in `against_checkpoint`,
which is imported only where a checkpoint was given.
"""
