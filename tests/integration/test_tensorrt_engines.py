"""Building a bundle's engines: the cache, and builders that fail, with a library that only pretends to build."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_models import save_tiny

from wavekit_engines.bundle import Bundle, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import MisuseError, WavekitError
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.tensorrt import engines
from wavekit_engines.tensorrt.engine_cache import FOLDER, entries
from wavekit_engines.tensorrt.engines import BuildOptions, build_engines
from wavekit_engines.tensorrt.profiles import Limits

OPTIONS = BuildOptions(Limits(context=40, tree=8))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    for seed in (0, 1):
        save_tiny("llama-untied", folder / "model", seed)
        export_bundle(open_checkpoint(folder / "model"), folder / str(seed), ExportOptions())
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setattr(engines, "installed", lambda: ("fake_tensorrt", "1.0"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("FAKE_TENSORRT_CALLS", str(tmp_path / "calls"))
    shutil.copytree(made / "0", tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def calls(bundle: Bundle) -> int:
    file = bundle.path.parent / "calls"
    return len(file.read_text().splitlines()) if file.exists() else 0


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix not in (".engine", ".json"))


def test_every_graph_is_built_once_and_found_the_second_time(bundle: Bundle) -> None:
    told: list[str] = []
    first = build_engines(bundle, OPTIONS, progress=lambda what, done, total: told.append(what))
    assert [built.info.part for built in first] == ["stage_0", "head"]
    assert calls(bundle) == 2
    assert "head, tactics 1 of 2" in told
    assert {built.info.facts.weight_bytes for built in first} == {12}
    second = build_engines(bundle, OPTIONS)
    assert calls(bundle) == 2
    assert [built.info for built in second] == [built.info for built in first]
    assert all(built.cached for built in second)
    assert leftovers(bundle.path / FOLDER) == []
    assert open_bundle(bundle.path)  # which stays valid with engines in it


@pytest.mark.parametrize(
    "other",
    [
        BuildOptions(Limits(context=41, tree=8)),
        BuildOptions(Limits(context=40, tree=7)),
        BuildOptions(Limits(context=40, tree=8), precision="bf16"),
    ],
)
def test_other_shapes_or_another_precision_are_other_engines(bundle: Bundle, other: BuildOptions) -> None:
    build_engines(bundle, OPTIONS)
    stages = [built for built in build_engines(bundle, other) if built.info.part.startswith("stage")]
    assert not any(built.cached for built in stages)
    assert all(built.cached for built in build_engines(bundle, OPTIONS))


def test_another_version_of_the_library_builds_anew(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    build_engines(bundle, OPTIONS)
    monkeypatch.setattr(engines, "installed", lambda: ("fake_tensorrt", "1.1"))
    assert not any(built.cached for built in build_engines(bundle, OPTIONS))


def test_other_weights_build_anew(bundle: Bundle, made: Path) -> None:
    cache = bundle.path / FOLDER
    build_engines(bundle, OPTIONS)
    assert not any(built.cached for built in build_engines(open_bundle(made / "1"), OPTIONS, cache))


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "description"])
def test_a_damaged_entry_is_built_again(bundle: Bundle, damage: str) -> None:
    first = build_engines(bundle, OPTIONS)
    engine = bundle.path / FOLDER / f"{first[1].info.name}.engine"
    if damage == "truncated":
        engine.write_bytes(engine.read_bytes()[:-1])
    elif damage == "changed":
        engine.write_bytes(b"an engina")
    elif damage == "missing":
        engine.unlink()
    else:
        engine.with_suffix(".json").write_text("{")
    assert len(entries(engine.parent)) == 1
    again = build_engines(bundle, OPTIONS)
    assert [built.cached for built in again] == [True, False]
    assert engine.read_bytes() == b"an engine"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "the builder of head was ended by SIGKILL; it may have run out of memory"),
        ("crashed", "the builder of head was ended by SIGABRT"),
        ("full", "disk of .* is full"),
        ("refused", "head: fake_tensorrt refuses to build it: no kernel for this"),
    ],
)
def test_a_builder_that_fails_is_one_line_and_the_rest_stays(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    first = build_engines(bundle, OPTIONS)
    cache = bundle.path / FOLDER
    (cache / f"{first[1].info.name}.json").unlink()
    monkeypatch.setenv("FAKE_TENSORRT", how)
    with pytest.raises(WavekitError, match=said) as raised:
        build_engines(bundle, OPTIONS)
    assert "\n" not in str(raised.value)
    assert len(entries(cache)) == 1
    assert leftovers(cache) == []
    monkeypatch.delenv("FAKE_TENSORRT")
    assert [built.cached for built in build_engines(bundle, OPTIONS)] == [True, False]


def test_an_interruption_ends_the_builder_and_leaves_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TENSORRT", "endless")

    def interrupt() -> None:
        while not calls(bundle):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, OPTIONS)
    assert leftovers(bundle.path / FOLDER) == []
    builder = int((bundle.path.parent / "calls").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(builder, 0)


def test_without_a_library_the_extra_is_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(MisuseError, match=r"need tensorrt_rtx or tensorrt, not installed here; .*\[tensorrt\]"):
        build_engines(open_bundle(made / "0"), OPTIONS)
    assert not (made / "0" / FOLDER).exists()


def test_too_little_memory_is_said_before_anything_starts(bundle: Bundle) -> None:
    with pytest.raises(WavekitError, match=r"building stage_0 takes about 0\.\d GB of memory, 0\.1 GB may be used"):
        build_engines(bundle, BuildOptions(OPTIONS.limits, memory_limit=100_000_000))
    assert calls(bundle) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BuildOptions(Limits(300, 8)), "--max-context 300: the model's context is 256"),
        (BuildOptions(Limits(0, 8)), "an engine for no tokens"),
        (BuildOptions(OPTIONS.limits, "bf16", ("7.5",)), r"compute capability 7\.5 has no bf16"),
        (BuildOptions(OPTIONS.limits, "fp16", ("ampere",)), "--compute-capability ampere"),
        (BuildOptions(OPTIONS.limits, "fp16", ("8.9",)), "builds for the GPU of this machine only"),
    ],
)
def test_what_cannot_be_built_is_refused(bundle: Bundle, options: BuildOptions, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        build_engines(bundle, options)
