"""Early exits into a bundle: as part of an export, or later into a bundle that is there already.

Everything but the adapters is read from the bundle itself, its head's graph and weights, so neither way needs the
checkpoint and both store the same numbers.
"""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wavekit_engines.atomic import atomic_update
from wavekit_engines.bundle import (
    GRAPHS,
    MANIFEST,
    EngineInfo,
    ExitsInfo,
    FileInfo,
    Manifest,
    decode_manifest,
    describe_files,
    json_text,
    open_bundle,
)
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_export import digest_of
from wavekit_engines.errors import CheckpointError, MisuseError, WavekitError
from wavekit_engines.exit_spec import Exits
from wavekit_engines.graphs.exit_graph import BundleVocabulary, shares_head, write_exit_graph, write_exit_weights
from wavekit_engines.graphs.graph_info import describe_graph
from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.graphs.linear import WeightFormat
from wavekit_engines.graphs.stored_table import stored_tensors
from wavekit_engines.quantization import PRECISIONS, Precision

EXIT_TOP_K = 8
_OTHER = "-b"  # in the names of exits that replace others, which the bundle needs until the new ones are complete
EXIT_FILES = f"{GRAPHS}/exit"
"""How the names of all files of exits begin."""


@dataclass(frozen=True)
class ExitPlan:
    """Exits as they go into a bundle of this decoder and engine; ``exits`` has none but those."""

    exits: Exits
    target: DecoderSpec
    engine: EngineInfo
    form: WeightFormat
    top_k: int

    @property
    def vocabulary_form(self) -> WeightFormat:
        """How the bundle stores its own head."""
        return WeightFormat(self.engine.head_precision, self.engine.block_size)

    @property
    def needed_bytes(self) -> int:
        """What they take in a bundle, about."""
        spec = self.exits.spec
        weights = sum(math.prod(shape) for shape in spec.weight_shapes().values())
        if not shares_head(spec, self.form, self.vocabulary_form):
            weights += spec.exit_vocab_size * spec.hidden_size
        return int(weights * self.form.stored_bits / 8) + 8 * spec.exit_vocab_size


def plan_exits(
    exits: Exits,
    target: DecoderSpec,
    engine: EngineInfo,
    stage_ends: Sequence[int],
    precision: Precision | None = None,
    top_k: int = EXIT_TOP_K,
) -> ExitPlan:
    """Choose the exits at the ends of stages, and how they are stored.

    Args:
        exits: trained for this decoder, or for one of its shape.
        target: the decoder.
        engine: how it is stored.
        stage_ends: last boundaries of its stages.
        precision: of the adapters and the exits' rows of the head. None: as the target's head, but int8 beside fp32:
            rounding costs the text nothing, exits few right tokens, and reading four times the weights costs time.
        top_k: tokens to score a row, or the whole exit vocabulary where that is smaller.

    Raises:
        MisuseError: exits for another kind of model, none at the end of a stage, or options that no engine has.
        CheckpointError: weights or token ids do not fit the exits' own description.
    """
    exits.check_target(target)
    _check_weights(exits)
    chosen = precision or ("int8" if engine.precision == "fp32" else engine.head_precision)
    if chosen not in PRECISIONS:
        raise MisuseError(f"precision {chosen!r}: choose one of {', '.join(PRECISIONS)}")
    form = WeightFormat(chosen, engine.block_size)
    if form.compute_dtype != engine.compute_dtype:
        raise MisuseError(f"{chosen} exits cannot go with a {engine.precision} target: fp16 goes with fp16 only")
    if top_k < 1:
        raise MisuseError(f"exits that score {top_k} tokens: ask for 1 or more")
    return ExitPlan(_at(exits, stage_ends), target, engine, form, min(top_k, exits.spec.exit_vocab_size))


def write_exit_graphs(folder: Path, head: Path, plan: ExitPlan, command: str, mark: str = "") -> ExitsInfo:
    """Write the graphs and their weights.

    Args:
        folder: where to; beside the bundle's graphs, or where they will be moved from to there.
        head: the graph of the bundle's head.
        plan: what to write.
        command: the command line, for the manifest.
        mark: part of the names of the files.
    """
    exits, form = plan.exits, plan.form
    vocabulary = BundleVocabulary(stored_tensors(head), plan.vocabulary_form)
    adapter = 2 * exits.spec.rank * exits.spec.hidden_size + (exits.spec.hidden_size if exits.spec.rank else 0)
    parameters = adapter + exits.spec.exit_vocab_size * exits.spec.hidden_size
    graphs = []
    with WeightFile(folder / f"exits{mark}.weights") as own:
        write_exit_weights(own, exits, plan.target, vocabulary, form)
        for boundary in exits.spec.boundaries:
            file = folder / f"exit_{boundary}{mark}.onnx"
            write_exit_graph(file, boundary, exits.spec, plan.target, (own, vocabulary), form, plan.top_k)
            graphs.append(describe_graph(file, parameters))
    if own.path.stat().st_size == 0:
        own.path.unlink()
    return ExitsInfo(
        spec=exits.spec,
        graphs=tuple(graphs),
        precision=form.precision,
        top_k=plan.top_k,
        origin=json_text(exits.origin),
        digest=digest_of({**exits.weights, "d2t": exits.d2t}),
        command=json_text(command),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def add_exits(
    path: Path,
    exits: Exits,
    *,
    precision: Precision | None = None,
    top_k: int = EXIT_TOP_K,
    replace: bool = False,
    command: str = "",
) -> Manifest:
    """Add exits to a bundle, at the ends of its stages; it stays as it was until they are complete.

    Args:
        path: the bundle.
        exits: see `plan_exits`, as for ``precision`` and ``top_k``.
        precision: of the exits.
        top_k: tokens to score a row.
        replace: take the place of exits that the bundle has.
        command: the command line, for the manifest.

    Raises:
        MisuseError: as `plan_exits`; no bundle; it has exits and ``replace`` is False; another process changes it.
        BundleError: the bundle is damaged.
        CheckpointError: as `plan_exits`.
        WavekitError: the disk is full.
    """
    old = open_bundle(path).manifest
    if old.exits is not None and not replace:
        raise MisuseError(
            f"{path} has exits already, at {_listed(old.exits.spec.boundaries)}; add --force to replace them"
        )
    ends = [stage.last for stage in old.stages]
    plan = plan_exits(exits, old.decoder, old.engine, ends, precision, top_k)
    with atomic_update(path, MANIFEST, plan.needed_bytes) as folder:
        if decode_manifest((path / MANIFEST).read_bytes(), str(path / MANIFEST)) != old:
            raise WavekitError(f"{path} was changed by another process meanwhile; run this again")
        (folder / GRAPHS).mkdir()
        info = write_exit_graphs(folder / GRAPHS, path / GRAPHS / "head.onnx", plan, command, _free_mark(old.files))
        kept = {name: file for name, file in old.files.items() if not name.startswith(EXIT_FILES)}
        files = dict(sorted({**kept, **describe_files(folder)}.items()))
        manifest = dataclasses.replace(old, exits=info, files=files)
        (folder / MANIFEST).write_bytes(manifest.encode())
    _remove_leftovers(path, manifest)
    return manifest


def _check_weights(exits: Exits) -> None:
    if problem := exits.spec.problem():
        raise CheckpointError(f"these exits cannot be used: {problem}; read or train them again")
    for role, shape in exits.spec.weight_shapes().items():
        if role not in exits.weights or exits.weights[role].shape != shape:
            raise CheckpointError(f"the exits have no weight {role} of shape {list(shape)}: read or train them again")
    ids = exits.token_ids
    if (
        len(ids) != exits.spec.exit_vocab_size
        or ids[0] < 0
        or ids[-1] >= exits.spec.vocab_size
        or (ids[1:] <= ids[:-1]).any()
    ):
        raise CheckpointError(
            "the exits map their tokens to ids that do not ascend within the vocabulary: train them again"
        )


def _at(exits: Exits, stage_ends: Sequence[int]) -> Exits:
    """Those at the ends of stages."""
    here = tuple(boundary for boundary in exits.spec.boundaries if boundary in stage_ends)
    if not here:
        raise MisuseError(
            f"no stage ends at an exit: the stages end at {_listed(stage_ends)}, the exits lie at "
            f"{_listed(exits.spec.boundaries)}; export stages that end there, as with "
            f"--split {','.join(map(str, exits.spec.boundaries))}"
        )
    spec = dataclasses.replace(exits.spec, boundaries=here)
    return dataclasses.replace(exits, spec=spec, weights={role: exits.weights[role] for role in spec.weight_shapes()})


def _free_mark(files: Mapping[str, FileInfo]) -> str:
    """What keeps the names of new exits apart from those that the bundle has."""
    taken = [name for name in files if name.startswith(EXIT_FILES)]
    return _OTHER if taken and not any(Path(name).stem.endswith(_OTHER) for name in taken) else ""


def _remove_leftovers(path: Path, manifest: Manifest) -> None:
    """Remove exits that were replaced, or that an addition left when it was killed."""
    for file in (path / GRAPHS).glob("exit*"):
        if f"{GRAPHS}/{file.name}" not in manifest.files:
            with suppress(OSError):  # they are in nobody's way
                file.unlink()


def _listed(boundaries: Sequence[int]) -> str:
    return ", ".join(map(str, boundaries))
