"""From a checkpoint to a bundle: weights streamed matrix by matrix, graphs written directly, everything hashed.

Peak memory is about one layer's largest matrix (twice, while it is transposed or quantized), never the model.
"""

import dataclasses
import datetime
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wavekit_engines.atomic import atomic_directory
from wavekit_engines.bundle import (
    GRAPHS,
    MANIFEST,
    TOKENIZER,
    DraftInfo,
    EngineInfo,
    GenerationDefaults,
    GraphInfo,
    Manifest,
    Provenance,
    StageInfo,
    describe_files,
    json_text,
)
from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_export import check_draft, draft_bytes, draft_digest, draft_parameters
from wavekit_engines.draft_formats import drop_copied_embedding
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import CheckpointError, MisuseError
from wavekit_engines.exit_export import EXIT_TOP_K, ExitPlan, plan_exits, write_exit_graphs
from wavekit_engines.exit_spec import Exits
from wavekit_engines.families import decoder_spec
from wavekit_engines.graphs.draft_graph import DraftForms, write_draft_graph, write_draft_weights
from wavekit_engines.graphs.graph_info import describe_graph
from wavekit_engines.graphs.graph_writer import WeightFile
from wavekit_engines.graphs.linear import WeightFormat
from wavekit_engines.graphs.screened_head import can_screen, screen_bytes, write_screen, write_screened_head
from wavekit_engines.graphs.stage_graph import write_head_graph, write_layers, write_stage_graph, write_vocabulary
from wavekit_engines.quantization import BLOCK_SIZES, PRECISIONS, Precision
from wavekit_engines.stages import StageRange, plan_stages
from wavekit_engines.weights import DecoderWeights

Progress = Callable[[str, int, int], None]
"""Called with what is being done, units done and units in all."""


@dataclass(frozen=True)
class ExportOptions:
    """What to make of a checkpoint.

    ``split`` are the inner boundaries between stages, ``taps`` the boundaries to put out besides. ``head_precision`` is
    that of the head and the embedding. None: as the layers, but int8 beside int4: a head of 4 bits costs more agreement
    with the checkpoint than it saves time.

    ``draft`` is a draft head for the checkpoint, whose boundaries are put out too. ``draft_precision`` is that of its
    layer; None: as the target's layers, but int8 beside fp32, since rounding in the head costs the text nothing, few
    acceptances, and reading four times the weights costs time. Its ``fc`` and head are int8 beside an int4 layer.
    ``draft_top_k`` tokens are scored a row, or the whole draft vocabulary where it is smaller.

    ``exits`` are early exits for the checkpoint, of which those at ends of stages are taken; ``exit_precision`` and
    ``exit_top_k`` are those of `exit_export.plan_exits`.
    """

    precision: Precision = "fp32"
    head_precision: Precision | None = None
    block_size: int = 32
    split: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    draft: Draft | None = None
    draft_precision: Precision | None = None
    draft_top_k: int = 10
    exits: Exits | None = None
    exit_precision: Precision | None = None
    exit_top_k: int = EXIT_TOP_K

    @property
    def layer_form(self) -> WeightFormat:
        """How the layers' matrices are stored."""
        return WeightFormat(self.precision, self.block_size)

    @property
    def vocabulary_form(self) -> WeightFormat:
        """How the embedding and the head are stored."""
        return WeightFormat(self.head_precision or _of_head(self.precision), self.block_size)

    @property
    def draft_forms(self) -> DraftForms:
        """How the draft's weights are stored."""
        follows: Precision = "int8" if self.precision == "fp32" else self.precision
        precision = self.draft_precision or follows
        return DraftForms(
            layer=WeightFormat(precision, self.block_size),
            head=WeightFormat(_of_head(precision), self.block_size),
            target_embedding=self.vocabulary_form,
        )

    @property
    def all_taps(self) -> tuple[int, ...]:
        """The taps and, after them, the boundaries that only the draft takes."""
        wanted = self.draft.spec.boundaries if self.draft is not None else ()
        return (*self.taps, *(boundary for boundary in wanted if boundary not in self.taps))

    def check(self) -> None:
        """Raises MisuseError for values that no engine has."""
        for precision in (self.precision, self.vocabulary_form.precision, self.draft_forms.layer.precision):
            if precision not in PRECISIONS:
                raise MisuseError(f"precision {precision!r}: choose one of {', '.join(PRECISIONS)}")
        if self.block_size not in BLOCK_SIZES:
            raise MisuseError(f"block size {self.block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
        if self.layer_form.compute_dtype != self.vocabulary_form.compute_dtype:
            raise MisuseError(
                f"a {self.head_precision} head cannot follow {self.precision} layers: fp16 goes with fp16 only"
            )
        if self.exits is None and self.exit_precision is not None:
            raise MisuseError("an exit precision without exits: name the exits to export, or leave it out")
        if self.draft is None:
            if self.draft_precision is not None:
                raise MisuseError("a draft precision without a draft: name the draft head to export, or leave it out")
            return
        if self.layer_form.compute_dtype != self.draft_forms.layer.compute_dtype:
            raise MisuseError(
                f"a {self.draft_precision} draft cannot go with a {self.precision} target: fp16 goes with fp16 only"
            )
        if self.draft_top_k < 1:
            raise MisuseError(f"a draft that scores {self.draft_top_k} tokens: ask for 1 or more")


def export_bundle(
    checkpoint: Checkpoint,
    path: Path,
    options: ExportOptions,
    *,
    command: str = "",
    replace: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Manifest:
    """Write a bundle of ONNX Runtime engines.

    Args:
        checkpoint: an opened checkpoint.
        path: the bundle's directory, which must not exist unless ``replace``.
        options: precision, stages and taps.
        command: the command line, for the manifest's provenance.
        replace: take the place of an existing bundle, once the new one is complete.
        progress: told after every layer.

    Raises:
        MisuseError: options that do not fit the model, an unsupported model, or a taken name.
        CheckpointError: the checkpoint is damaged or incomplete.
        WavekitError: the disk is full.
    """
    options.check()
    if replace and path.exists() and not (path / MANIFEST).is_file():
        raise MisuseError(f"{path} is not a bundle, so --force does not replace it; choose another name")
    spec = decoder_spec(checkpoint.config)
    if options.draft is not None:
        check_draft(options.draft, spec)
    stages = plan_stages(spec.num_layers, options.split, options.all_taps)
    exits = _plan_exits(options, spec, stages)
    weights = DecoderWeights(checkpoint, spec)
    if options.draft is not None:
        options = dataclasses.replace(options, draft=drop_copied_embedding(options.draft, weights["embedding"]))
    generation, tokenizer_files = _generation_defaults(checkpoint), checkpoint.tokenizer_files()
    needed = _estimated_bytes(spec, weights, options) + (exits.needed_bytes if exits is not None else 0)
    with atomic_directory(path, replace, needed) as folder:
        (folder / GRAPHS).mkdir()
        written = _write_graphs(folder, spec, weights, stages, options, progress)
        head = folder / GRAPHS / "head.onnx"
        exits_info = write_exit_graphs(folder / GRAPHS, head, exits, command) if exits is not None else None
        (folder / TOKENIZER).mkdir()
        for name, data in tokenizer_files.items():
            (folder / TOKENIZER / name).write_bytes(data)
        progress("hashing", spec.num_layers + 1, spec.num_layers + 1)
        manifest = Manifest(
            decoder=spec,
            engine=_engine_info(options),
            stages=written.stages,
            head=written.head,
            taps=tuple(sorted(options.all_taps)),
            generation=generation,
            files=describe_files(folder),
            provenance=_provenance(checkpoint, command),
            draft=written.draft,
            greedy_head=written.greedy_head,
            exits=exits_info,
        )
        (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


def _plan_exits(options: ExportOptions, spec: DecoderSpec, stages: tuple[StageRange, ...]) -> ExitPlan | None:
    if options.exits is None:
        return None
    ends = [stage.last for stage in stages]
    return plan_exits(options.exits, spec, _engine_info(options), ends, options.exit_precision, options.exit_top_k)


def _engine_info(options: ExportOptions) -> EngineInfo:
    return EngineInfo(
        kind="onnxruntime",
        precision=options.precision,
        head_precision=options.vocabulary_form.precision,
        block_size=options.block_size,
        compute_dtype=options.layer_form.compute_dtype,
    )


@dataclass(frozen=True)
class _Written:
    """The graphs of a bundle."""

    stages: tuple[StageInfo, ...]
    head: GraphInfo
    draft: DraftInfo | None
    greedy_head: GraphInfo | None


def _write_graphs(
    folder: Path,
    spec: DecoderSpec,
    weights: DecoderWeights,
    stages: tuple[StageRange, ...],
    options: ExportOptions,
    progress: Progress,
) -> _Written:
    graphs, form, vocabulary_form = folder / GRAPHS, options.layer_form, options.vocabulary_form
    total = spec.num_layers + 1
    progress("vocabulary", 0, total)
    infos = []
    with WeightFile(graphs / "vocabulary.weights") as vocabulary:
        write_vocabulary(vocabulary, spec, weights, vocabulary_form)
        head_file = graphs / "head.onnx"
        write_head_graph(head_file, spec, vocabulary, vocabulary_form)
        greedy = _write_greedy_head(graphs / "head_greedy.onnx", vocabulary, spec, weights, vocabulary_form)
        for number, stage in enumerate(stages):
            file = graphs / f"stage_{number}.onnx"
            with WeightFile(file.with_suffix(".weights")) as own:
                for index in range(stage.first, stage.last):
                    progress(f"layer {index}", index + 1, total)
                    write_layers(own, spec, weights, form, [index])
                files = (own, vocabulary) if stage.first == 0 else (own,)
                write_stage_graph(file, stage, spec, files, form, vocabulary_form)
            parameters = sum(_layer_parameters(weights, index) for index in range(stage.first, stage.last))
            infos.append(StageInfo(describe_graph(file, parameters), stage.first, stage.last, stage.outputs))
        draft = _write_draft(graphs / "draft.onnx", vocabulary, spec, options) if options.draft is not None else None
    head = describe_graph(head_file, math.prod(weights["head"].shape) + spec.hidden_size)
    return _Written(tuple(infos), head, draft, greedy)


def _write_greedy_head(
    file: Path, vocabulary: WeightFile, spec: DecoderSpec, weights: DecoderWeights, form: WeightFormat
) -> GraphInfo | None:
    if not can_screen(spec, form):
        return None
    with WeightFile(file.with_suffix(".weights")) as own:
        if not write_screen(own, spec, weights):
            own.path.unlink()
            return None
        write_screened_head(file, spec, own, vocabulary)
    return describe_graph(file, math.prod(weights["head"].shape))


def _write_draft(file: Path, vocabulary: WeightFile, target: DecoderSpec, options: ExportOptions) -> DraftInfo:
    draft, forms = options.draft, options.draft_forms
    assert draft is not None
    top_k = min(options.draft_top_k, draft.spec.draft_vocab_size)
    with WeightFile(file.with_suffix(".weights")) as own:
        write_draft_weights(own, draft, forms)
        write_draft_graph(file, draft, (own, vocabulary), forms, top_k)
    return DraftInfo(
        spec=dataclasses.replace(draft.spec, target_layers=target.num_layers),
        graph=describe_graph(file, draft_parameters(draft)),
        precision=forms.layer.precision,
        head_precision=forms.head.precision,
        top_k=top_k,
        origin=json_text(draft.origin),
        digest=draft_digest(draft),
    )


def _layer_parameters(weights: DecoderWeights, index: int) -> int:
    return sum(math.prod(weights.layer(index, role).shape) for role in weights.layer_roles())


def _generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    given = checkpoint.generation_config.get("eos_token_id", checkpoint.config.get("eos_token_id"))
    ids = given if isinstance(given, list) else [given] if given is not None else []
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"{checkpoint.name} has the eos_token_id {given!r}: correct it to token ids or remove it")
    return GenerationDefaults(stop_token_ids=tuple(ids))


def _provenance(checkpoint: Checkpoint, command: str) -> Provenance:
    packages = ("wavekit", "onnx-ir", "numpy")
    return Provenance(
        checkpoint=json_text(checkpoint.name),
        checkpoint_digest=checkpoint.digest(),
        command=json_text(command),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        versions={name: importlib.metadata.version(name) for name in packages},
    )


def _of_head(precision: Precision) -> Precision:
    """The precision of a head beside layers of this one, unless it is asked for."""
    return "int8" if precision == "int4" else precision


def _estimated_bytes(spec: DecoderSpec, weights: DecoderWeights, options: ExportOptions) -> int:
    layers = sum(_layer_parameters(weights, index) for index in range(spec.num_layers))
    tables = math.prod(weights["embedding"].shape) * (1 if spec.tied_head else 2)
    bits = layers * options.layer_form.stored_bits + tables * options.vocabulary_form.stored_bits
    draft = draft_bytes(options.draft, options.draft_forms) if options.draft is not None else 0
    screen = screen_bytes(spec) if can_screen(spec, options.vocabulary_form) else 0
    return int(bits / 8) + draft + screen
