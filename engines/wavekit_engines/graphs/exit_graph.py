"""An early exit as one graph: the adapter on its own path, the target's final norm and head, the best tokens.

The arithmetic is that of `exit_spec`; n rows, k tokens each. n is at least 1, as for a draft's graph.

================  ===============  =======================================================================
``hidden``        float [n, H]     rows of the residual stream at the exit's boundary
``top_tokens``    int64 [n, k]     output: the best tokens, best first, as the target numbers them
``top_logprobs``  float32 [n, k]   output: their log-probabilities over the exit vocabulary
================  ===============  =======================================================================

All exits of a bundle score with the same rows of the head. They are stored once, and not at all where they are the
bundle's own table in the bundle's own format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.exit_spec import Exits, ExitSpec
from wavekit_engines.graphs.decoder_layer import rms_norm
from wavekit_engines.graphs.graph_writer import MICROSOFT, GraphWriter, WeightFile
from wavekit_engines.graphs.linear import ArrayRows, WeightFormat, add_matrix, add_vector, multiply
from wavekit_engines.graphs.stage_graph import FINAL_NORM, best, head_table, scores
from wavekit_engines.graphs.stored_table import StoredTable

_HEAD, _TARGET_IDS = "exits.head", "exits.target_ids"


@dataclass(frozen=True)
class BundleVocabulary:
    """The target's final norm and head as they lie in a bundle: tensors by name, and the head's format."""

    tensors: Mapping[str, ir.ExternalTensor]
    form: WeightFormat


def shares_head(spec: ExitSpec, form: WeightFormat, vocabulary_form: WeightFormat) -> bool:
    """Whether exits of this format score with the bundle's own table."""
    return spec.exit_vocab_size == spec.vocab_size and form == vocabulary_form


def write_exit_weights(
    file: WeightFile, exits: Exits, target: DecoderSpec, vocabulary: BundleVocabulary, form: WeightFormat
) -> None:
    """Store the adapters of all exits, and the rows of the head that they score, with the ids of those."""
    for role in exits.spec.weight_shapes():
        rows, name = ArrayRows(exits.weights[role]), _named(role)
        if len(rows.shape) == 2:
            add_matrix(file, name, rows, form)
        else:
            add_vector(file, name, rows, form.compute_dtype)
    if not shares_head(exits.spec, form, vocabulary.form):
        width = target.hidden_size
        StoredTable(vocabulary.tensors, head_table(target), vocabulary.form, width, exits.token_ids).store(
            file, _HEAD, form
        )
    if exits.spec.exit_vocab_size < exits.spec.vocab_size:
        file.add(_TARGET_IDS, "int64", exits.token_ids.shape, [exits.token_ids])


def write_exit_graph(
    path: Path,
    boundary: int,
    spec: ExitSpec,
    target: DecoderSpec,
    weights: tuple[WeightFile, BundleVocabulary],
    form: WeightFormat,
    top_k: int,
) -> None:
    """Write the graph of the exit at ``boundary``; the weights of all exits are in ``weights[0]`` already."""
    own, vocabulary = weights
    graph = GraphWriter(path.stem, own, vocabulary.tensors)
    x = graph.input("hidden", form.compute_dtype, ("n", spec.hidden_size))
    if spec.rank:
        x = graph.op("Add", x, _adapter(graph, x, str(boundary), spec, form))
    x = rms_norm(graph, x, FINAL_NORM, target.norm_eps)
    table = head_table(target) if shares_head(spec, form, vocabulary.form) else _HEAD
    tokens, logprobs = best(graph, scores(graph, x, table, spec.exit_vocab_size, target, form), top_k)
    if spec.exit_vocab_size < spec.vocab_size:
        tokens = graph.op("Gather", graph.stored(_TARGET_IDS), tokens, axis=0)
    graph.output("top_tokens", tokens, "int64", ("n", top_k))
    graph.output("top_logprobs", logprobs, "float32", ("n", top_k))
    graph.save(path, {"wavekit.exit": str(boundary)})


def _named(role: str) -> str:
    return f"exits.{role}"


def _adapter(graph: GraphWriter, x: ir.Value, boundary: str, spec: ExitSpec, form: WeightFormat) -> ir.Value:
    """What the adapter adds to rows ``x`` [n, H]."""
    names = {part: _named(f"{boundary}.{part}") for part in ("norm", "A", "B")}
    normed = rms_norm(graph, x, names["norm"], spec.norm_eps)
    inner = multiply(graph, normed, names["A"], (spec.rank, spec.hidden_size), form)
    inner = graph.op("QuickGelu", inner, domain=MICROSOFT, alpha=1.0)  # x * sigmoid(x)
    return multiply(graph, inner, names["B"], (spec.hidden_size, spec.rank), form)
