"""torch as a backend: the same decoder, written a second time.

The graphs of a bundle are not interpreted. What is computed is written here in torch from `DecoderSpec`, `DraftSpec`
and `ExitSpec`, and only the weights are read from the bundle's files. That is shorter than an interpreter of a dozen
operators, three of them fused ones of ONNX Runtime's, runs without a hundred small reshapes, and is of more use as a
reference: a graph with a norm in the wrong place disagrees with it, while an interpreter would repeat the mistake.

Any torch device runs it; on the CPU it is a reference, not a fast engine. Nothing else in this package imports torch,
and this is imported only where it is asked for.
"""

from wavekit_engines.torch_engine.engine import TorchEngine, TorchEngines

__all__ = ["TorchEngine", "TorchEngines"]
