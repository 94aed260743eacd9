"""Tokenizers of the kinds checkpoints ship, small enough to build in a test, and folders as transformers saves them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "Größe, façade, naïve: 123 words in 4 lines.\n\n    def f(x):\n        return x + 1\n",
    "中文文本和日本語のテキスト 👩‍👩‍👧‍👦 🎉🎉 e\u0301 ñ",
    "a aa aaa aaaa  two  spaces   three \t tab",
]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "the <|im_start|>dog<|im_end|> </s> <s>x",
    "naïve façade e\u0301 ñ 123456",
    "👩‍👩‍👧‍👦 family, 中文, 🎉",
    "line\n\n\ttab \u00a0nbsp \u3000wide",
    "\x00\x7f\ufffd",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM ship; no framing tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen() -> Tokenizer:
    """Byte-level BPE behind Qwen's regular expression and NFC."""
    tokenizer = byte_level()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """SentencePiece BPE without a leading space, falling back to bytes, framed by <bos>."""
    tokenizer = _byte_fallback_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _frame(tokenizer, "<bos>")
    return tokenizer


def llama() -> Tokenizer:
    """SentencePiece BPE with a leading space that decoding takes off again, framed by <s>."""
    tokenizer = _byte_fallback_bpe(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _frame(tokenizer, "<s>")
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece unigram: unknown characters are lost, words carry the space before them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Words and their ``##`` endings, with a space before every word but the first."""
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "a", "##a", "##b", ".", "n't", "中", "##🎉"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_endings() -> Tokenizer:
    """BPE of the first kind: the end of a word is part of its last token."""
    vocabulary = {piece: index for index, piece in enumerate(["a", "b", "a</w>", "b</w>", "中</w>", "🎉"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def words() -> Tokenizer:
    """Whole words, without a decoder."""
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "中": 2, "🎉": 3}, unk_token="a"))


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "byte_level": (
        byte_level,
        {
            "tokenizer_class": "TokenizersBackend",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
        },
    ),
    "qwen": (
        qwen,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
    ),
    "gemma": (
        gemma,
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
    ),
    "llama": (
        llama,
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "unigram": (
        unigram,
        {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
}


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    """Save as a checkpoint's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _byte_fallback_bpe(special: list[str]) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trainer = trainers.BpeTrainer(vocab_size=150, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _frame(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
