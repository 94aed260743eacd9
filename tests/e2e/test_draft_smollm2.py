"""The shipped draft head: it never changes a token, and drafts in the engines as well as it does in torch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from prompts import PROMPTS

import wavekit
from wavekit.commands.demo import SHIPPED_DRAFT
from wavekit.decoding.speculation import Speculation
from wavekit.llm import LLM
from wavekit_calibration.model import open_decoder
from wavekit_calibration.training.draft_data import AnsweredText, StateStore, make_batch
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Acceptance, Teacher, count_accepted
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import read_draft
from wavekit_engines.draft_spec import Draft
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.families import decoder_spec

NEW, DEPTH = 48, 5
CHAIN = Speculation("draft", depth=DEPTH, top_k=1, tokens=DEPTH, adaptive=False)
WAYS = {
    "as much as pays": Speculation("draft"),
    "chain": CHAIN,
    "tree": Speculation("draft", depth=6, tokens=40, adaptive=False),
    "with lookup": Speculation("draft+lookup"),
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def draft(smollm2_checkpoint: Path) -> Draft:
    return read_draft(SHIPPED_DRAFT, target=decoder_spec(open_checkpoint(str(smollm2_checkpoint)).config))


def exported(checkpoint: Path, draft: Draft, folder: Path, options: ExportOptions) -> LLM:
    export_bundle(open_checkpoint(str(checkpoint)), folder / "bundle", options)
    return wavekit.load(folder / "bundle", threads=1)


@pytest.fixture(scope="module")
def llm(smollm2_checkpoint: Path, draft: Draft, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    options = ExportOptions(draft=draft, draft_precision="fp32")  # so that its drafts are those of torch
    return exported(smollm2_checkpoint, draft, tmp_path_factory.mktemp("fp32"), options)


@pytest.fixture(scope="module")
def rounded(smollm2_checkpoint: Path, draft: Draft, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """In int4, where passes of different sizes round differently."""
    options = ExportOptions("int4", draft=draft)
    return exported(smollm2_checkpoint, draft, tmp_path_factory.mktemp("int4"), options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engines", ["llm", "rounded"])
def test_the_text_is_that_of_plain_decoding(engines: str, way: str, request: pytest.FixtureRequest) -> None:
    model: LLM = request.getfixturevalue(engines)
    for number, prompt in enumerate(PROMPTS[:3]):
        sampling = {} if number < 2 else {**SAMPLED, "seed": number}
        plain = model.generate(prompt, max_new_tokens=NEW, speculate="off", **sampling)
        drafted = model.generate(prompt, max_new_tokens=NEW, speculate=WAYS[way], **sampling)
        assert drafted.token_ids == plain.token_ids
        assert plain.speculation.tau == 1


def test_it_is_worth_having(llm: LLM) -> None:
    """More than one and a third tokens a pass with chains, on prompts it was not trained on."""
    results = [llm.generate(prompt, max_new_tokens=NEW, speculate=CHAIN) for prompt in PROMPTS[:6]]
    tokens, passes = sum(len(r.token_ids) - 1 for r in results), sum(r.speculation.passes for r in results)
    assert tokens / passes > 4 / 3


def test_tau_in_the_engines_is_tau_in_torch(llm: LLM, draft: Draft, smollm2_checkpoint: Path, tmp_path: Path) -> None:
    results = [llm.generate(prompt, max_new_tokens=NEW, speculate=CHAIN, stop_token_ids=()) for prompt in PROMPTS[:4]]
    texts = [
        AnsweredText(number, tuple(llm.encode(prompt)), result.token_ids)
        for number, (prompt, result) in enumerate(zip(PROMPTS[:4], results, strict=True))
    ]
    decoder, _ = open_decoder(str(smollm2_checkpoint), dtype="float32")
    store = StateStore(tmp_path, draft.spec.boundaries)
    store.fill(texts, decoder, 4, lambda what, done, total: None)
    head = DraftHead(draft.spec, 1024)
    head.load(draft)
    tokens = torch.from_numpy(draft.d2t + np.arange(len(draft.d2t)))
    teacher = Teacher(decoder, tokens, draft.spec.embedding_scale, torch.device("cpu"))
    found = Acceptance(DEPTH)
    count_accepted(head, teacher, make_batch(store, texts, draft.spec.boundaries, DEPTH), found)
    tau = sum(len(r.token_ids) - 1 for r in results) / sum(r.speculation.passes for r in results)
    assert tau == pytest.approx(found.tau, rel=0.01)


def test_its_folder_says_what_made_it() -> None:
    record = json.loads((SHIPPED_DRAFT.parent / "training.json").read_text())
    assert record["tau"] > 1.3
    assert record["texts"]["prompts_sha256"]
    assert sum(file.stat().st_size for file in SHIPPED_DRAFT.iterdir()) < 16 << 20
