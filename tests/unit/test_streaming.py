"""Streamed text against decoding everything at once, and stop strings against a search of the whole text."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import tiny_tokenizers as tiny
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers

from wavekit.chat_template import ChatTemplate
from wavekit.streaming import StopStrings, TextStream, token_bytes
from wavekit.tokenizer import Tokenizer
from wavekit_engines.errors import MisuseError, UnsupportedModelError

BUILDERS = [
    tiny.byte_level,
    tiny.qwen,
    tiny.gemma,
    tiny.llama,
    tiny.unigram,
    tiny.word_piece,
    tiny.word_endings,
    tiny.words,
]
TOKENIZERS = {build.__name__: Tokenizer(build(), {}, ChatTemplate({}, {})) for build in BUILDERS}
HARD_CHARACTERS = st.sampled_from("aé中한🎉👩\u200d\u0301\u0327 \n\ufffd\U0010ffff")
HARD_TEXT = st.text(HARD_CHARACTERS | st.characters(codec="utf-8"), max_size=30)

every_kind = pytest.mark.parametrize("kind", TOKENIZERS)
with_bytes = pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama"])


def stream(tokenizer: Any, ids: Iterable[int], stop: str | Sequence[str] = (), skip: bool = True) -> list[str]:
    text = TextStream(tokenizer, stop, skip)
    return [*(text.push(token_id) for token_id in ids), text.flush()]


def ids_of(kind: str, spellings: Iterable[str]) -> list[int]:
    tokenizer = TOKENIZERS[kind]
    known = {tokenizer.token(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [known[spelling] for spelling in spellings]


def byte_ids(kind: str, text: str) -> list[int]:
    """Spell ``text`` with one token for each byte of its UTF-8."""
    if kind == "byte_level":
        return ids_of(
            kind, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        )
    return ids_of(kind, [f"<0x{byte:02X}>" for byte in text.encode()])


def every_byte(kind: str) -> list[int]:
    if kind == "byte_level":
        return ids_of(kind, pre_tokenizers.ByteLevel.alphabet())
    return ids_of(kind, [f"<0x{byte:02X}>" for byte in range(256)])


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Search character by character for the stop string that completes first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@every_kind
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    for skip in (True, False):
        assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@with_bytes
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_for_any_bytes(kind: str, data: st.DataObject) -> None:
    # Mostly tokens of one byte: unfinished, overlong and broken characters of every sort.
    tokenizer = TOKENIZERS[kind]
    singles = st.sampled_from(every_byte(kind))
    ids = data.draw(st.lists(singles | st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@with_bytes
@given(text=HARD_TEXT)
def test_no_piece_holds_a_broken_character_of_a_whole_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("kind", ["byte_level", "qwen", "gemma", "llama"])
@given(text=HARD_TEXT)
def test_the_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [token_id for token_id in tokenizer.encode(text) if token_id not in tokenizer.special_ids]
    said = b"".join(token_bytes(tokenizer, token_id) for token_id in ids).decode()
    assert said.removeprefix(" " if kind == "llama" else "") == tokenizer.decode(ids)
    assert token_bytes(tokenizer, 10**6) == b""


def test_a_byte_level_character_is_sent_with_its_last_byte() -> None:
    ids = byte_ids("byte_level", "x🧿y")
    assert stream(TOKENIZERS["byte_level"], ids) == ["x", "", "", "", "🧿", "y", ""]


def test_a_broken_byte_level_character_is_sent_as_soon_as_it_is_known_to_be_broken() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second, *_ = byte_ids("byte_level", "🧿")
    (x,) = tokenizer.encode("x")
    assert stream(tokenizer, [first, second, x]) == ["", "", "\ufffdx", ""]
    assert stream(tokenizer, [first, second]) == ["", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_sent_when_it_is_over_because_one_bad_byte_spoils_it() -> None:
    tokenizer = TOKENIZERS["gemma"]
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    ids = byte_ids("gemma", "🧿")
    assert stream(tokenizer, [*ids, x, x]) == ["", "", "", "", "🧿x", "x", ""]
    assert stream(tokenizer, [*ids, ids[0], x]) == ["", "", "", "", "", 5 * "\ufffd" + "x", ""]
    assert tokenizer.decode([*ids, ids[0], x]) == 5 * "\ufffd" + "x"


def test_the_space_before_the_first_word_is_dropped_once() -> None:
    tokenizer = TOKENIZERS["llama"]
    assert "".join(stream(tokenizer, tokenizer.encode("the dog  x "))) == "the dog  x "


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the<|im_end|>dog")
    assert "".join(stream(tokenizer, ids)) == "thedog"
    assert "".join(stream(tokenizer, ids, skip=False)) == "the<|im_end|>dog"


class CountingTokenizer:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.special_ids, self.decoder_steps = tokenizer.special_ids, tokenizer.decoder_steps
        self.token = tokenizer.token
        self._decode = tokenizer.decode
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return self._decode(ids, skip_special_tokens)


@every_kind
def test_a_token_of_text_costs_the_same_however_long_the_text_is(kind: str) -> None:
    counting = CountingTokenizer(TOKENIZERS[kind])
    ids = TOKENIZERS[kind].encode("a b 中 🎉 the", add_special_tokens=False) * 300
    stream(counting, ids)
    assert counting.decoded <= 3 * len(ids) + 1


@with_bytes
@pytest.mark.parametrize("text", ["🧿", "中"])
def test_a_byte_costs_the_same_however_long_the_text_is(kind: str, text: str) -> None:
    whole = byte_ids(kind, text)
    for ids in (whole * 300, whole[:1] * 900, whole[1:2] * 900):
        counting = CountingTokenizer(TOKENIZERS[kind])
        stream(counting, ids)
        assert counting.decoded <= 3 * len(ids) + 1


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a b", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a b", "c")]),
    ],
)
def test_decoders_that_look_across_tokens_are_refused_by_name(decoder: Any) -> None:
    backend: Backend = tiny.llama()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=r"CTC|Replace|Strip"):
        TextStream(Tokenizer(backend, {}, ChatTemplate({}, {})))


STOPS = st.lists(st.text("ab \n", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=st.text("ab \n", max_size=40), stops=STOPS, data=st.data())
def test_stop_strings_cut_where_the_first_one_completes_however_the_text_is_divided(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    search = StopStrings(stops)
    sent = [search.push(piece) for piece in pieces_of(data, text)]
    assert ("".join(sent) + search.flush(), search.matched) == cut(text, stops)


@given(text=st.text("ab \n", max_size=40), stops=STOPS, data=st.data())
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str], data: st.DataObject) -> None:
    search = StopStrings(stops)
    given_so_far = sent = ""
    for piece in pieces_of(data, text):
        given_so_far += piece
        sent += search.push(piece)
        if search.matched is not None:
            break
        held = given_so_far[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_follows_a_stop_string() -> None:
    search = StopStrings("END")
    assert [search.push(piece) for piece in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert search.flush() == ""
    assert search.matched == "END"


def test_an_unfinished_stop_string_is_text_after_all() -> None:
    search = StopStrings(["END", "ENOUGH"])
    assert [search.push("EN"), search.push("T EN"), search.flush()] == ["", "ENT ", "EN"]
    assert search.matched is None


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [3], 3, [None]])
def test_stop_strings_that_are_not_texts_are_refused(stop: Any) -> None:
    with pytest.raises(MisuseError, match="stop strings must be"):
        StopStrings(stop)


@every_kind
@given(data=st.data())
def test_streamed_text_ends_where_the_stop_string_begins(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    text = tokenizer.decode(ids)
    starts = st.integers(0, max(len(text) - 1, 0))
    inside = starts.flatmap(lambda start: st.integers(1, 6).map(lambda size: text[start : start + size] or "zz"))
    stops = data.draw(st.lists(inside | st.text("ab中 \ufffd", min_size=1, max_size=3), max_size=3))
    streamed = TextStream(tokenizer, stops)
    pieces = [streamed.push(token_id) for token_id in ids]
    assert ("".join(pieces) + streamed.flush(), streamed.stop_string) == cut(text, stops)
    if streamed.stop_string is not None:
        assert streamed.push(ids[0]) == streamed.flush() == ""


def test_a_stop_string_that_only_the_flushed_text_completes_still_cuts() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = TextStream(tokenizer, "x\ufffd")
    assert text.push(tokenizer.encode("x")[0]) + text.push(tokenizer.encode("🧿")[0]) + text.flush() == ""
    assert text.stop_string == "x\ufffd"
