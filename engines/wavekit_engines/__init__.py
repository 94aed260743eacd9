"""Decoder description, weights, ONNX graphs, bundles and engine backends: the lowest floor, it imports nothing of ours.

Import the modules themselves; this file stays empty so that opening a bundle never loads what only an export needs.
"""
