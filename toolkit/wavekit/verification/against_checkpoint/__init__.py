"""A bundle beside the checkpoint it was made from: what differs, where it begins, and what explains it.

The reference is transformers in float32. What needs torch, onnx-ir or the calibration package is here and nowhere else
in `wavekit.verification`; only `commands.verify` imports it, and only where a checkpoint was given.
"""
