"""Token ids to text while they are written: whole characters only, and nothing of a stop string.

Contract: the pieces of a text, joined, equal ``tokenizer.decode`` of all its ids, cut before the first stop string that
completes. A token costs the same wherever it stands: nothing is decoded twice except one token of context. A piece
never holds a U+FFFD that later tokens would turn into a character. Knows nothing of models; stop *tokens* are the
caller's business.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from wavekit_engines.errors import MisuseError, UnsupportedModelError


class TokenDecoder(Protocol):
    """What streaming needs of a tokenizer; ``wavekit.tokenizer.Tokenizer`` is one."""

    special_ids: frozenset[int]
    decoder_steps: list[dict[str, Any]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""
        ...

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of a token, None if the id has none."""
        ...


class TextStream:
    """The text of one generation, piece by piece.

    Feed every new token to ``push`` and send on what it returns (often "": the token ends inside a character, or its
    text may become a stop string). When generation ends for any reason, send what ``flush`` returns. Once
    ``stop_string`` is set the text is complete: ``push`` and ``flush`` return "" from then on.
    """

    def __init__(
        self, tokenizer: TokenDecoder, stop: str | Iterable[str] = (), skip_special_tokens: bool = True
    ) -> None:
        """Start an empty text; ``stop`` is one stop string or several.

        Raises MisuseError for an empty stop string, UnsupportedModelError for a tokenizer whose text cannot be written
        token by token.
        """
        self._stops = StopStrings(stop)
        self._decoder = _incremental_decoder(tokenizer)
        self._token = tokenizer.token
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        token = self._token(token_id)
        if token is None or token_id in self._skipped or self._stops.matched is not None:
            return ""
        return self._stops.push(self._decoder.push(token_id, token))

    def flush(self) -> str:
        """Return what was held back, now that no token follows.

        The bytes of an unfinished character become U+FFFD, as ``decode`` writes them, and the beginning of a stop
        string that never completed is text like any other.
        """
        if self._stops.matched is not None:
            return ""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


def token_bytes(tokenizer: TokenDecoder, token_id: int) -> bytes:
    """The bytes that one token stands for inside a text, which need not be whole characters; a special token's name.

    Nothing for an id that the vocabulary does not have.
    """
    token = tokenizer.token(token_id)
    if token is None:
        return b""
    if token_id not in tokenizer.special_ids and tokenizer.decoder_steps:
        if tokenizer.decoder_steps[0]["type"] == "ByteLevel":
            with suppress(KeyError):  # an added token, spelled as it reads
                return bytes(_BYTE_OF[character] for character in token)
        elif _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:-1], 16)])
        else:
            token = token.replace("\u2581", " ")
    return token.encode()


class StopStrings:
    """Cuts a text, given in pieces, before the first stop string in it.

    The stop string that completes first wins; of several that complete with the same character, the longest. So the
    cut depends on the text alone, never on how it was divided into pieces.
    """

    def __init__(self, stop: str | Iterable[str] = ()) -> None:
        """Take one stop string or several. Raises MisuseError for an empty one."""
        self._stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
        if not all(isinstance(text, str) and text for text in self._stops):
            raise MisuseError("stop strings must be texts of at least one character")
        self._beginnings = frozenset(text[:size] for text in self._stops for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, piece: str) -> str:
        """Return the text that is certain to come before any stop string; "" once one has been found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        sizes = range(min(self._longest, len(text)), 0, -1)
        held = next((size for size in sizes if text[-size:] in self._beginnings), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back in case it became a stop string."""
        held, self._held = self._held, ""
        return held


class _IncrementalDecoder(Protocol):
    def push(self, token_id: int, token: str) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """Byte-level BPE: every token is a run of bytes, and the text is their UTF-8 decoding."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:
        try:
            return self._utf8.decode(bytes([_BYTE_OF[character] for character in token]))
        except KeyError:  # an added token, spelled as it reads
            return self._utf8.decode(token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ContextDecoder:
    """Tokens whose text depends on the token before, and runs of byte tokens, which depend on each other.

    A run that is not UTF-8 as a whole decodes to nothing but U+FFFD, so its text is certain only when the run is over.
    """

    def __init__(self, tokenizer: TokenDecoder, byte_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._context: list[int] = []
        self._context_size = 0
        self._run: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._run.append(token_id)
        if self._byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return ""
        piece = self.flush()
        self._context = [token_id]
        self._context_size = len(self._tokenizer.decode(self._context, skip_special_tokens=False))
        return piece

    def flush(self) -> str:
        text = self._tokenizer.decode(self._context + self._run, skip_special_tokens=False)
        self._run = []
        return text[self._context_size :]


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's).

    Bytes that are visible Latin-1 characters stand for themselves, the others for U+0100 onwards, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _incremental_decoder(tokenizer: TokenDecoder) -> _IncrementalDecoder:
    """Choose by the steps that turn tokens into text; refuse steps that look further than one token back."""
    kinds = [step["type"] for step in tokenizer.decoder_steps]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return _ByteLevelDecoder()
    fused = False
    for step in tokenizer.decoder_steps:
        kind = step["type"]
        by_token = kind in ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip") and not fused
        at_start = kind == "Strip" and step["start"] <= 1 and step["stop"] == 0
        fused = fused or kind == "Fuse"
        if not (by_token or at_start or kind == "Fuse"):
            steps = " + ".join(kinds)
            raise UnsupportedModelError(
                f"the tokenizer's decoder ({steps}) changes text across tokens: wavekit cannot write it token by token"
            )
    return _ContextDecoder(tokenizer, "ByteFallback" in kinds)
