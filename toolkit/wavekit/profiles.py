"""Profiles: how `wavekit tune` found a bundle to run fastest on one machine, kept beside its manifest.

``profiles/<key>.json`` lies in the bundle and is no part of what the manifest seals: losing it, damaging it or copying
it to another machine costs speed at most. It says how many threads and lanes to open a bundle with and what
``speculate="auto"`` means, and is checked against the bundle and the machine whenever it is read; one that does not fit
is passed over. Nothing in it can change a text.
"""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from wavekit.decoding.speculation import Speculation
from wavekit.machine import Machine, available_cores, this_machine
from wavekit.telemetry import logger
from wavekit_engines.atomic import write_file
from wavekit_engines.bundle import MANIFEST, Bundle, Manifest, sha256
from wavekit_engines.errors import MisuseError

FORMAT = "wavekit-profile"
VERSION = 1
FOLDER = "profiles"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Setting:
    """How a bundle is opened, and who proposes where a caller leaves that to wavekit."""

    threads: int
    lanes: int = 1
    speculation: Speculation = field(default_factory=Speculation)


@dataclass(frozen=True)
class Profile:
    """The setting found for a machine; ``speed`` is over plain decoding with all cores."""

    machine: Machine
    bundle: str
    """SHA-256 of the manifest it was measured with."""
    setting: Setting
    speed: float
    wavekit: str
    created: str
    format: str = FORMAT
    version: int = VERSION


def holds_for(engine: str, device: str | None) -> bool:
    """Whether profiles say anything about this engine and device: `wavekit tune` measures ONNX Runtime on the CPU."""
    return engine == "onnxruntime" and device in (None, "cpu")


def opening(bundle: Bundle, threads: int | None, lanes: int | None, use_profile: bool) -> Setting:
    """How to open a bundle: as told, or where neither number is given as this machine's profile says, if there is one.

    Otherwise there is one lane, and every lane gets an equal share of the cores.
    """
    if threads is None and lanes is None and use_profile:
        profile = profile_for(bundle)
        if profile is not None:
            return profile.setting
    lanes = lanes or 1
    return Setting(threads or max(1, available_cores() // lanes), lanes)


def profile_for(bundle: Bundle) -> Profile | None:
    """The bundle's profile of this machine, or None; one that cannot be used is told of in a line of the log."""
    machine, folder = this_machine(), bundle.path / FOLDER
    if not folder.is_dir():
        return None
    file = folder / f"{machine.key}.json"
    if not file.is_file():
        logger.info("no profile in %s is of this machine (%s): `wavekit tune` makes one", folder, machine)
        return None
    profile, problem = _checked(file, bundle, machine)
    if problem is not None:
        logger.warning("the profile %s is ignored: %s; `wavekit tune` makes a new one", file, problem)
        return None
    logger.info("opening as %s says", file)
    return profile


def all_profiles(bundle: Bundle) -> list[tuple[str, Profile | None, str | None]]:
    """Every profile in a bundle: its file's name, what it says if it can be read, and why it is not used, if so."""
    machine = this_machine()
    return [(file.name, *_checked(file, bundle, machine)) for file in sorted((bundle.path / FOLDER).glob("*.json"))]


def write_profile(bundle: Bundle, profile: Profile) -> Path:
    """Put a profile into its bundle, in the place of an older one of that machine.

    Raises:
        WavekitError: the bundle cannot be written, or the disk is full.
    """
    folder = bundle.path / FOLDER
    check_writable(bundle)
    folder.mkdir(exist_ok=True)
    file = folder / f"{profile.machine.key}.json"
    write_file(file, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return file


def check_writable(bundle: Bundle) -> None:
    """Raises MisuseError where no profile can be put into a bundle."""
    folder = bundle.path / FOLDER
    if not os.access(folder if folder.is_dir() else bundle.path, os.W_OK):
        raise MisuseError(f"{bundle.path} cannot be written, so a profile cannot be kept in it: copy the bundle first")


def digest_of(bundle: Bundle) -> str:
    """What tells that a profile was measured with this very bundle."""
    return sha256(bundle.path / MANIFEST)


def speculation_keeps_texts(manifest: Manifest) -> bool:
    """Whether drafts of any kind leave the texts of a bundle as they are, token for token.

    Engines below fp32 round passes of one row otherwise than longer ones. Those that bring a draft head never run one
    row alone; the others do in plain decoding, and there speculation may choose another token where two are near.
    """
    engine = manifest.engine
    return {engine.precision, engine.head_precision} == {"fp32"} or manifest.draft is not None


def _checked(file: Path, bundle: Bundle, machine: Machine) -> tuple[Profile | None, str | None]:
    """A profile, and why it cannot be used on a machine, if so."""
    try:
        profile = _read(file)
        return profile, _problem(profile, bundle, machine)
    except (OSError, MisuseError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, f"it cannot be read ({error})"


def _read(file: Path) -> Profile:
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise MisuseError("it is too large for a profile")
    profile = msgspec.json.decode(data, type=Profile)
    exits = profile.setting.speculation.exits
    if exits is None:
        return profile
    speculation = replace(profile.setting.speculation, exits=tuple(exits))
    return replace(profile, setting=replace(profile.setting, speculation=speculation))


def _problem(profile: Profile, bundle: Bundle, machine: Machine) -> str | None:
    """Why a profile does not fit, or None."""
    manifest, setting = bundle.manifest, profile.setting
    if (profile.format, profile.version) != (FORMAT, VERSION):
        return f"it is a {profile.format} of version {profile.version}, not a {FORMAT} of version {VERSION}"
    if profile.machine != machine:
        return f"it is of another machine ({profile.machine})"
    if profile.bundle != digest_of(bundle):
        return "the bundle was changed after it was tuned"
    if not 1 <= setting.threads <= machine.cores or not 1 <= setting.lanes <= len(manifest.stages):
        return f"{setting.threads} threads on {setting.lanes} lanes do not fit here"
    return _unfit(setting.speculation, manifest)


def _unfit(speculation: Speculation, manifest: Manifest) -> str | None:
    exits = manifest.exits.spec.boundaries if manifest.exits is not None else ()
    try:
        mode = speculation.resolved(manifest.draft is not None, exits)
    except MisuseError as error:
        return str(error)
    if mode != "off" and not speculation_keeps_texts(manifest):
        return "speculation may change the texts of this bundle"
    if manifest.draft is not None and (speculation.top_k or 1) > manifest.draft.top_k:
        return f"its top_k is {speculation.top_k}, this bundle's head scores {manifest.draft.top_k} tokens"
    return None
