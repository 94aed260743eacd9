"""A bundle beside its checkpoint, from beginning to end."""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from wavekit.llm import LLM
from wavekit.verification.against_checkpoint.draft_check import DraftCheck
from wavekit.verification.against_checkpoint.reference import Reference
from wavekit.verification.against_checkpoint.states_check import StatesCheck
from wavekit.verification.against_checkpoint.trace import TracedEngines
from wavekit.verification.against_checkpoint.weights_check import check_description, check_stored
from wavekit.verification.findings import Check, Findings
from wavekit.verification.lossless import Told
from wavekit.verification.run import Texts
from wavekit.verification.tokens import compare_tokens
from wavekit_engines.bundle import Manifest
from wavekit_engines.checkpoint import Checkpoint, open_checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import read_draft
from wavekit_engines.draft_spec import Draft
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.families import decoder_spec
from wavekit_engines.weights import DecoderWeights


@dataclass(frozen=True)
class Given:
    """What a bundle is compared with, opened and found to be of its shape."""

    path: str
    checkpoint: Checkpoint
    spec: DecoderSpec
    weights: DecoderWeights
    draft: Draft | None


def open_given(manifest: Manifest, checkpoint: str, draft: Path | None) -> Given:
    """Open a checkpoint and, where given, a draft head's folder, before anything takes long.

    Raises:
        MisuseError: the checkpoint or the draft is of another shape than the bundle's, or the bundle has no draft head.
        CheckpointError: files are damaged.
    """
    opened = open_checkpoint(checkpoint)
    spec = decoder_spec(opened.config)
    for what, ours, theirs in (
        ("layers", manifest.decoder.num_layers, spec.num_layers),
        ("features", manifest.decoder.hidden_size, spec.hidden_size),
        ("tokens", manifest.decoder.vocab_size, spec.vocab_size),
    ):
        if ours != theirs:
            raise MisuseError(
                f"the bundle has {ours} {what}, {opened.name} has {theirs}: give the model it was made from"
            )
    if draft is not None and manifest.draft is None:
        raise MisuseError("this bundle has no draft head, so there is none to compare: leave --draft out")
    head = read_draft(draft, target=spec) if draft is not None else None
    if head is not None and manifest.draft is not None:
        ours, theirs = len(manifest.draft.spec.boundaries), len(head.spec.boundaries)
        if ours != theirs:
            raise MisuseError(
                f"the bundle's draft head reads {ours} boundaries, that of {draft} {theirs}: give its own"
            )
    return Given(checkpoint, opened, spec, DecoderWeights(opened, spec), head)


def verify_against(
    llm: LLM, bundle: Path, given: Given, texts: Texts, threads: int, found: Findings, told: Told
) -> None:
    """Compare with a checkpoint, and the draft head with the folder it came from."""
    start, manifest, weights = perf_counter(), llm.manifest, given.weights
    torch.set_num_threads(threads)
    told("opening the checkpoint", 0, 1)
    reference = Reference(given.path, given.spec.norm_placement)
    found.checks.append(check_description(manifest, given.spec, given.checkpoint))
    found.checks.append(compare_tokens(llm, reference.encode, reference.encode_chat))
    check, wrong = check_stored(bundle, manifest, weights, told)
    found.checks.append(check)
    try:
        states = StatesCheck(llm, bundle, reference, weights, TracedEngines(bundle, manifest, threads), wrong)
        states.compare(texts.samples, texts.greedy, told)
        found.drift = states.drift
        found.checks += states.checks()
        found.divergences += states.divergences
    except WavekitError as error:
        found.checks.append(Check("checkpoint", "layers", "FAIL", str(error)))
    if manifest.draft is not None:
        _verify_draft(llm, bundle, given.draft, reference, (texts, found, told))
    found.seconds += perf_counter() - start


def _verify_draft(
    llm: LLM,
    bundle: Path,
    draft: Draft | None,
    reference: Reference,
    run: tuple[Texts, Findings, Told],
) -> None:
    texts, found, told = run
    if draft is None:
        says = "give the folder of the draft head with --draft to have it compared"
        found.checks.append(Check("draft", "draft head", "skipped", says))
        return
    try:
        check = DraftCheck(llm, bundle, reference, draft)
        for one in check.checks(texts.samples, texts.greedy, told):
            found.checks.append(one)
        found.draft = check.figures
    except WavekitError as error:
        found.checks.append(Check("draft", "draft head", "FAIL", str(error)))
