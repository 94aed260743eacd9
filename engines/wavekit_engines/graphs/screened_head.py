"""The head for greedy choice: the best token of a row without its logits, or the word that only the logits can tell.

All V logits are approximated from an 8-bit copy of the table (`screening`), which is a quarter of the bytes to read.
What decides is float32: the ``CANDIDATES`` tokens with the highest upper bounds get their exact logits, from the rows
of the table itself. A token is put out only if its logit is above that of every other candidate and above the upper
bounds of all that are not, by more than float32 sums can be off in any order. So it is what an argmax over the logits
of the full head finds, on any machine and for any number of rows; otherwise the row's token is ``UNCERTAIN``.

==========  =============  ===============================================
``hidden``  float [n, H]   rows of the last boundary
``tokens``  int64 [n]      output: the best token, or -1: run the full head
==========  =============  ===============================================
"""

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.graphs.decoder_layer import rms_norm
from wavekit_engines.graphs.graph_writer import GraphWriter, WeightFile
from wavekit_engines.graphs.linear import WeightFormat
from wavekit_engines.graphs.stage_graph import FINAL_NORM, head_table
from wavekit_engines.screening import COARSENESS, DIGIT, RESIDUE, STEPS, Screen
from wavekit_engines.weights import DecoderWeights

CANDIDATES = 32
UNCERTAIN = -1
LEAST_WEIGHTS = 1 << 22
"""Smaller tables stay in the cache between tokens: there is nothing to save."""

_ZERO_POINT = 64
_SMALLEST = 1e-12  # in place of the size of a row that is all zeros
_LARGEST = 1e30  # numbers below it multiply and add up without overflow


def can_screen(spec: DecoderSpec, form: WeightFormat) -> bool:
    """Whether a head of this shape and form has a screened version.

    A soft cap may make equal what the logits before it tell apart, and beside weights that are quantized anyway there
    is nothing to save.
    """
    monotone = spec.logit_softcap is None and spec.logit_scale > 0
    large = spec.vocab_size > CANDIDATES and spec.vocab_size * spec.hidden_size >= LEAST_WEIGHTS
    return form.precision == "fp32" and monotone and large


def screen_bytes(spec: DecoderSpec) -> int:
    """What the copy of the table takes in a bundle, about."""
    return spec.vocab_size * (spec.hidden_size + 12)


def write_screen(file: WeightFile, spec: DecoderSpec, weights: DecoderWeights) -> bool:
    """Store the copy of the table and its bounds; False if they are of no use, because float32 cannot hold them."""
    screen, table = Screen(weights["head"]), weights["head"].shape
    file.add("screen.values", "int8", table, screen.values())
    gain = np.abs(weights["final_norm"].read() * screen.inverse).max()
    for name in ("scales", "errors", "noise", "mean", "inverse"):
        array = getattr(screen, name)
        file.add(f"screen.{name}", "float32", array.shape, [array])
    return screen.largest * float(gain) * spec.hidden_size < _LARGEST  # a normed row is at most sqrt(H) long


def write_screened_head(path: Path, spec: DecoderSpec, screen: WeightFile, vocabulary: WeightFile) -> None:
    """Write the graph; the table and the final norm are in ``vocabulary``, the rest in ``screen`` already."""
    graph = _Writer(path.stem, screen, vocabulary)
    hidden = graph.input("hidden", "float32", ("n", spec.hidden_size))
    x = rms_norm(graph, hidden, FINAL_NORM, spec.norm_eps)
    y = graph.op("Mul", x, graph.stored("screen.inverse"))
    length = graph.op("Max", graph.row_wise("ReduceL2", y), graph.number(_SMALLEST))
    largest = graph.op("Max", graph.row_wise("ReduceMax", graph.op("Abs", y)), graph.number(_SMALLEST))
    unit = graph.op("Mul", largest, graph.number(1 / STEPS))
    residue = graph.op("Mul", largest, graph.number(COARSENESS * RESIDUE * math.sqrt(spec.hidden_size) / STEPS))
    radius = graph.op("Div", graph.op("Add", length, residue), unit)
    bounds = graph.op("Add", _approximate(graph, y, largest), graph.op("Mul", radius, graph.stored("screen.errors")))
    highest, tokens = graph.ops("TopK", bounds, graph.whole(CANDIDATES), outputs=2, axis=1)
    last = graph.op("Slice", highest, graph.whole(-1), graph.whole(CANDIDATES), graph.whole(1))
    shift = graph.op("MatMul", y, graph.op("Unsqueeze", graph.stored("screen.mean"), graph.whole(1)))
    outside = graph.op("Add", graph.op("Mul", last, unit), shift)
    noise = graph.op("Mul", graph.op("Gather", graph.stored("screen.noise"), tokens), length)
    best = _certified(graph, tokens, _exact(graph, x, tokens, spec), noise, outside)
    graph.output("tokens", graph.op("Squeeze", best, graph.whole(1)), "int64", ("n",))
    graph.save(path, {"wavekit.screened_head": "1"})


class _Writer(GraphWriter):
    """With the constants and reductions that a row-wise calculation is full of."""

    def number(self, value: float) -> ir.Value:
        return self.constant(f"number.{value!r}", np.array(value, np.float32))

    def whole(self, value: int) -> ir.Value:
        return self.constant(f"whole.{value}", np.array([value], np.int64))

    def row_wise(self, op_type: str, x: ir.Value) -> ir.Value:
        """A reduction of rows [n, K] to [n, 1]."""
        return self.op(op_type, x, self.whole(1), keepdims=1)


def _approximate(graph: _Writer, y: ir.Value, largest: ir.Value) -> ir.Value:
    """Centred logits [n, V] of rows y [n, H] in units of ``largest`` / STEPS, both of y's digits in one product."""
    whole = graph.op("Round", graph.op("Mul", y, graph.op("Div", graph.number(STEPS), largest)))
    high = graph.op("Round", graph.op("Mul", whole, graph.number(1 / DIGIT)))
    low = graph.op("Sub", whole, graph.op("Mul", high, graph.number(DIGIT)))
    digits = graph.op("Add", graph.op("Concat", high, low, axis=0), graph.number(_ZERO_POINT))
    digits = graph.op("Cast", digits, to=int(ir.DataType.UINT8))
    zero_point = graph.constant("zero_point", np.array(_ZERO_POINT, np.uint8))
    table = graph.op("Transpose", graph.stored("screen.values"), perm=[1, 0])  # done once, when the graph is opened
    products = graph.op("MatMulInteger", digits, table, zero_point)
    products = graph.op("Cast", products, to=int(ir.DataType.FLOAT))
    highs, lows = graph.ops("Split", products, outputs=2, axis=0, num_outputs=2)
    sums = graph.op("Add", graph.op("Mul", highs, graph.number(DIGIT)), lows)
    return graph.op("Mul", sums, graph.stored("screen.scales"))


def _exact(graph: _Writer, x: ir.Value, tokens: ir.Value, spec: DecoderSpec) -> ir.Value:
    """Logits [n, k] of the tokens [n, k] of rows x [n, H], before the logit scale."""
    rows = graph.op("Gather", graph.stored(head_table(spec)), tokens)
    return graph.op("Squeeze", graph.op("MatMul", rows, graph.op("Unsqueeze", x, graph.whole(2))), graph.whole(2))


def _certified(graph: _Writer, tokens: ir.Value, exact: ir.Value, noise: ir.Value, outside: ir.Value) -> ir.Value:
    """The token [n, 1] that is above all others for certain, or UNCERTAIN; comparisons with NaN are false."""
    least, most = graph.op("Sub", exact, noise), graph.op("Add", exact, noise)
    lead = graph.row_wise("ReduceMax", least)
    reaching = graph.op("Cast", graph.op("GreaterOrEqual", most, lead), to=int(ir.DataType.INT64))
    alone = graph.op("Equal", graph.row_wise("ReduceSum", reaching), graph.whole(1))
    certain = graph.op("And", alone, graph.op("Less", outside, lead))
    best = graph.op("GatherElements", tokens, graph.op("ArgMax", least, axis=1, keepdims=1), axis=1)
    return graph.op("Where", certain, best, graph.whole(UNCERTAIN))
