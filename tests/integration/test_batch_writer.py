"""Many texts at once: each is what the same engines write for it alone."""

from pathlib import Path

import numpy as np
import pytest
from command_line import save_text_model
from engines import exported

import wavekit
from wavekit.decoding.batch_writer import Answer, BatchWriter
from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sampling import SamplingParams
from wavekit.decoding.sequence_workers import Engines
from wavekit.llm import LLM
from wavekit_engines.bundle import open_bundle
from wavekit_engines.errors import ContextLengthError, MisuseError
from wavekit_engines.ort_engine import OrtEngine

PROMPTS = [[5, 9, 200, 7][: 1 + n % 4] * (1 + n) for n in range(11)]
MODELS = {
    "llama-untied": {},
    "gemma3-tied": {"split": (2, 3), "taps": (1, 3)},  # windows of 8, which these texts outgrow
    "qwen3-untied": {"split": (1,)},
}


def writer_of(bundle: Path, slots: int) -> BatchWriter:
    manifest = open_bundle(bundle).manifest
    stages = [OrtEngine(bundle, stage.graph, 1) for stage in manifest.stages]
    return BatchWriter(manifest, stages, OrtEngine(bundle, manifest.head, 1), slots)


@pytest.fixture(scope="module", params=MODELS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    return exported(
        save_text_model(request.param, folder / "model", seed=2), folder / "bundle", **MODELS[request.param]
    )


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return wavekit.load(bundle, threads=1)


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_answers_equal_those_written_one_by_one(bundle: Path, llm: LLM, slots: int) -> None:
    expected = [list(llm.generate(p, max_new_tokens=21, stop_token_ids=[]).token_ids) for p in PROMPTS]
    assert writer_of(bundle, slots).write(PROMPTS, 21, []) == expected


def test_every_prompt_is_drawn_by_its_own_seed(bundle: Path, llm: LLM) -> None:
    expected = [
        list(llm.generate(p, max_new_tokens=9, temperature=1.3, seed=n, stop_token_ids=[]).token_ids)
        for n, p in enumerate(PROMPTS)
    ]
    answers = writer_of(bundle, 4).write(PROMPTS, 9, [], lambda n: SamplingParams(temperature=1.3, seed=n))
    assert answers == expected


def test_an_answer_ends_with_a_stop_token_and_the_next_prompt_takes_its_place(bundle: Path, llm: LLM) -> None:
    longest = [list(llm.generate(p, max_new_tokens=15, stop_token_ids=[]).token_ids) for p in PROMPTS]
    stops = {longest[0][2], longest[3][0], longest[7][9]}
    told: dict[int, list[int]] = {}
    answers = writer_of(bundle, 3).write(
        PROMPTS, 15, sorted(stops), written=lambda number, answer: told.update({number: answer.tokens})
    )
    for answer, whole in zip(answers, longest, strict=True):
        end = next((i for i, token in enumerate(whole) if token in stops), len(whole) - 1)
        assert answer == whole[: end + 1]
    assert told == dict(enumerate(answers))


def test_texts_end_with_the_context(bundle: Path) -> None:
    writer = writer_of(bundle, 2)
    context = writer._spec.max_positions
    prompts = [[3] * (context - 2), [4, 5]]
    assert [len(answer) for answer in writer.write(prompts, 6, [])] == [2, 6]
    with pytest.raises(ContextLengthError, match=f"prompt 0 has {context} tokens"):
        writer.write([[3] * context], 1, [])


def test_no_prompts_no_answers_and_misuse_is_named(bundle: Path) -> None:
    assert writer_of(bundle, 2).write([], 4, []) == []
    with pytest.raises(MisuseError, match="prompt 1 is empty"):
        writer_of(bundle, 2).write([[1], []], 4, [])
    with pytest.raises(MisuseError, match="at least one"):
        writer_of(bundle, 0)


def test_states_are_those_of_the_whole_text(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    stages = [OrtEngine(bundle, stage.graph, 1) for stage in manifest.stages]
    told: dict[int, Answer] = {}
    answers = writer_of(bundle, 3).write(
        PROMPTS, 7, [], lambda n: SamplingParams(temperature=2.0, seed=n), told.__setitem__, keep_states=True
    )
    decoder = Decoder(manifest, Engines(stages, OrtEngine(bundle, manifest.head, 1)))
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        text = [*prompt, *answer]
        logits = decoder.logits(text)
        assert told[number].likeliest == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        with decoder.workers.lent(len(text)) as workers:
            workers.reset(False)
            list(workers.prefill(text))
            for worker in workers.stages:
                for boundary in worker.stage.boundaries:
                    expected = worker.output(boundary)[:-1]
                    np.testing.assert_allclose(told[number].boundaries[boundary], expected, rtol=1e-4, atol=1e-4)
