"""Texts of a given shape: which tokens may come next in a JSON schema or a regular expression.

The grammars are llguidance's, a Rust library without dependencies; it is imported when the first shape is asked for.
Knows the vocabulary and token ids; logits only as what is masked.
"""

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wavekit.decoding.sampling import Floats
from wavekit.tokenizer import Tokenizer
from wavekit_engines.errors import MisuseError, WavekitError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MOST_TOKENIZERS = 4

# One space at most between the parts of JSON: where any number may stand, models have been seen to write nothing else.
_JSON_LAYOUT: "JsonCompileOptions" = {"whitespace_flexible": True, "whitespace_pattern": " ?"}


class Grammars:
    """Makes the shapes of texts for one tokenizer; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: length of the logits, which may be more than the tokenizer's tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._prepared: dict[frozenset[int], LLTokenizer] = {}  # by what ends a text
        self._lock = threading.Lock()

    def shape(self, json_schema: Mapping[str, Any] | str | None, regex: str | None, ends: frozenset[int]) -> "Shape":
        """The constraint for one text, which one of ``ends`` may end where it is complete.

        Raises:
            MisuseError: llguidance is not installed, or it does not understand the schema or expression.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise MisuseError(
                "json_schema and regex need the package llguidance; in a clone of wavekit: "
                "pip install -c constraints.txt -e '.[grammar]'"
            ) from None
        name = "json_schema" if regex is None else "regex"
        if regex is not None:
            if not isinstance(regex, str):
                raise MisuseError(f"regex is {regex!r}; it must be a text")
            grammar = LLMatcher.grammar_from_regex(regex)
        else:
            grammar = LLMatcher.grammar_from_json_schema(_schema_text(json_schema), defaults=_JSON_LAYOUT)
        matcher = LLMatcher(self._prepare(ends), grammar, log_level=0)
        if matcher.is_error():
            raise MisuseError(f"{name} cannot be followed: {_one_line(matcher.get_error())}")
        shape = Shape(matcher, self._vocab_size)
        if not shape.can_begin:
            raise MisuseError(f"{name} cannot be followed: no text of finite length fits it")
        return shape

    def _prepare(self, ends: frozenset[int]) -> "LLTokenizer":
        """The vocabulary as llguidance reads it; takes most of a second."""
        from llguidance import LLTokenizer

        with self._lock:
            if ends not in self._prepared:
                while len(self._prepared) >= _MOST_TOKENIZERS:
                    del self._prepared[next(iter(self._prepared))]
                text, end = self._tokenizer.to_json(), sorted(ends) or None
                self._prepared[ends] = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=end)
            return self._prepared[ends]


class Shape:
    """A `choice.Constraint`: how far one text has come in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), np.int32)

    @property
    def can_begin(self) -> bool:
        """Whether any token may come first; a schema that refers to itself without an end allows none."""
        self._mask()
        return not self._matcher.is_error() and bool(self._bits.any())

    def forbid(self, logits: Floats) -> None:
        """See `choice.Constraint`."""
        self._mask()
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size].view(bool)
        np.putmask(logits, ~allowed, -np.inf)

    def advance(self, token: int) -> bool:
        """See `choice.Constraint`."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise WavekitError(f"the text's shape cannot be followed further: {_one_line(self._matcher.get_error())}")


def _schema_text(schema: Mapping[str, Any] | str | None) -> str:
    """The schema as JSON, which it must be before llguidance sees it."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise MisuseError("json_schema must be a JSON object, such as {'type': 'object'}")
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, MisuseError):
            raise
        raise MisuseError(f"json_schema is not JSON: {_one_line(str(error))}") from None


def _one_line(message: str) -> str:
    """A message of llguidance without the dump of its state."""
    return " ".join(message.partition("<state>")[0].split())
