"""Calibration's own ways to fail, each one line for the user; the shared ones are in `wavekit_engines.errors`."""

from wavekit_engines.errors import MisuseError, WavekitError


class PromptError(MisuseError):
    """A prompt file cannot be used at all: missing, in no known format, or with nothing usable in it."""


class TooFewTokensError(MisuseError):
    """Fewer tokens are left than a statistic needs."""


class NonFiniteStatesError(WavekitError):
    """The model's own hidden states hold NaN or infinity."""


class CalibrationFileError(MisuseError):
    """A calibration.json is missing, damaged, of a newer schema, or made for another model."""


class TraceError(MisuseError):
    """An exit trace is missing, damaged, of a newer schema, or lacks the depths asked for."""


class CalibrationPausedError(WavekitError):
    """The run stopped on purpose before it was done, by Ctrl-C or out of time, and can be resumed."""
