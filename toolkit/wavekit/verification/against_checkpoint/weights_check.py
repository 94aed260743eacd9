"""Every weight that a bundle stores against the checkpoint's, and its description against the configuration."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from wavekit.verification.against_checkpoint.stored import StoredWeights, Weight, difference
from wavekit.verification.findings import Check
from wavekit.verification.lossless import Told
from wavekit_engines.bundle import EngineInfo, Manifest
from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.weights import DecoderWeights

_SHOWN = 2
HEAD, EMBEDDING, FINAL_NORM = "head", "embedding", "final_norm"


def check_description(manifest: Manifest, expected: DecoderSpec, checkpoint: Checkpoint) -> Check:
    """What the manifest says of the decoder, and of where its texts end."""
    ours, wrong = manifest.decoder, list[str]()
    for field in fields(DecoderSpec):
        found, said = getattr(ours, field.name), getattr(expected, field.name)
        if found != said:
            wrong.append(_told(field.name, found, said))
    given = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ends = tuple(given) if isinstance(given, list) else () if given is None else (given,)
    if set(ends) != {*manifest.generation.stop_token_ids}:
        found_ends = list(manifest.generation.stop_token_ids)
        wrong.append(f"texts end at the tokens {found_ends}, the checkpoint says {list(ends)}")
    if wrong:
        return Check("checkpoint", "description", "FAIL", "; ".join(wrong))
    return Check("checkpoint", "description", "pass", "family, sizes, norms, rope and windows are the configuration's")


def _told(name: str, found: Any, said: Any) -> str:
    if name == "ropes":
        return "rotary base: the bundle's rotary frequencies are not those of the checkpoint's configuration"
    if name == "layers":
        pairs = zip(found, said, strict=False)
        layer = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(found), len(said)))
        window = found[layer].window != said[layer].window if layer < len(found) and layer < len(said) else False
        kind = f"the sliding window is {found[layer].window}, not {said[layer].window}" if window else "another kind"
        return f"layer {layer}: {kind}"
    return f"{name} is {found!r}, the checkpoint's is {said!r}"


def check_stored(folder: Path, manifest: Manifest, weights: DecoderWeights, told: Told) -> tuple[Check, dict[str, str]]:
    """All weights of layers, embedding, head and final norm; also what is wrong with each, by its name."""
    graphs = list(_by_graph(folder, manifest, weights))
    wrong, count, total = dict[str, str](), 0, sum(len(listed) for _, listed in graphs)
    for file, listed in graphs:
        stored = StoredWeights(file)
        for weight in listed:
            told("comparing weights", count, total)
            found = difference(stored, weight, manifest.engine.block_size)
            count += 1
            if found is not None:
                wrong[weight.name] = found
    if wrong:
        lines = [f"{_readable(name)} {what}" for name, what in list(wrong.items())[:_SHOWN]]
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return Check("checkpoint", "stored weights", "FAIL", "; ".join(lines) + more), wrong
    return Check("checkpoint", "stored weights", "pass", f"{count} weights are the checkpoint's, to their rounding"), {}


def _by_graph(folder: Path, manifest: Manifest, weights: DecoderWeights) -> Iterator[tuple[Path, list[Weight]]]:
    spec, engine = weights.spec, manifest.engine
    for number, stage in enumerate(manifest.stages):
        listed = [_embedding(weights, engine)] if number == 0 else []
        listed += [
            Weight(f"layers.{layer}.{role}", weights.layer(layer, role), engine.precision)
            for layer in range(stage.first, min(stage.last, spec.num_layers))
            for role in weights.layer_roles()
        ]
        yield folder / stage.graph.file, listed
    table = EMBEDDING if spec.tied_head else HEAD
    yield (
        folder / manifest.head.file,
        [
            Weight(table, weights[HEAD], engine.head_precision, table=True),
            Weight(FINAL_NORM, weights[FINAL_NORM], engine.head_precision),
        ],
    )


def _embedding(weights: DecoderWeights, engine: EngineInfo) -> Weight:
    return Weight(EMBEDDING, weights[EMBEDDING], engine.head_precision, table=True)


def _readable(name: str) -> str:
    parts = name.split(".")
    return f"layer {parts[1]}'s {parts[2]}" if parts[0] == "layers" else f"the {name.replace('_', ' ')}"
