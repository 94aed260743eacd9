"""What is imported when: ``import wavekit`` loads nothing heavy, and decoding needs nothing that export needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import assert_one_line, environment, save_text_model
from engines import exported

import wavekit

ABSENT = ("torch", "transformers", "accelerate", "onnx", "onnx_ir", "ml_dtypes", "gguf", "huggingface_hub", "tensorrt")
BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports")
    return exported(save_text_model("llama-tied", folder / "model"), folder / "bundle", split=(2,))


def python(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, env=environment(), timeout=300, check=False
    )


def printed(code: str, *arguments: str | Path) -> str:
    result = python(code, *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_importing_wavekit_loads_no_package_but_its_own() -> None:
    code = """
import sys
before = set(sys.modules)
import wavekit
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""
    assert set(printed(code).split()) == {"wavekit", "wavekit_engines"}


def test_a_bundle_is_loaded_and_decoded_where_nothing_else_is_installed(bundle: Path) -> None:
    code = (
        BLOCKER
        + """
import json, wavekit
llm = wavekit.load(sys.argv[1], threads=1)
result = llm.generate([{"role": "user", "content": "Hello"}], max_new_tokens=12)
pieces = list(llm.stream("Hello", max_new_tokens=12, temperature=0.8, seed=4))
print(json.dumps([result.token_ids, result.text, "".join(pieces)]))
"""
    )
    llm = wavekit.load(bundle, threads=1)
    chat = llm.generate([{"role": "user", "content": "Hello"}], max_new_tokens=12)
    text = llm.generate("Hello", max_new_tokens=12, temperature=0.8, seed=4).text
    assert json.loads(printed(code, bundle)) == [list(chat.token_ids), chat.text, text]


@pytest.mark.parametrize("command", ["generate", "inspect", "--help"])
def test_commands_that_only_read_work_there_too(command: str, bundle: Path) -> None:
    arguments = {"generate": [bundle, "Hello"], "inspect": [bundle], "--help": []}[command]
    assert printed(BLOCKER + "from wavekit.commands.main import main; main()", command, *arguments)


@pytest.mark.parametrize(("command", "missing"), [("generate", "onnxruntime"), ("export", "onnx_ir")])
def test_a_package_that_a_command_lacks_is_named_with_the_extra_that_brings_it(
    command: str, missing: str, bundle: Path, tmp_path: Path
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from wavekit.commands.main import main; main()"
    arguments = [bundle, "Hello"] if command == "generate" else [bundle.parent / "model", "-o", tmp_path / "bundle"]
    extra = {"onnxruntime": "[onnxruntime]", "onnx_ir": "[export]"}[missing]
    assert_one_line(python(code, command, *arguments), 2, missing, "pip install", extra)
    assert list(tmp_path.iterdir()) == []
