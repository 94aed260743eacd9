"""Tokenizers made from GGUF metadata, used through the tokenizers library that reads them everywhere else."""

import json

import numpy as np
import pytest
import tokenizers

from wavekit_engines.errors import CheckpointError, UnsupportedModelError
from wavekit_engines.gguf_tokenizer import special_token_ids, tokenizer_files

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
ALPHABET = list(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre, merges=(), **more):
    """Metadata of a byte-level tokenizer with a token for every byte and every merge."""
    tokens = ["<|end|>", "<think>", *sorted(ALPHABET), *("".join(merge.split(" ")) for merge in merges)]
    kinds = [CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 2)
    named = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": np.array(kinds), "merges": list(merges)}
    return {f"tokenizer.ggml.{key}": value for key, value in {**named, **more}.items()}


def made(metadata, model_type="llama"):
    return tokenizers.Tokenizer.from_str(tokenizer_files(metadata, model_type)["tokenizer.json"].decode())


def pieces(tokenizer, text):
    return tokenizer.encode(text).tokens


def words(pre, text):
    """How a text is cut before merging."""
    return [word for word, _ in made(byte_level(pre)).pre_tokenizer.pre_tokenize_str(text)]


def test_merges_are_applied_in_their_order():
    tokenizer = made(byte_level("gpt-2", ["a b", "b c", "ab c"]))
    assert pieces(tokenizer, "abcbc") == ["abc", "bc"]
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界 😀\n").ids) == "Grüße, 世界 😀\n"


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = made(byte_level("gpt-2"))
    ids = tokenizer.encode("<think>a<|end|>").ids
    assert [ids[0], ids[-1]] == [1, 0]
    assert tokenizer.decode(ids) == "<think>a"


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact", "command-r"])
def test_digits_alone(pre):
    assert words(pre, "in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize("pre", ["gpt-2", "olmo"])
def test_digits_together(pre):
    assert words(pre, "in 2024") == ["in", "Ġ2024"]


@pytest.mark.parametrize("pre", ["llama-bpe", "dbrx", "gpt-4o"])
def test_digits_in_threes(pre):
    assert words(pre, "in 2024") == ["in", "Ġ", "202", "4"]


@pytest.mark.parametrize("pre", ["qwen2", "tekken"])
def test_digits_alone_in_newer_splits(pre):
    assert words(pre, "in 2024\n\nx") == ["in", "Ġ", "2", "0", "2", "4", "ĊĊ", "x"]


def test_contractions_of_any_case():
    assert words("llama-bpe", "WE'LL") == ["WE", "'LL"]
    assert words("gpt-4o", "we'll iPhone") == ["we'll", "Ġi", "Phone"]


def test_qwen_composes_characters():
    decomposed, composed = "e\u0301", "\u00e9"
    assert pieces(made(byte_level("qwen2")), decomposed) == pieces(made(byte_level("qwen2")), composed)
    assert pieces(made(byte_level("gpt-2")), decomposed) != pieces(made(byte_level("gpt-2")), composed)


def test_llama_3_takes_whole_words_before_merging():
    metadata = byte_level("llama-bpe", ["a b"])
    metadata["tokenizer.ggml.tokens"].append("abc")  # no merge leads to it
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    assert pieces(made(metadata), "abc") == ["abc"]
    assert pieces(made({**metadata, "tokenizer.ggml.pre": "dbrx"}), "abc") == ["ab", "c"]


def test_tokens_around_a_text():
    plain = byte_level("gpt-2", bos_token_id=0, eos_token_id=1)
    assert pieces(made(plain), "a") == ["a"]
    framed = {**plain, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert pieces(made(framed), "a") == ["<|end|>", "a", "<think>"]
    assert pieces(made(byte_level("llama-bpe", bos_token_id=0)), "a") == ["<|end|>", "a"]


def sentence_piece(**more):
    """Metadata of a SentencePiece tokenizer: pieces with scores, a token for every byte."""
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "▁a": -4.0, "ba": -4.5, "ab": -5.0, "▁ab": -6.0, "  ": -7.0}
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    kinds = [2, CONTROL] + [BYTE] * 256 + [NORMAL] * len(scored)
    named = {
        **{"model": "llama", "tokens": tokens, "token_type": np.array(kinds), "unknown_token_id": 0, "bos_token_id": 1},
        "scores": np.array([0.0] * 258 + list(scored.values()), np.float32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**named, **more}.items()}


def test_sentence_piece_joins_the_pair_that_scores_highest():
    tokenizer = made(sentence_piece())
    assert pieces(tokenizer, "ab") == ["<s>", "▁ab"]
    assert pieces(tokenizer, "aba") == ["<s>", "▁a", "ba"]
    assert pieces(made(sentence_piece(add_space_prefix=False)), "aba") == ["<s>", "a", "ba"]
    assert pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_gives_the_text_back(prefix):
    tokenizer = made(sentence_piece(add_space_prefix=prefix))
    for text in ("ab a", " a  b ", "é世 a"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_gemma_orders_pieces_by_position_and_spells_runs_of_spaces():
    metadata = sentence_piece(add_space_prefix=False)
    assert pieces(made(metadata, "gemma3_text"), "a  b") == ["<s>", "a", "▁▁", "b"]


def test_the_files_that_go_with_it():
    metadata = {**sentence_piece(eos_token_id=0), "tokenizer.chat_template": "{{ messages }}"}
    files = tokenizer_files(metadata, "llama")
    assert files["chat_template.jinja"] == b"{{ messages }}"
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "<unk>", "<unk>")


def test_all_tokens_that_end_an_answer_are_generation_defaults():
    ids = {f"tokenizer.ggml.{role}_token_id": number for role, number in (("bos", 1), ("eos", 2), ("padding", 0))}
    assert special_token_ids(ids) == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert special_token_ids({**ids, "tokenizer.ggml.eot_token_id": 7})["eos_token_id"] == [2, 7]
    assert special_token_ids({}) == {}


def test_an_unknown_split_is_refused_with_what_to_do():
    with pytest.raises(UnsupportedModelError, match=r"'superbpe' .* take the checkpoint folder"):
        tokenizer_files(byte_level("superbpe"), "llama")


@pytest.mark.parametrize("model", ["bert", "t5", None])
def test_an_unknown_kind_is_refused_with_what_to_do(model):
    with pytest.raises(UnsupportedModelError, match="take the checkpoint folder"):
        tokenizer_files({**byte_level("gpt-2"), "tokenizer.ggml.model": model}, "llama")


def test_a_file_without_a_vocabulary():
    with pytest.raises(CheckpointError, match="has no vocabulary"):
        tokenizer_files({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}, "llama")


@pytest.mark.parametrize(
    "damage",
    [
        {"bos_token_id": 100_000, "add_bos_token": True},
        {"eos_token_id": 100_000},
        {"token_type": np.array([1, 1])},
        {"scores": np.array([0.0])},
        {"scores": None},
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_an_error_of_the_file(damage):
    with pytest.raises(CheckpointError, match="GGUF file"):
        tokenizer_files(sentence_piece(**damage), "llama")


def test_a_merge_of_one_piece_is_an_error_of_the_file():
    with pytest.raises(CheckpointError, match="damaged list of merges"):
        tokenizer_files(byte_level("gpt-2", merges=["ab"]), "llama")
