"""The command that runs now, as a line for a shell: what bundles, reports and records say that made them."""

import shlex
import sys


def command_line() -> str:
    """``wavekit`` and its arguments, quoted where a shell needs it."""
    return shlex.join(["wavekit", *sys.argv[1:]])
