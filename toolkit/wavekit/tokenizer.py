"""Text to token ids and back, from the tokenizer files of a checkpoint or bundle.

Contract: ids and text equal what transformers' generic fast tokenizer gives for the same folder. ``tokenizer.json``
alone says how text is split and which tokens frame it; as in transformers 5, ``add_bos_token`` and ``add_eos_token`` of
``tokenizer_config.json`` are not consulted beside it. Settings that would change the text and are not applied here are
refused by name. Knows nothing of models or generation.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from wavekit.chat_template import ChatTemplate
from wavekit_engines.errors import BundleError, MisuseError, UnsupportedModelError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Encodes and decodes; safe to share between threads once made."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate,
    ) -> None:
        """Wrap a prepared ``backend``; ``special_tokens`` maps roles such as "bos_token" to token text."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decoder_steps = _decoder_steps(backend)

    @classmethod
    def from_files(cls, folder: str | Path) -> "Tokenizer":
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and, where present, the special token map and templates.

        Raises BundleError for a missing or damaged file, UnsupportedModelError for a setting that is not understood.
        """
        folder = Path(folder)
        backend = _read_backend(folder / "tokenizer.json")
        config_file = folder / "tokenizer_config.json"
        config = _read_object(config_file)
        special_tokens_map = _optional_object(folder / "special_tokens_map.json")
        try:
            named, extra = _special_tokens(config, special_tokens_map)
            _declare_special_tokens(backend, config.get("added_tokens_decoder"), named, extra)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _damaged(config_file, f"its special tokens are malformed: {error}") from error
        _refuse_cleanup(backend, config)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        special_tokens = {role: token.content for role, token in named.items()}
        template = ChatTemplate(_chat_templates(folder, config.get("chat_template"), config_file), special_tokens)
        return cls(backend, special_tokens, template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``, framed by the model's special tokens (such as a leading bos) if asked.

        Raises MisuseError for text with lone surrogates, which no tokenizer can represent.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            if not isinstance(text, str):
                raise
            raise MisuseError("the text is not valid Unicode (it holds lone surrogates): decode it as UTF-8") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; ids without a token are skipped, invalid UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return the ids of ``messages`` as the model's chat template lays them out; see ``ChatTemplate.render``."""
        text = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def to_json(self) -> str:
        """Return the whole tokenizer as ``tokenizer.json`` writes it, special tokens declared elsewhere included."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, before decoding; None if the id has none."""
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model's vocabulary; tokens added beside it are not counted, as in transformers."""
        size: int = self._backend.get_vocab_size(with_added_tokens=False)
        return size

    @property
    def bos_token(self) -> str | None:
        """The token that starts a text, if the model has one."""
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, if the model has one."""
        return self._special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of ``bos_token``."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of ``eos_token``."""
        return self._id(self.eos_token)

    def _id(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise _missing(file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise _damaged(file, str(error)) from error


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise _missing(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(file, "it does not hold a JSON object")
    return content


def _optional_object(file: Path) -> dict[str, Any]:
    return _read_object(file) if file.exists() else {}


def _missing(file: Path) -> BundleError:
    return BundleError(f"{file} is missing: copy it from the checkpoint, or export the bundle again")


def _damaged(file: Path, reason: str) -> BundleError:
    summary = " ".join(reason.split())
    return BundleError(f"{file} cannot be read ({summary}): copy it from the checkpoint, or export the bundle again")


def _special_tokens(
    config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]
) -> tuple[dict[str, tokenizers.AddedToken], list[tokenizers.AddedToken]]:
    """Tokens with a role (by role) and further special tokens.

    The separate map is a leftover of older checkpoints: it counts only where the configuration lists no tokens itself.
    """
    sources = [config] if "added_tokens_decoder" in config else [config, special_tokens_map]
    named: dict[str, tokenizers.AddedToken] = {}
    extra: list[tokenizers.AddedToken] = []
    for source in sources:
        for key, value in source.items():
            if key in ("extra_special_tokens", "additional_special_tokens"):
                if isinstance(value, Mapping):
                    named.update({role: _special_token(token) for role, token in value.items()})
                else:
                    extra += [_special_token(token) for token in value or ()]
            elif key in _NAMED_TOKENS and value is None:
                named.pop(key, None)
            elif key in _NAMED_TOKENS or (key.endswith("_token") and isinstance(value, str)):
                named[key] = _special_token(value)
    return named, extra


def _special_token(value: Any) -> tokenizers.AddedToken:
    """A special token from its text or from its serialized form."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    return _serialized_token({**value, "special": True})


def _serialized_token(value: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {key: value[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value}
    return tokenizers.AddedToken(value["content"], **flags)


def _declare_special_tokens(
    backend: tokenizers.Tokenizer,
    listed: Mapping[str, Any] | None,
    named: Mapping[str, tokenizers.AddedToken],
    extra: Iterable[tokenizers.AddedToken],
) -> None:
    """Make the backend treat as special what the configuration calls special, adding tokens it lacks.

    Order decides the ids of tokens that ``tokenizer.json`` lacks: those the configuration lists, by their ids, then
    tokens with a role, then the others.
    """
    added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
    known = {token.content for token in added.values()}
    if listed is not None:
        added = {int(token_id): _serialized_token(token) for token_id, token in listed.items()}
    tokens = [added[token_id] for token_id in sorted(added)]
    known.update(token.content for token in tokens)
    for token in (*named.values(), *extra):
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    roles = {token.content for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in roles
    backend.add_tokens(tokens)


def _refuse_cleanup(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Refuse space clean-up after decoding; for BPE, the usual kind, transformers ignores the setting, and so do we."""
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = isinstance(backend.model, tokenizers.models.BPE)
    if config.get("clean_up_tokenization_spaces") and (not is_bpe or config.get(forced)):
        raise UnsupportedModelError(
            "tokenizer_config.json asks for clean_up_tokenization_spaces, which wavekit does not apply: "
            "set it to false if the model can do without"
        )


def _chat_templates(folder: Path, configured: object, config_file: Path) -> dict[str, str]:
    """Chat templates by name; files of their own take the place of those in the configuration."""
    files = {"default": folder / "chat_template.jinja"}
    files.update((file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja")))
    templates = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    if templates or configured is None:
        return templates
    if isinstance(configured, str):
        return {"default": configured}
    entries = configured if isinstance(configured, list) else [configured]
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {}
        name, source = fields.get("name"), fields.get("template")
        if not isinstance(name, str) or not isinstance(source, str):
            raise _damaged(config_file, "chat_template is neither a text nor a list of named templates")
        templates[name] = source
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise _damaged(file, str(error)) from error


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps in order, as ``tokenizer.json`` describes them, nested sequences laid flat."""
    if backend.decoder is None:
        return []

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step["type"] != "Sequence":
            return [step]
        return [inner for part in step["decoders"] for inner in flat(part)]

    return flat(json.loads(backend.decoder.__getstate__()))
