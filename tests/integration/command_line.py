"""The command line as a user runs it, in a process of its own, and small checkpoints that come with a tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wavekit.commands.main import run

COMMAND = Path(sys.executable).with_name("wavekit")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def wavekit(*arguments: str | Path, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run ``wavekit`` to its end."""
    return subprocess.run(
        [COMMAND, *arguments], input=stdin, capture_output=True, env=environment(), timeout=300, check=False, **options
    )


def wavekit_here(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run the same in this process: quicker, where there are many cases."""
    capfd.readouterr()
    given = [str(argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["wavekit", *given])
        code = run(given)
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(arguments, code, out.encode(), err.encode())


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: one thread, however many cores there are."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}


def assert_one_line(result: subprocess.CompletedProcess[bytes], code: int, *parts: str) -> None:
    """The command ended with ``code`` and nothing but one line on standard error, which holds every one of ``parts``.

    Click puts an empty line before the report of an interruption, to close the terminal's ``^C``.
    """
    lines = [line for line in result.stderr.decode().splitlines() if line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("wavekit: ")
    assert [part for part in parts if part not in lines[0]] == [], lines[0]
    assert (result.returncode, result.stdout) == (code, b"")


def byte_tokenizer() -> Tokenizer:
    """One token a byte, ids 3 to 258, behind ``<pad>``, ``<s>`` and ``</s>``."""
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def save_text_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a model of the catalogue with a tokenizer and a chat template; return its folder."""
    save_tiny(name, folder, seed)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
