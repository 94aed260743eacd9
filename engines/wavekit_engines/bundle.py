"""The bundle: a directory with everything needed to decode, described by ``manifest.json``.

::

    manifest.json       what is here: decoder, stages, draft, exits, tensors, files and their hashes, what made it
    graphs/*.onnx       one graph a stage and the head; where there are any, the head for greedy choice, the draft head
                        and one graph an early exit
    graphs/*.weights    their weights (external data); the vocabulary tables are stored once
    tokenizer/          tokenizer.json and its companions, as the checkpoint had them

The manifest is the contract: it is validated whole, against the files, before an engine opens anything. This module
knows nothing about checkpoints or how graphs are written, so a bundle can be read where only decoding is installed.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_spec import DraftSpec
from wavekit_engines.errors import BundleError, MisuseError
from wavekit_engines.exit_spec import ExitSpec
from wavekit_engines.quantization import Precision

FORMAT = "wavekit-bundle"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
GRAPHS = "graphs"
_HASHED_BYTES = 1 << 20
_SEAL = b',\n "sha256": "'


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of a graph; free dimensions are named, fixed ones are integers."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphInfo:
    """A graph file, what goes in and out, and the size of its weights."""

    file: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    parameters: int
    weight_bytes: int


@dataclass(frozen=True)
class StageInfo:
    """Layers ``first`` to ``last - 1``; ``boundaries`` are the boundary numbers put out, ``last`` among them."""

    graph: GraphInfo
    first: int
    last: int
    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class DraftInfo:
    """A draft head for this decoder.

    ``precision`` is that of its layer, ``head_precision`` of its ``fc`` and head; both have the engine's block size and
    compute dtype. The graph scores ``top_k`` tokens a row. ``origin`` says what made the head, and ``digest`` is the
    SHA-256 of its weights as they were before they were stored here.
    """

    spec: DraftSpec
    graph: GraphInfo
    precision: Precision
    head_precision: Precision
    top_k: int
    origin: str
    digest: str


@dataclass(frozen=True)
class ExitsInfo:
    """Early exits of this decoder, all at ends of stages; not every stage need end at one.

    ``graphs`` has one for each of ``spec.boundaries``, in their order, which scores ``top_k`` tokens a row.
    ``precision`` is that of adapters and head rows; both have the engine's block size and compute dtype. ``origin``
    says what made the exits, ``digest`` is the SHA-256 of their weights as they were before they were stored here, and
    ``command`` stored them, when ``created`` says.
    """

    spec: ExitSpec
    graphs: tuple[GraphInfo, ...]
    precision: Precision
    top_k: int
    origin: str
    digest: str
    command: str
    created: str


@dataclass(frozen=True)
class EngineInfo:
    """How the numbers are stored and computed."""

    kind: str
    precision: Precision
    head_precision: Precision
    block_size: int
    compute_dtype: str


@dataclass(frozen=True)
class GenerationDefaults:
    """What ends a text, as the checkpoint says."""

    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class FileInfo:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """What made the bundle."""

    checkpoint: str
    checkpoint_digest: str
    command: str
    created: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle but the bytes of its files; paths are relative to the bundle.

    ``greedy_head`` gives the best token of most rows for less than the head's logits cost (`graphs.screened_head`).
    """

    decoder: DecoderSpec
    engine: EngineInfo
    stages: tuple[StageInfo, ...]
    head: GraphInfo
    taps: tuple[int, ...]
    generation: GenerationDefaults
    files: dict[str, FileInfo]
    provenance: Provenance
    draft: DraftInfo | None = None
    greedy_head: GraphInfo | None = None
    exits: ExitsInfo | None = None
    format: str = FORMAT
    version: int = VERSION

    def encode(self) -> bytes:
        """The manifest as indented JSON, its last member the SHA-256 of everything before it."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        return _sealed(text.removesuffix(b"\n}"))


@dataclass(frozen=True)
class _Header:
    format: str
    version: int


@dataclass(frozen=True)
class Bundle:
    """An opened and validated bundle."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer.json lies."""
        return self.path / TOKENIZER


def open_bundle(path: str | Path, check_hashes: bool = True) -> Bundle:
    """Read and validate a bundle.

    Args:
        path: the bundle's directory.
        check_hashes: compare every file with the manifest's SHA-256, not only its size (about a second for 2 GB).

    Raises:
        MisuseError: ``path`` is not a bundle.
        BundleError: it is one that is damaged, contradicts itself, or comes from a newer wavekit.
    """
    path = Path(path)
    file = path / MANIFEST
    if not file.is_file():
        if path.is_file():
            raise MisuseError(f"{path} is a file and a bundle is a folder: give the folder")
        reason = "is not a bundle: it has no manifest.json" if path.is_dir() else "does not exist"
        raise MisuseError(f"{path} {reason}; make a bundle with `wavekit export MODEL -o {path}`")
    manifest = decode_manifest(file.read_bytes(), str(file))
    _check_stages(manifest, file)
    _check_draft(manifest, file)
    _check_exits(manifest, file)
    _check_files(path, manifest.files, check_hashes)
    return Bundle(path, manifest)


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Parse a manifest and check its schema; ``name`` stands for it in errors.

    Raises:
        BundleError: it is not JSON, not a manifest, of a newer version, has a missing or mistyped field, or changed.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format != FORMAT:
            raise BundleError(f"{name} says format {header.format!r}, not {FORMAT!r}; this is not a wavekit bundle")
        if header.version > VERSION:
            raise BundleError(
                f"{name} has version {header.version}, this wavekit reads up to {VERSION}; upgrade wavekit to open it"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{name} is damaged ({error}); export the bundle again") from None
    if data != _sealed(data.rpartition(_SEAL)[0]):
        raise BundleError(f"{name} was changed after export; copy the bundle again or export it again")
    return manifest


def _sealed(text: bytes) -> bytes:
    return text + _SEAL + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n'


def _check_stages(manifest: Manifest, file: Path) -> None:
    edges = [0, *(stage.last for stage in manifest.stages)]
    starts = [stage.first for stage in manifest.stages]
    if not starts or starts != edges[:-1] or edges[-1] != manifest.decoder.num_layers or edges != sorted(set(edges)):
        raise BundleError(
            f"{file} has stages {starts} to {edges[1:]} that do not join into one decoder; export it again"
        )
    given = {boundary for stage in manifest.stages for boundary in stage.boundaries}
    missing = sorted({*manifest.taps} - given) + [s.last for s in manifest.stages if s.last not in s.boundaries]
    if missing:
        raise BundleError(f"{file}: no stage puts out boundary {missing[0]}; export it again")
    optional = (manifest.draft.graph if manifest.draft is not None else None, manifest.greedy_head)
    exits = manifest.exits.graphs if manifest.exits is not None else ()
    for graph in (*(stage.graph for stage in manifest.stages), manifest.head, *optional, *exits):
        if graph is not None and graph.file not in manifest.files:
            raise BundleError(f"{file} names the graph {graph.file} but no such file; export it again")


def _check_draft(manifest: Manifest, file: Path) -> None:
    if manifest.draft is None:
        return
    draft, decoder = manifest.draft.spec, manifest.decoder
    for what, found, expected in (
        ("a hidden size", draft.hidden_size, decoder.hidden_size),
        ("a vocabulary", draft.vocab_size, decoder.vocab_size),
        ("a target with a number of layers", draft.target_layers, decoder.num_layers),
    ):
        if found != expected:
            raise BundleError(f"{file}: its draft has {what} of {found}, its decoder {expected}; export it again")
    missing = sorted({*draft.boundaries} - {*manifest.taps})
    if missing or not draft.boundaries or list(draft.boundaries) != sorted({*draft.boundaries}):
        raise BundleError(
            f"{file}: its draft takes the boundaries {list(draft.boundaries)}, its taps are {list(manifest.taps)}; "
            "export it again"
        )
    if not 1 <= manifest.draft.top_k <= draft.draft_vocab_size <= draft.vocab_size:
        raise BundleError(
            f"{file}: its draft scores {manifest.draft.top_k} of {draft.draft_vocab_size} tokens out of "
            f"{draft.vocab_size}; export it again"
        )


def _check_exits(manifest: Manifest, file: Path) -> None:
    if manifest.exits is None:
        return
    exits, decoder = manifest.exits, manifest.decoder
    spec = exits.spec
    problem = spec.problem()
    for what, found, expected in (
        ("a hidden size", spec.hidden_size, decoder.hidden_size),
        ("a vocabulary", spec.vocab_size, decoder.vocab_size),
        ("a target with a number of layers", spec.target_layers, decoder.num_layers),
    ):
        if found != expected:
            problem = f"its exits have {what} of {found}, its decoder {expected}"
    ends = [stage.last for stage in manifest.stages]
    if not {*spec.boundaries} <= {*ends}:
        problem = f"its exits lie at the boundaries {list(spec.boundaries)}, its stages end at {ends}"
    if len(exits.graphs) != len(spec.boundaries):
        problem = f"it has {len(exits.graphs)} graphs for exits at {len(spec.boundaries)} boundaries"
    if not 1 <= exits.top_k <= spec.exit_vocab_size:
        problem = f"its exits score {exits.top_k} of {spec.exit_vocab_size} tokens"
    if problem is not None:
        raise BundleError(f"{file}: {problem}; export it again")


def _check_files(path: Path, files: Mapping[str, FileInfo], check_hashes: bool) -> None:
    for name, info in files.items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            raise BundleError(f"{path}: {name} lies outside the bundle; do not trust this bundle")
        if not file.is_file():
            raise BundleError(f"{path}: {name} is missing; copy the bundle again or export it again")
        size = file.stat().st_size
        if size != info.bytes:
            raise BundleError(
                f"{path}: {name} has {size} bytes instead of {info.bytes}; copy it again or export it again"
            )
    if check_hashes:
        with ThreadPoolExecutor(2) as pool:  # hashing releases the interpreter lock
            hashes = pool.map(sha256, [path / name for name in files])
            changed = [name for (name, info), found in zip(files.items(), hashes, strict=True) if found != info.sha256]
        if changed:
            raise BundleError(f"{path}: {changed[0]} was changed after export; copy it again or export it again")


def describe_files(path: Path) -> dict[str, FileInfo]:
    """Size and hash of every file below ``path`` but the manifest."""
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return {name: FileInfo((path / name).stat().st_size, sha256(path / name)) for name in names if name != MANIFEST}


def json_text(name: str) -> str:
    """A file name as JSON can hold it; those that are not UTF-8 reach Python as lone surrogates."""
    return name.encode(errors="backslashreplace").decode()


def sha256(file: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()
