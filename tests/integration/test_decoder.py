"""What a decoder does besides choosing tokens: boundaries put out, prompts in chunks, ends of a context, threads."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engines import decoded, exported, greedy, opened, slowly
from tiny_models import CONTEXT, VOCABULARY, save_tiny

from wavekit.decoding.decoder import Decoder
from wavekit.decoding.sequence_workers import SequenceWorkers, switches_to_long
from wavekit_engines.errors import ContextLengthError, MisuseError

# An embedding scale, post norms, windows, biases and norms of q and k: everything that comes before a boundary.
TAPPED = (
    "llama-tied",
    "gemma3-tied",
    "granite-biases",
    "olmo2-untied",
    "qwen3-window",
    "smollm3-tied",
    "phi3-longrope",
)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def boundaries(decoder: Decoder, prompt: Sequence[int]) -> dict[int, np.ndarray]:
    """Hidden states [S, H] at every boundary that a bundle puts out."""
    x, positions, found = np.array(prompt), np.arange(len(prompt)), {}
    with decoder.workers.lent(len(prompt)) as workers:
        workers.reset(switches_to_long(decoder.spec, len(prompt)))
        for worker in workers.stages:
            worker.load(x, positions)
            worker.run()
            found |= {boundary: worker.output(boundary).copy() for boundary in worker.stage.boundaries}
            x = worker.output(worker.stage.last)
    return found


def residual_stream(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> list[np.ndarray]:
    """What transformers has between its layers. Its own last hidden state is after the final norm, hence the hook."""
    last: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        last.append(arguments[0])

    handle = model.model.norm.register_forward_pre_hook(keep)
    with torch.no_grad():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    handle.remove()
    states = [*output.hidden_states[:-1], last[0]]
    assert len(states) == model.config.num_hidden_layers + 1
    return [state[0].numpy() for state in states]


@pytest.mark.parametrize("name", TAPPED)
def test_every_boundary_is_the_hidden_state_of_transformers(name: str, tmp_path: Path) -> None:
    model, prompt = save_tiny(name, tmp_path / "model", seed=2), tokens(0, 40)
    expected = residual_stream(model, prompt)
    last = len(expected) - 1
    for split in ((), (2,), tuple(range(1, last))):
        bundle = exported(tmp_path / "model", tmp_path / f"bundle{len(split)}", split=split, taps=range(last + 1))
        found = boundaries(opened(bundle), prompt)
        assert sorted(found) == list(range(last + 1))
        for boundary, state in found.items():
            np.testing.assert_allclose(state, expected[boundary], atol=2e-5 * np.abs(expected[boundary]).max())


def test_only_the_boundaries_that_were_asked_for_are_put_out(tmp_path: Path) -> None:
    save_tiny("llama-untied", tmp_path / "model")
    manifest = opened(exported(tmp_path / "model", tmp_path / "bundle", split=(2,), taps=(3, 0))).manifest
    assert [stage.boundaries for stage in manifest.stages] == [(0, 2), (3, 4)]
    assert manifest.taps == (0, 3)


CASES = {"1-stage": ((), "onnxruntime"), "3-stages": ((1, 3), "onnxruntime"), "torch": ((1, 3), "torch")}


@pytest.fixture(scope="module", params=slowly(list(CASES), ["torch"]))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Windows of 8 in half of the layers."""
    folder = tmp_path_factory.mktemp("decoder")
    save_tiny("qwen3-window", folder / "model", seed=4)
    split, engine = CASES[request.param]
    return opened(exported(folder / "model", folder / "bundle", split=split), engine=engine)


@pytest.mark.parametrize("chunk", [1, 7, 64, 199])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(chunk: int, decoder: Decoder) -> None:
    prompt = tokens(1, 200)
    with decoder.workers.lent(200) as workers:
        workers.reset(False)
        whole = np.concatenate([rows.copy() for rows in workers.prefill(prompt)])
        assert len(whole) == 200
        workers.reset(False)
        pieces = [rows.copy() for rows in workers.prefill(prompt, chunk)]
    assert [len(piece) for piece in pieces[:-1]] == [chunk] * (-(-200 // chunk) - 1)
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=2e-5 * np.abs(whole).max())


def test_a_text_after_a_prompt_in_chunks_is_the_same(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tokens(2, 150)
    expected = decoded(decoder, prompt, 40)
    _, *others = SequenceWorkers.prefill.__defaults__ or ()
    monkeypatch.setattr(SequenceWorkers.prefill, "__defaults__", (7, *others))
    assert decoded(decoder, prompt, 40) == expected


def test_a_prompt_of_one_token(decoder: Decoder) -> None:
    text = [5, *decoded(decoder, [5], 30)]
    again = decoder.logits(text).argmax(-1)
    assert text[1:] == again[:-1].tolist()


def test_a_prompt_one_token_short_of_the_context_gets_that_token(decoder: Decoder) -> None:
    prompt = tokens(3, CONTEXT - 1)
    assert decoded(decoder, prompt, 10) == [int(decoder.logits(prompt)[-1].argmax())]


def test_a_text_goes_on_to_the_end_of_the_context_and_no_further(decoder: Decoder) -> None:
    prompt = tokens(4, 10)
    text = prompt + decoded(decoder, prompt, 10 * CONTEXT)
    assert len(text) == CONTEXT
    again = decoder.logits(text[:-1]).argmax(-1)
    assert text[10:] == again[9:].tolist()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], MisuseError),
        ([5, -1], MisuseError),
        ([VOCABULARY], MisuseError),
        ([5] * CONTEXT, ContextLengthError),
        ([5] * (CONTEXT + 9), ContextLengthError),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(
    prompt: list[int], error: type[Exception], decoder: Decoder
) -> None:
    with pytest.raises(error):
        next(decoder.decode(prompt, greedy, 5))
    with pytest.raises(error):
        decoder.logits(prompt)


def test_the_choice_is_asked_for_every_position_once_in_order(decoder: Decoder) -> None:
    asked: list[int] = []

    def choose(logits: np.ndarray, position: int) -> int:
        asked.append(position)
        assert (logits.dtype, logits.shape) == (np.float32, (VOCABULARY,))
        return 7

    committed = [token for tick in decoder.decode([5, 6, 7], choose, 12) for token in tick]
    assert asked == list(range(3, 15))
    assert committed == [7] * 12


def test_a_failing_choice_spoils_nothing_for_the_next_text(decoder: Decoder) -> None:
    expected = decoded(decoder, tokens(5, 20), 20)

    def choose(logits: np.ndarray, position: int) -> int:
        if position == 25:
            raise ZeroDivisionError
        return greedy(logits, position)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            list(decoder.decode(tokens(6, 20), choose, 20))
        assert decoded(decoder, tokens(5, 20), 20) == expected


def test_texts_of_any_length_in_any_order_reuse_buffers_without_a_trace(decoder: Decoder) -> None:
    prompts = [tokens(seed, length) for seed, length in enumerate((1, 200, 3, 90, 8, 9, 250))]
    alone = [decoder.logits(prompt)[-1] for prompt in prompts]
    order = np.random.default_rng(0).permutation(3 * len(prompts)) % len(prompts)
    for index in order:
        decoded(decoder, prompts[index], 5)
        np.testing.assert_array_equal(decoder.logits(prompts[index])[-1], alone[index])


def test_texts_written_in_turns_are_the_texts_written_alone(decoder: Decoder) -> None:
    prompts = [tokens(seed, 11 + seed) for seed in range(5)]
    expected = [decoded(decoder, prompt, 25) for prompt in prompts]
    running = [decoder.decode(prompt, greedy, 25) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    for _ in range(25 * 3):  # with three stages a token takes three ticks, and ticks without one yield nothing
        for text, ticks in zip(found, running, strict=True):
            text += next(ticks, [])
    assert found == expected


def test_threads_that_write_at_once_write_what_each_writes_alone(decoder: Decoder) -> None:
    prompts = [tokens(seed, 15 + 30 * seed) for seed in range(3)]
    expected = [decoded(decoder, prompt, 60) for prompt in prompts]
    barrier, found = threading.Barrier(len(prompts)), list[tuple[int, list[int]]]()

    def write(index: int) -> None:
        for _ in range(4):
            barrier.wait(timeout=300)
            found.append((index, decoded(decoder, prompts[index], 60)))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert all(text == expected[index] for index, text in found)
