"""The errors a user can mend, each one clear line: what is wrong and how to fix it.

The command line prints the line alone, without a traceback, and exits with ``exit_code``. Anything else that escapes
is a bug in wavekit and keeps its traceback.
"""


class WavekitError(Exception):
    """Something failed that was asked for correctly: a corrupt file, a full disk, an engine that died."""

    exit_code = 1


class MisuseError(WavekitError, ValueError):
    """What was asked for makes no sense: a missing path, a boundary out of range, an unsupported architecture."""

    exit_code = 2


class CheckpointError(WavekitError):
    """A checkpoint's files are damaged or contradict each other."""


class UnsupportedModelError(MisuseError):
    """A checkpoint describes arithmetic that wavekit does not know; the message names the field."""


class BundleError(WavekitError):
    """A bundle is damaged, incomplete, or was written by a newer wavekit."""


class ContextLengthError(MisuseError):
    """The prompt, or prompt plus answer, is longer than the model's context."""
