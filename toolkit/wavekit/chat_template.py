"""Turns chat messages into the prompt text a model was trained on, by its own Jinja template.

Contract: the text equals what transformers' ``apply_chat_template(..., tokenize=False)`` renders for the same template,
messages, tools and special tokens. Templates come with checkpoints and are untrusted programs: they run in Jinja's
immutable sandbox and see nothing but plain JSON values. Knows nothing of token ids or files.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wavekit_engines.errors import MisuseError

# Names under which a message's reasoning arrives; templates read the first, some of them the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# What a template's own code can raise while it runs, sandbox refusals and `raise_exception` included.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """The chat templates of one checkpoint, compiled when first used.

    ``templates`` maps a name to Jinja source; a checkpoint with one template calls it "default", and one named
    "tool_use" is preferred when tools are given. ``special_tokens`` ("bos_token", "eos_token", ...) become variables.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Keep the sources; nothing is compiled, so a broken template only matters to those who chat."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text for ``messages``, ready to be encoded without further special tokens.

        Each message has a string "role" and a "content" (or "tool_calls"); a None value counts as absent. ``tools`` are
        JSON schemas. ``variables`` reach the template by name and win over special tokens of the same name.
        Raises MisuseError for malformed messages, for a model without a template, and for what the template refuses.
        """
        name = self._choose(tools)
        chat = [_message(message, index) for index, message in enumerate(_chat(messages))]
        values: dict[str, Any] = {"documents": None, **self._special_tokens, **_plain(variables, "the variables")}
        values.update(messages=chat, tools=_tools(tools), add_generation_prompt=add_generation_prompt)
        template = self._compile(name)
        try:
            return template.render(values)
        except _TEMPLATE_FAILURES as error:
            reason = _one_line(error)
            raise MisuseError(f"the model's chat template does not accept these messages: {reason}") from error

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Name of the template for this call."""
        if tools is not None and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        if not self._templates:
            raise MisuseError("this model has no chat template: pass the prompt as plain text instead of messages")
        names = ", ".join(sorted(self._templates))
        raise MisuseError(f"none of this model's chat templates ({names}) is named 'default': pass plain text")

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._templates[name])
            except jinja2.TemplateSyntaxError as error:
                where = f"line {error.lineno}: {_one_line(error)}"
                raise MisuseError(
                    f"this model's chat template is not valid Jinja ({where}): pass the prompt as plain text"
                ) from error
        return self._compiled[name]

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        """The settings and helpers chat templates are written for."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks tokens to train on; for a prompt it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _chat(messages: object) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)):
        raise MisuseError(
            f"messages must be a list like [{{'role': 'user', 'content': 'Hello'}}], not {_kind(messages)}"
        )
    if not messages:
        raise MisuseError("the list of messages is empty: give at least one message")
    return messages


def _message(message: object, index: int) -> dict[str, Any]:
    """One validated message in plain values, without the keys whose value is None."""
    if not isinstance(message, Mapping):
        raise MisuseError(f"message {index} must be a dict with 'role' and 'content', not {_kind(message)}")
    present = {key: value for key, value in message.items() if value is not None}
    if not isinstance(present.get("role"), str):
        raise MisuseError(f"message {index} has no 'role': say who speaks, such as 'user', 'assistant' or 'system'")
    if "content" not in present and "tool_calls" not in present:
        raise MisuseError(f"message {index} has no 'content': give the text of the message")
    plain: dict[str, Any] = _plain(present, f"message {index}")
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise MisuseError("tools must be a list of JSON schemas (dicts), one for each tool")
    return [_plain(tool, "the tools") for tool in tools]


def _plain(value: Any, where: str) -> Any:
    """Copy ``value`` as JSON types only: an object's methods must be out of an untrusted template's reach."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            # A subclass (an enum, a numpy scalar) carries methods of its own.
            return value if type(value) is kind else getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise MisuseError(f"{where} must hold plain JSON values (text, numbers, lists, dicts), not {_kind(value)}")


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own ``tojson`` escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
