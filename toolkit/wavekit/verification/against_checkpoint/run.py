"""A bundle beside its checkpoint, from beginning to end."""

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
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.decoder_spec import DecoderSpec
from wavekit_engines.draft_formats import read_draft
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.families import decoder_spec
from wavekit_engines.weights import DecoderWeights


def verify_against(
    llm: LLM, bundle: Path, checkpoint: str, draft: Path | None, texts: Texts, threads: int, found: Findings, told: Told
) -> None:
    """Compare with a checkpoint, and its draft head with the folder it came from.

    Raises:
        MisuseError: the checkpoint is of another shape than the bundle's, so nothing can be compared.
    """
    start = perf_counter()
    torch.set_num_threads(threads)
    opened = open_checkpoint(checkpoint)
    spec, manifest = decoder_spec(opened.config), llm.manifest
    for what, ours, theirs in (
        ("layers", manifest.decoder.num_layers, spec.num_layers),
        ("features", manifest.decoder.hidden_size, spec.hidden_size),
        ("tokens", manifest.decoder.vocab_size, spec.vocab_size),
    ):
        if ours != theirs:
            raise MisuseError(
                f"the bundle has {ours} {what}, {opened.name} has {theirs}: give the model it was made from"
            )
    weights = DecoderWeights(opened, spec)
    told("opening the checkpoint", 0, 1)
    reference = Reference(checkpoint, spec.norm_placement)
    found.checks.append(check_description(manifest, spec, opened))
    found.checks.append(compare_tokens(llm, reference.encode, reference.encode_chat))
    check, wrong = check_stored(bundle, manifest, weights, told)
    found.checks.append(check)
    try:
        states = StatesCheck(llm, reference, weights, TracedEngines(bundle, manifest, threads), wrong)
        states.compare(texts.samples, texts.greedy, told)
        found.drift = states.drift
        found.checks += states.checks()
        found.divergences += states.divergences
    except WavekitError as error:
        found.checks.append(Check("checkpoint", "layers", "FAIL", str(error)))
    _verify_draft(llm, bundle, draft, reference, spec, (texts, found, told))
    found.seconds += perf_counter() - start


def _verify_draft(
    llm: LLM,
    bundle: Path,
    draft: Path | None,
    reference: Reference,
    spec: DecoderSpec,
    run: tuple[Texts, Findings, Told],
) -> None:
    texts, found, told = run
    if llm.manifest.draft is None:
        return
    if draft is None:
        says = "give the folder of the draft head with --draft to have it compared"
        found.checks.append(Check("draft", "draft head", "skipped", says))
        return
    try:
        check = DraftCheck(llm, bundle, reference, read_draft(draft, target=spec))
        for one in check.checks(texts.samples, texts.greedy, told):
            found.checks.append(one)
        found.draft = check.figures
    except WavekitError as error:
        found.checks.append(Check("draft", "draft head", "FAIL", str(error)))
