"""Prompts to measure a model on, from the files people have.

A prompt is a list of chat messages and, where the file holds one, an answer. Read are:

- ``.txt``: one prompt a line, blank lines ignored;
- ``.jsonl``: one object a line: ``prompt``, ``text``, ``question`` or ``instruction`` (with ``input``), and optionally
  ``answer``, ``response`` or ``output``; or a chat, ``messages`` of ``role`` and ``content`` (everything up to the last
  user message is the prompt, the assistant's reply to it the answer); or a ShareGPT conversation;
- MT-Bench's ``question.jsonl`` (``turns``; the first turn only) and HumanEval's ``HumanEval.jsonl`` (``prompt``,
  ``canonical_solution``);
- ``.json``: an array of such objects, as ShareGPT ships. It is read item by item, and reading stops at a broken item;
- any of them with ``.gz`` behind.

A line that cannot be used is left out and reported by its number; the rest is used. A small set of prompts, written for
this project and dedicated to the public domain (CC0 1.0), comes with the package. Knows no tokenizer.
"""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, cast

from wavekit_calibration.errors import PromptError

SHIPPED_LICENCE = "CC0-1.0"
_PROMPT_FIELDS = ("prompt", "text", "question", "instruction")
_ANSWER_FIELDS = ("canonical_solution", "answer", "response", "output")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_CHUNK = 1 << 20
_BEFORE_FIRST = re.compile(r"\ufeff?\s*\[?\s*")
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Message:
    """One turn of a chat; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """What the model is asked, and the answer to it if the file gives one."""

    messages: tuple[Message, ...]
    answer: str | None = None
    task: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A line (or, in a JSON array, an item) that could not be used, counted from 1."""

    line: int
    reason: str


@dataclass(frozen=True)
class PromptFile:
    """The usable prompts of one file, in its order, and what was left out."""

    name: str
    prompts: tuple[Prompt, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def sha256(self) -> str:
        """Of the prompts and answers themselves, whatever file they came in."""
        texts = [[*((m.role, m.content) for m in p.messages), p.answer] for p in self.prompts]
        return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()


class _UnusableError(Exception):
    """Why one line is left out."""


def shipped_prompts() -> PromptFile:
    """Return the prompts that come with the package."""
    data = files("wavekit_calibration").joinpath("data", "prompts.jsonl").read_bytes()
    return _collect("shipped prompts", _objects_by_line(iter(data.splitlines())))


def read_prompts(path: Path) -> PromptFile:
    """Read a prompt file of any of the formats above; the format follows from the name and each line's fields.

    Raises:
        PromptError: no such file, a name that tells no format, or nothing usable in it.
    """
    if not path.is_file():
        raise PromptError(f"no prompt file {path}; give a .txt, .jsonl or .json file (or .gz of one)")
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with cast(IO[bytes], opener(path, "rb")) as stream:
            if kind == ".txt":
                found = _collect(path.name, _objects_of_text(stream))
            elif kind == ".jsonl":
                found = _collect(path.name, _objects_by_line(stream))
            elif kind == ".json":
                found = _collect(path.name, _objects_of_array(stream))
            else:
                raise PromptError(f"{path.name}: prompts are read from .txt, .jsonl and .json files (or .gz of one)")
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{path.name} cannot be read: {error}") from None
    if not found.prompts:
        why = f"; line {found.left_out[0].line}: {found.left_out[0].reason}" if found.left_out else ", it is empty"
        raise PromptError(f"{path.name} holds no usable prompt{why}")
    return found


def _collect(name: str, items: Iterator[tuple[int, Any]]) -> PromptFile:
    prompts: list[Prompt] = []
    left_out: list[LeftOut] = []
    for number, item in items:
        try:
            if isinstance(item, _UnusableError):
                raise item
            prompts.append(_prompt_of(item))
        except _UnusableError as reason:
            left_out.append(LeftOut(number, str(reason)))
    return PromptFile(name, tuple(prompts), tuple(left_out))


def _objects_of_text(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            text = _decode(line)
            yield number, {"prompt": text.strip()} if isinstance(text, str) else text


def _objects_by_line(lines: Iterator[bytes] | IO[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        text = _decode(line)
        if isinstance(text, str):
            try:
                yield number, json.loads(text)
            except ValueError as error:
                yield number, _UnusableError(f"not JSON ({error})")
        else:
            yield number, text


def _decode(line: bytes) -> str | _UnusableError:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _UnusableError("not UTF-8 text")


def _objects_of_array(stream: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Items of a JSON array, holding little more than a chunk of its text; ends with a reason where it breaks."""
    decoder = json.JSONDecoder()
    text, at, number, ended = "", 0, 0, False
    while True:
        at = (_BETWEEN if number else _BEFORE_FIRST).match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            return
        try:
            item, stop = decoder.raw_decode(text, at)
            whole = ended or stop < len(text)
        except ValueError:
            whole = False
        if whole:
            number, at = number + 1, stop
            yield number, item
        elif ended:
            yield number + 1, _UnusableError("the file is broken from this item on; what came before it is used")
            return
        else:
            more = _complete_utf8(stream.read(_CHUNK), stream)
            text, at, ended = text[at:] + more, 0, not more


def _complete_utf8(chunk: bytes, stream: IO[bytes]) -> str:
    """Decode a chunk, reading the rest of a character that its end cuts."""
    for _ in range(4):
        try:
            return chunk.decode("utf-8")
        except UnicodeDecodeError as error:
            rest = stream.read(1) if error.end == len(chunk) else b""
            if not rest:
                break
            chunk += rest
    return chunk.decode("utf-8", errors="replace")


def _prompt_of(item: Any) -> Prompt:
    """Turn one object into a prompt, by the fields it has."""
    if not isinstance(item, dict):
        raise _UnusableError("not a JSON object")
    task = item.get("task") or item.get("category") or ""
    task = task if isinstance(task, str) else ""
    if "messages" in item:
        return _prompt_of_chat(item["messages"], "role", "content", task)
    if "conversations" in item:
        return _prompt_of_chat(item["conversations"], "from", "value", task, first_turn=True)
    if "turns" in item:
        turns = item["turns"]
        text = turns[0] if isinstance(turns, list) and turns else None
        return Prompt((Message("user", _text(text, "turns")),), task=task)
    name = next((f for f in _PROMPT_FIELDS if f in item), None)
    if name is None:
        raise _UnusableError("no prompt in it (looked for prompt, text, question, instruction, messages, turns)")
    text = _text(item[name], name)
    if name == "instruction" and isinstance(item.get("input"), str) and item["input"].strip():
        text = f"{text}\n\n{item['input']}"
    answer = next((item[f] for f in _ANSWER_FIELDS if isinstance(item.get(f), str) and item[f].strip()), None)
    return Prompt((Message("user", text),), answer, task)


def _prompt_of_chat(turns: Any, role: str, content: str, task: str, first_turn: bool = False) -> Prompt:
    """Take everything up to the first or the last user message, and the reply to it."""
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise _UnusableError("the conversation is not a list of turns")
    messages: list[Message] = []
    for turn in turns:
        speaker = _SHAREGPT_ROLES.get(str(turn.get(role)))
        if speaker is None:
            raise _UnusableError(f"a turn by an unknown speaker {turn.get(role)!r}")
        messages.append(Message(speaker, _text(turn.get(content), content)))
    asked = [i for i, m in enumerate(messages) if m.role == "user"]
    if not asked or next(m.role for m in messages if m.role != "system") != "user":
        raise _UnusableError("the conversation does not begin with the user")
    last = asked[0] if first_turn else asked[-1]
    reply = messages[last + 1] if last + 1 < len(messages) else None
    answer = reply.content if reply is not None and reply.role == "assistant" else None
    return Prompt(tuple(messages[: last + 1]), answer, task)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _UnusableError(f"{field} is empty or no text")
    return value
