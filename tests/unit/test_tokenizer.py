"""The tokenizer against transformers' AutoTokenizer on the same files, and what damaged files say."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, TEXTS, byte_level, gemma, llama, unigram, write_folder
from tokenizers import AddedToken

from wavekit.tokenizer import Tokenizer
from wavekit_engines.errors import BundleError, MisuseError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe? <|im_end|> 🎉"}]


def pair(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_files(folder), transformers.AutoTokenizer.from_pretrained(folder)


def assert_equal(ours: Tokenizer, reference: Any, texts: list[str]) -> None:
    for text in texts:
        for framed in (True, False):
            ids = ours.encode(text, add_special_tokens=framed)
            assert ids == reference.encode(text, add_special_tokens=framed), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == reference.vocab_size
    assert (ours.bos_token, ours.eos_token) == (reference.bos_token, reference.eos_token)
    assert (ours.bos_token_id, ours.eos_token_id) == (reference.bos_token_id, reference.eos_token_id)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: pair(write_folder(root / name, build(), config)) for name, (build, config) in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_text_and_special_tokens_equal_transformers(pairs: dict[str, tuple[Tokenizer, Any]], kind: str) -> None:
    assert_equal(*pairs[kind], TEXTS)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40))
def test_any_text_encodes_and_decodes_as_in_transformers(
    pairs: dict[str, tuple[Tokenizer, Any]], kind: str, text: str
) -> None:
    assert_equal(*pairs[kind], [text])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_ids_decode_as_in_transformers(
    pairs: dict[str, tuple[Tokenizer, Any]], kind: str, data: st.DataObject
) -> None:
    ours, reference = pairs[kind]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 5), max_size=12))
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("build", [byte_level, gemma])
def test_tokenizer_json_alone_decides_the_framing_tokens(tmp_path: Path, build: Any, flags: dict[str, bool]) -> None:
    config = {"bos_token": "<bos>" if build is gemma else "<|im_start|>", "eos_token": "<eos>", **flags}
    ours, reference = pair(write_folder(tmp_path, build(), config))
    assert_equal(ours, reference, TEXTS)
    assert (ours.encode("x")[0] == ours.bos_token_id) == (build is gemma)


def test_special_tokens_that_only_the_configuration_knows_get_transformers_ids(tmp_path: Path) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<new_bos>", "lstrip": True},
        "eos_token": "the",  # in the vocabulary, and not special there
        "pad_token": "<new_pad>",
        "additional_special_tokens": ["<x>", "<|im_end|>"],
        "image_token": "<image>",
    }
    ours, reference = pair(write_folder(tmp_path, byte_level(), config))
    texts = [*TEXTS, "a <new_bos><x> the the<image> <new_pad>"]
    assert_equal(ours, reference, texts)
    assert ours.special_ids == {index for index, token in reference.added_tokens_decoder.items() if token.special}


def test_listed_added_tokens_override_what_tokenizer_json_lacks(tmp_path: Path) -> None:
    config = {
        "eos_token": "</s>",
        "added_tokens_decoder": {
            "2": {"content": "</s>", "lstrip": False, "normalized": False, "special": False},
            "900": {"content": "<plain>", "rstrip": True, "special": False},
            "500": {"content": "<special>", "single_word": False, "special": True},
        },
    }
    ours, reference = pair(write_folder(tmp_path, llama(), config))
    assert_equal(ours, reference, [*TEXTS, "x<special> <plain>  y</s>"])


@pytest.mark.parametrize("listed", [True, False])
def test_the_special_tokens_map_counts_only_without_listed_tokens(tmp_path: Path, listed: bool) -> None:
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "<s>"}
    if listed:
        config["added_tokens_decoder"] = {"1": {"content": "<s>", "special": True}}
    write_folder(tmp_path, llama(), config)
    mapped = {"eos_token": {"content": "</s>", "lstrip": False, "normalized": False}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped), encoding="utf-8")
    ours, reference = pair(tmp_path)
    assert_equal(ours, reference, [*TEXTS, "x<pad></s>y"])
    assert ours.eos_token == ("<s>" if listed else "</s>")


def test_special_tokens_in_the_text_are_split_if_the_configuration_says_so(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "split_special_tokens": True}
    ours, reference = pair(write_folder(tmp_path, byte_level(), config))
    assert_equal(ours, reference, TEXTS)
    assert ours.eos_token_id not in ours.encode("<|im_end|>")


def test_truncation_and_padding_saved_in_tokenizer_json_do_not_touch_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    ours, reference = pair(write_folder(tmp_path, tokenizer, KINDS["byte_level"][1]))
    assert_equal(ours, reference, [*TEXTS, "a long text that is neither cut nor padded"])


def test_added_tokens_that_are_not_special_are_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("é !", special=False)])
    ours, reference = pair(write_folder(tmp_path, tokenizer, KINDS["byte_level"][1]))
    assert_equal(ours, reference, ["<think> é !é"])
    assert ours.decode(ours.encode("<think>é !é")) == "<think>é !é"


def test_a_folder_resaved_by_transformers_carries_what_its_tokenizer_classes_change(tmp_path: Path) -> None:
    # transformers 5 rebuilds LlamaTokenizer and GPT2Tokenizer from their vocabulary, whatever tokenizer.json says.
    write_folder(tmp_path / "shipped", byte_level(), {**KINDS["byte_level"][1], "tokenizer_class": "GPT2Tokenizer"})
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "shipped")
    assert Tokenizer.from_files(tmp_path / "shipped").encode("12345") == byte_level().encode("12345").ids
    reference.save_pretrained(tmp_path / "resaved")
    assert_equal(Tokenizer.from_files(tmp_path / "resaved"), reference, TEXTS)


@pytest.mark.parametrize("form", ["file", "configuration", "named", "folder"])
def test_messages_become_the_ids_that_transformers_makes(tmp_path: Path, form: str) -> None:
    config = dict(KINDS["byte_level"][1])
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML}]
    if form == "configuration":
        config["chat_template"] = CHATML
    elif form == "named":
        config["chat_template"] = named
    else:
        config["chat_template"] = "never used: files win"
    write_folder(tmp_path, byte_level(), config)
    if form in ("file", "folder"):
        (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    if form == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named[1]["template"], encoding="utf-8")
    ours, reference = pair(tmp_path)
    for prompt in (True, False):
        for tools in (None, [{"name": "größe", "parameters": {}}]):
            expected = reference.apply_chat_template(
                CHAT, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
            )
            assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt, tools=tools) == expected


def test_messages_without_a_chat_template_ask_for_plain_text(tmp_path: Path) -> None:
    ours = Tokenizer.from_files(write_folder(tmp_path, byte_level(), {}))
    with pytest.raises(MisuseError, match="plain text"):
        ours.apply_chat_template(CHAT)


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named_with_its_remedy(tmp_path: Path, missing: str) -> None:
    write_folder(tmp_path, byte_level(), {})
    (tmp_path / missing).unlink()
    with pytest.raises(BundleError, match=rf"{missing} is missing: copy it .* export the bundle again") as error:
        Tokenizer.from_files(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"version": "1.0", "model": '),
        ("tokenizer.json", b'{"version": "1.0", "model": 3}'),
        ("tokenizer.json", b""),
        ("tokenizer_config.json", b'{"bos_token": '),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": {"lstrip": true}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"one": {"content": "x"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": 3}'),
        ("tokenizer_config.json", b'{"extra_special_tokens": 3}'),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("special_tokens_map.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    write_folder(tmp_path, byte_level(), {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BundleError, match=rf"{name} cannot be read \(.+\): copy it") as error:
        Tokenizer.from_files(tmp_path)
    assert "\n" not in str(error.value)


def test_space_cleanup_is_refused_by_name_where_transformers_would_apply_it(tmp_path: Path) -> None:
    config = {"clean_up_tokenization_spaces": True}
    Tokenizer.from_files(write_folder(tmp_path / "bpe", byte_level(), config))
    with pytest.raises(UnsupportedModelError, match="clean_up_tokenization_spaces"):
        Tokenizer.from_files(write_folder(tmp_path / "unigram", unigram(), config))


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    ours = Tokenizer.from_files(write_folder(tmp_path, byte_level(), {}))
    with pytest.raises(MisuseError, match="not valid Unicode"):
        ours.encode("a\ud800")


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
def test_a_real_checkpoint_gives_the_ids_and_text_of_transformers(name: str, real_checkpoint) -> None:
    ours, reference = pair(real_checkpoint(name))
    source = Path(__file__).read_text(encoding="utf-8")
    assert_equal(ours, reference, [*TEXTS, source])
    if reference.chat_template is not None:
        for chat in (CHAT, CHAT[1:], [*CHAT, {"role": "assistant", "content": "Ja."}, CHAT[1]]):
            expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            assert ours.apply_chat_template(chat) == expected
