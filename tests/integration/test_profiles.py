"""Profiles in a bundle: one that fits is used where nobody says otherwise, any other is passed over; texts stay."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import wavekit_here
from draft_models import draft_of
from engines import exported
from tiny_models import save_tiny

import wavekit
from wavekit import profiles
from wavekit.decoding.speculation import Speculation
from wavekit.machine import Machine
from wavekit.profiles import Profile, Setting, write_profile
from wavekit_engines.bundle import Bundle, open_bundle
from wavekit_engines.checkpoint import open_checkpoint

PROMPT = [5, 17, 42, 99, 17, 42]
HERE = Machine("a processor", 4, "1.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    save_tiny("llama-untied", folder / "model")
    draft = draft_of(open_checkpoint(str(folder / "model")), seed=2)
    exported(folder / "model", folder / "bundle", draft=draft, draft_precision="fp32", split=(2,))
    exported(folder / "model", folder / "int8", precision="int8")
    return folder


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "this_machine", lambda: HERE)


def profile_of(bundle: Bundle, **setting: Any) -> Profile:
    found = Setting(**{"threads": 3, "lanes": 2, "speculation": Speculation("lookup", tokens=7), **setting})
    return Profile(HERE, profiles.digest_of(bundle), found, 1.5, "0", "2026-01-01")


@pytest.fixture
def bundle(folder: Path) -> Any:
    opened = open_bundle(folder / "bundle")
    yield opened
    for file in (folder / "bundle" / profiles.FOLDER).glob("*"):
        file.unlink()


def test_a_profile_decides_what_the_caller_leaves_open(bundle: Bundle) -> None:
    plain = wavekit.load(bundle.path, threads=1).generate(PROMPT, max_new_tokens=24, speculate="off")
    write_profile(bundle, profile_of(bundle))
    llm = wavekit.load(bundle.path)
    assert (llm.decoder.workers._lanes.count, llm.auto) == (2, Speculation("lookup", tokens=7))
    result = llm.generate(PROMPT, max_new_tokens=24)
    assert (result.speculation.mode, result.token_ids) == ("lookup", plain.token_ids)
    assert llm.generate(PROMPT, max_new_tokens=4, speculate="draft").speculation.mode == "draft"
    assert llm.generate(PROMPT, max_new_tokens=4, speculate="off").speculation.mode == "off"


@pytest.mark.parametrize("given", [{"threads": 1}, {"lanes": 1}])
def test_a_caller_who_says_threads_or_lanes_gets_no_profile(bundle: Bundle, given: dict[str, int]) -> None:
    write_profile(bundle, profile_of(bundle))
    llm = wavekit.load(bundle.path, **given)
    assert (llm.decoder.workers._lanes.count, llm.auto) == (1, Speculation())


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(changes)


def setting(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["setting"].update(changes)


def proposing(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["setting"]["speculation"].update(changes)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (change(machine=dataclasses.asdict(Machine("another", 4, "1.0"))), "of another machine (another, 4 cores"),
        (change(bundle="0" * 64), "changed after it was tuned"),
        (change(version=2), "version 2"),
        (setting(threads=5), "do not fit"),
        (setting(threads=0), "do not fit"),
        (setting(lanes=3), "do not fit"),
        (setting(lanes="two"), "cannot be read"),
        (proposing(mode="exits"), "needs exits"),
        (proposing(mode="guesses"), "cannot be read"),
        (proposing(nodes=100000), "cannot be read"),
        (proposing(mode="draft", top_k=60), "top_k is 60"),
    ],
)
def test_a_profile_that_does_not_fit_is_passed_over_with_one_line(
    bundle: Bundle, spoil: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_profile(bundle, profile_of(bundle))
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, "wavekit"):
        llm = wavekit.load(bundle.path)
    assert llm.auto == Speculation()
    assert [why in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{}" + b" " * 100_000, b"null"])
def test_a_damaged_profile_is_passed_over(bundle: Bundle, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = write_profile(bundle, profile_of(bundle))
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "wavekit"):
        assert profiles.profile_for(bundle) is None
    assert [record.getMessage().count("cannot be read") for record in caplog.records] == [1]


def test_no_profile_lets_a_bundle_write_another_text(folder: Path) -> None:
    bundle = open_bundle(folder / "int8")
    write_profile(bundle, profile_of(bundle, lanes=1))
    assert profiles.profile_for(bundle) is None
    write_profile(bundle, profile_of(bundle, lanes=1, speculation=Speculation("off")))
    assert profiles.profile_for(bundle) is not None


def test_profiles_of_other_machines_stay(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_profile(bundle, profile_of(bundle))
    other = dataclasses.replace(HERE, cores=8)
    monkeypatch.setattr(profiles, "this_machine", lambda: other)
    assert profiles.profile_for(bundle) is None
    write_profile(bundle, dataclasses.replace(profile_of(bundle), machine=other))
    assert len([*file.parent.iterdir()]) == 2
    assert profiles.profile_for(bundle) is not None


def test_inspect_shows_every_profile_and_whether_it_is_used(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    here = profile_of(bundle)
    write_profile(bundle, here)
    write_profile(bundle, dataclasses.replace(here, machine=Machine("a server", 96, "1.0")))
    (bundle.path / profiles.FOLDER / "torn.json").write_text("{")
    result = wavekit_here(capfd, "inspect", bundle.path)
    shown = " ".join(result.stdout.decode().partition("tuned for")[2].split())
    assert result.returncode == 0
    assert all(len(line) <= 100 for line in result.stdout.decode().splitlines())
    (ours,) = (part for part in shown.split("tuned for") if "a processor, 4 cores" in part)
    (theirs,) = (part for part in shown.split("tuned for") if "a server, 96 cores" in part)
    assert "lookup, tokens 7, 2 lanes x 3 threads: 1.50x plain decoding" in ours
    assert "used here unless" in ours
    assert "not used here: it is of another machine" in theirs
    assert "torn.json not used here: it cannot be read" in shown
