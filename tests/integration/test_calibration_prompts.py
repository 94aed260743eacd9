"""Every prompt format people have is read, and what is broken in it is named."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from wavekit_calibration.errors import PromptError
from wavekit_calibration.prompts import Message, Prompt, read_prompts, shipped_prompts


def write_lines(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return path


def asked(path: Path) -> list[str]:
    return [p.messages[-1].content for p in read_prompts(path).prompts]


def test_shipped_prompts_are_many_kinds_and_need_no_file() -> None:
    shipped = shipped_prompts()
    assert len(shipped.prompts) == 48
    assert len({p.task for p in shipped.prompts}) >= 10
    assert len({p.messages for p in shipped.prompts}) == 48
    assert not shipped.left_out
    assert all(p.answer is None for p in shipped.prompts)


def test_text_has_a_prompt_on_every_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\ufeffFirst prompt\n\n  Zweiter, größer \n", encoding="utf-8")
    assert asked(tmp_path / "p.txt") == ["First prompt", "Zweiter, größer"]


def test_fields_of_jsonl(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "a", "answer": "A", "task": "t"},
        {"text": "b"},
        {"question": "c", "response": "C"},
        {"instruction": "d", "input": "with this", "output": "D"},
        {"instruction": "e", "input": ""},
    )
    found = read_prompts(path).prompts
    assert [(p.messages, p.answer, p.task) for p in found] == [
        ((Message("user", "a"),), "A", "t"),
        ((Message("user", "b"),), None, ""),
        ((Message("user", "c"),), "C", ""),
        ((Message("user", "d\n\nwith this"),), "D", ""),
        ((Message("user", "e"),), None, ""),
    ]


def test_chats_end_with_the_last_user_message_and_its_reply_is_the_answer(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2")]
    path = write_lines(tmp_path / "chat.jsonl", {"messages": [{"role": r, "content": c} for r, c in turns]})
    (prompt,) = read_prompts(path).prompts
    assert prompt == Prompt(tuple(Message(r, c) for r, c in turns[:4]), "a2")


def test_mt_bench_gives_its_first_turns(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Now shorter."]},
        {"question_id": 82, "category": "math", "turns": ["1 + 1?", "Why?"], "reference": ["2", ""]},
    )
    assert asked(path) == ["Compose a post.", "1 + 1?"]
    assert [p.task for p in read_prompts(path).prompts] == ["writing", "math"]


def test_human_eval_is_read_compressed(tmp_path: Path) -> None:
    line = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n", "test": "..."}
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    assert read_prompts(path).prompts == (Prompt((Message("user", "def f(x):\n"),), "    return x\n"),)


def conversation(number: int, first: str = "human") -> dict[str, Any]:
    turns = [(first, f"question {number} größer 🎉"), ("gpt", f"answer {number}"), ("human", "and?"), ("gpt", "so.")]
    return {"id": f"c{number}", "conversations": [{"from": r, "value": v} for r, v in turns]}


@pytest.mark.parametrize("indent", [None, 2])
def test_share_gpt_is_read_item_by_item_whatever_the_chunks(
    indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sg.json"
    path.write_text(json.dumps([conversation(i) for i in range(20)], ensure_ascii=False, indent=indent), "utf-8")
    for chunk in (7, 64, 1 << 20):
        monkeypatch.setattr("wavekit_calibration.prompts._CHUNK", chunk)
        found = read_prompts(path)
        assert [p.messages[0].content for p in found.prompts] == [f"question {i} größer 🎉" for i in range(20)]
        assert [p.answer for p in found.prompts] == [f"answer {i}" for i in range(20)]
        assert not found.left_out


def test_share_gpt_that_is_cut_off_is_used_up_to_there(tmp_path: Path) -> None:
    text = json.dumps([conversation(i) for i in range(5)])
    path = tmp_path / "sg.json"
    path.write_text(text[: len(text) - 40])
    found = read_prompts(path)
    assert len(found.prompts) == 4
    assert [(line.line, line.reason) for line in found.left_out] == [
        (5, "the file is broken from this item on; what came before it is used")
    ]


def test_conversations_that_begin_with_the_answer_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sg.json"
    path.write_text(
        json.dumps([conversation(0), conversation(1, "gpt"), conversation(2, "alien"), {"conversations": []}])
    )
    found = read_prompts(path)
    assert len(found.prompts) == 1
    assert [line.line for line in found.left_out] == [2, 3, 4]
    assert "unknown speaker 'alien'" in found.left_out[1].reason


def test_a_broken_line_is_named_by_its_number_and_the_rest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [b'{"prompt": "one"}', b'{"prompt": "tw', b"", b'{"prompt": "three \xff"}', b'["four"]', b'{"other": 5}',
             b'{"prompt": 6}', b'{"prompt": "seven"}']  # fmt: skip
    path.write_bytes(b"\n".join(lines))
    found = read_prompts(path)
    assert asked(path) == ["one", "seven"]
    assert [line.line for line in found.left_out] == [2, 4, 5, 6, 7]
    assert "not JSON" in found.left_out[0].reason
    assert found.left_out[1].reason == "not UTF-8 text"


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("none.jsonl", None, "no prompt file"),
        ("p.csv", b"a,b", r"read from .txt, .jsonl and .json files"),
        ("p.txt", b"", "holds no usable prompt, it is empty"),
        ("p.jsonl", b"{\n", "holds no usable prompt; line 1: not JSON"),
        ("p.jsonl.gz", b"no gzip", "cannot be read"),
        ("p.json", b"[", "holds no usable prompt; line 1: the file is broken"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_line(
    name: str, content: bytes | None, line: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=line):
        read_prompts(tmp_path / name)
