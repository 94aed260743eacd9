"""A GGUF file's tokenizer as the files Hugging Face keeps it in: ``tokenizer.json`` and what goes with it.

A GGUF file holds the vocabulary, perhaps the merges, and the names of a kind (``tokenizer.ggml.model``) and of a way to
split text (``tokenizer.ggml.pre``); how these split is known to llama.cpp alone and written down here. A name that is
not in the table is refused: a tokenizer that is almost right writes text that is almost right.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wavekit_engines.errors import CheckpointError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4
_ADVICE = "take the checkpoint folder that the file was converted from"
_SPACE = "\u2581"  # how SentencePiece spells a space

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_words(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _by_cased_words(suffix: str, digits: str) -> str:
    words = "|".join(word + suffix for word in _WORDS_BY_CASE)
    return rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


@dataclass(frozen=True)
class _Split:
    """How text is cut before byte-level merging."""

    pattern: str | None = None
    """A regular expression; None: that of GPT-2."""
    single_digits: bool = False
    """Digits are cut off one by one first."""
    nfc: bool = False
    whole_words_first: bool = False
    """A word that is a token is that token, whatever the merges would make of it."""
    adds_bos: bool = False
    """Where the file does not say."""


_LLAMA3 = _Split(_by_words("{1,3}"), whole_words_first=True, adds_bos=True)
_SPLITS = {
    **dict.fromkeys(("gpt-2", "olmo"), _Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _Split(single_digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_by_words("{1,3}"))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(_by_words(""), nfc=True)),
    "gpt-4o": _Split(_by_cased_words(f"{_CONTRACTION}?", "{1,3}")),
    "tekken": _Split(_by_cased_words("", ""), whole_words_first=True, adds_bos=True),
}


def tokenizer_files(metadata: Mapping[str, Any], model_type: str) -> dict[str, bytes]:
    """``tokenizer.json``, ``tokenizer_config.json`` and, where the file has one, ``chat_template.jinja``.

    Raises:
        UnsupportedModelError: the kind of tokenizer or its way to split text is not known here.
        CheckpointError: the metadata lacks the vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, ordered_by_position=model_type.startswith("gemma"))
    else:
        raise UnsupportedModelError(f"GGUF tokenizers of kind {kind!r} are not supported; {_ADVICE}")
    files = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(metadata), ensure_ascii=False, indent=2).encode(),
    }
    template = metadata.get("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` (all that end an answer) and ``pad_token_id``, those the file names."""
    ids = {role: metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom", "padding")}
    ends = list(dict.fromkeys(ids[role] for role in ("eos", "eot", "eom") if ids[role] is not None))
    named = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {key: value for key, value in named.items() if value is not None}


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise UnsupportedModelError(
            f"the pre-tokenizer {pre!r} of a GGUF file is not known (known: {known}); {_ADVICE}"
        )
    split = _SPLITS[pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if split.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False})
    steps.append({**byte_level, "use_regex": split.pattern is None})
    tokens = _tokens(metadata)
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", [])]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("the GGUF file has a damaged list of merges: download it again")
    return {
        **_frame(metadata, tokens, bos_by_default=split.adds_bos),
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=split.whole_words_first),
    }


def _sentence_piece(metadata: Mapping[str, Any], ordered_by_position: bool) -> dict[str, Any]:
    tokens = _tokens(metadata)
    if ordered_by_position:
        # Gemma's files spell runs of spaces as they are, and list pieces in the order they were merged.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores: Iterable[float] = (-number for number in range(len(tokens)))
    else:
        scores = _for_each_token(metadata, "scores")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not ordered_by_position))
    spell: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    unspell = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = _bpe(tokens, _implied_merges(tokens, scores))
    return {
        **_frame(metadata, tokens, bos_by_default=True),
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spell]}
        if prefix
        else spell,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": unspell},
        "model": {**model, "unk_token": _token(tokens, unknown), "fuse_unk": True, "byte_fallback": True},
    }


def _implied_merges(tokens: list[str], scores: Iterable[float]) -> list[list[str]]:
    """Every way to put a token together from two others, best score first, then longest left part first.

    SentencePiece joins the pair whose result scores highest; a list of merges in that order makes the same choices.
    """
    ids = {token: number for number, token in enumerate(tokens)}
    ranked = sorted(zip(scores, tokens, strict=True), key=lambda ranked: -ranked[0])
    merges = []
    for _, equals in itertools.groupby(ranked, key=lambda ranked: ranked[0]):
        ways = [
            [token[:cut], token[cut:]]
            for _, token in equals
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        merges.extend(sorted(ways, key=lambda way: (-len(way[0]), ids["".join(way)])))
    return merges


def _frame(metadata: Mapping[str, Any], tokens: list[str], bos_by_default: bool) -> dict[str, Any]:
    """The parts every tokenizer has: added tokens, and what is put around a text."""
    kinds = _for_each_token(metadata, "token_type")
    added = [
        {
            **{"id": number, "content": tokens[number], "single_word": False, "lstrip": False, "rstrip": False},
            **{"normalized": False, "special": int(kind) == _CONTROL},
        }
        for number, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    around: dict[str, list[Any]] = {"bos": [], "eos": []}
    special = {}
    for role, default in (("bos", bos_by_default), ("eos", False)):
        number = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if number is not None and metadata.get(f"tokenizer.ggml.add_{role}_token", default):
            token = _token(tokens, number)
            around[role] = [{"SpecialToken": {"id": token, "type_id": 0}}]
            special[token] = {"id": token, "ids": [number], "tokens": [token]}
    sequences = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": added},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*around["bos"], sequences[0], *around["eos"]],
            "pair": [*around["bos"], *sequences, *around["eos"]],
            "special_tokens": special,
        },
    }


def _bpe(tokens: list[str], merges: list[list[str]], ignore_merges: bool = False) -> dict[str, Any]:
    return {
        **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
        **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges},
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": merges,
    }


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _token(tokens: list[str], number: int) -> str:
    if not 0 <= number < len(tokens):
        raise CheckpointError(f"the GGUF file names token {number} of a vocabulary of {len(tokens)}: download it again")
    return tokens[number]


def _for_each_token(metadata: Mapping[str, Any], key: str) -> Any:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None or len(values) != len(_tokens(metadata)):
        raise CheckpointError(f"the GGUF file lacks tokenizer.ggml.{key} for some of its tokens: download it again")
    return values


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _tokens(metadata)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    named = {f"{role}_token": _token(tokens, number) for role, number in ids.items() if number is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named}
