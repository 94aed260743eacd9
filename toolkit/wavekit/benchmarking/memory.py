"""The most memory that writing one text takes, in a process of its own that does nothing else.

As a program: reads a request as JSON from standard input, writes the bytes to standard output.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from wavekit.benchmarking.openings import Place
from wavekit.profiles import Setting

_STATUS = Path("/proc/self/status")
_SECONDS = 600


class _Request(msgspec.Struct):
    bundle: str
    place: Place
    setting: Setting
    prompt: tuple[int, ...]
    new_tokens: int


def peak_memory(bundle: Path, place: Place, setting: Setting, prompt: tuple[int, ...], new_tokens: int) -> int | None:
    """Resident bytes at the peak of loading a bundle and writing one text; None where that is not known.

    What a GPU holds is not counted.
    """
    request = msgspec.json.encode(_Request(str(bundle), place, setting, prompt, new_tokens))
    command = [sys.executable, "-m", "wavekit.benchmarking.memory"]
    done = subprocess.run(command, input=request, capture_output=True, timeout=_SECONDS, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else None


def peak_of_this_process() -> int | None:
    """Resident bytes at the peak; None where the system does not tell."""
    lines = _STATUS.read_text().splitlines() if _STATUS.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _serve() -> None:
    from wavekit.llm import load

    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    setting, place = asked.setting, asked.place
    llm = load(
        asked.bundle,
        threads=setting.threads,
        lanes=setting.lanes,
        check_hashes=False,  # the bench did
        engine=place.engine,
        device=place.device,
    )
    llm.generate(asked.prompt, max_new_tokens=asked.new_tokens, speculate=setting.speculation)
    sys.stdout.write(str(peak_of_this_process() or ""))


if __name__ == "__main__":
    _serve()
