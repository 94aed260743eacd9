"""The process that builds one engine: ``python -m wavekit_engines.tensorrt.worker MODULE LOG``, the job on its input.

A builder can crash, run out of memory or hang on a request to stop; in a process of its own that is a message and not
the end of the program. It writes one JSON object a line: steps done, and at the end what went wrong, if anything did.
"""

import json
import sys
from pathlib import Path

import msgspec

from wavekit_engines.errors import WavekitError
from wavekit_engines.tensorrt.library import Job, build


def main() -> None:
    """Build what is asked for."""
    module, log = sys.argv[1:]
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)

    def told(phase: str, done: int, total: int) -> bool:
        try:
            _say(phase=phase, done=done, total=total)
        except OSError:  # nobody waits for the engine any more
            return False
        return True

    try:
        build(module, job, Path(log), told)
    except WavekitError as error:
        _say(error=str(error), exit_code=error.exit_code)
    except OSError as error:
        _say(errno=error.errno or 0, error=error.strerror or str(error))
    else:
        _say(done=True)


def _say(**message: object) -> None:
    sys.__stdout__.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
