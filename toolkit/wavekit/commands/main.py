"""``wavekit``: the group of commands, and what happens to errors.

A `WavekitError` is one line on standard error and its exit code (2 for misuse, 1 for failure). Ctrl-C, or a
request to terminate, is one line and exit code 1, whatever a library that it interrupts makes of it. So is what the
machine refuses: a full disk, a file that may not be read or written. Anything else is a bug in wavekit and keeps its
traceback.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from wavekit import __version__
from wavekit_engines.errors import WavekitError

COMMANDS = (
    "demo",
    "calibrate",
    "train",
    "convert-draft",
    "record",
    "simulate",
    "plan",
    "export",
    "build",
    "add-exits",
    "generate",
    "serve",
    "inspect",
    "verify",
    "bench",
    "tune",
)


_INTERRUPTED = "interrupted; nothing half-written was left behind"
# What the system says of files for which the program is not to blame.
_REFUSALS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG}
)


class _Interrupts:
    """Raises KeyboardInterrupt at a signal, and remembers that it did.

    A library that is interrupted in the middle of its import may turn that into an error of its own.
    """

    def __init__(self) -> None:
        self.heard = False

    def __call__(self, number: int, frame: object) -> None:
        """Handle a signal."""
        self.heard = True
        raise KeyboardInterrupt


_interrupts = _Interrupts()


class _LazyGroup(click.Group):
    """Imports a command's module when the command is used or the help lists it."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"wavekit.commands.{module}"), module)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wavekit")
def wavekit() -> None:
    """Make a language model you already have decode faster without changing one token of its output.

    \b
    wavekit demo                                   the main job on a small real model
    wavekit calibrate MODEL -o calibrated          measure it: layers to tap, depths worth an exit
    wavekit train draft MODEL -o draft             a head that foresees what the model writes
    wavekit convert-draft DRAFT -o d --to FORMAT   a draft head in another tool's format
    wavekit plan calibrated --costs costs.json     where stages should end, if that pays here
    wavekit export MODEL -o bundle                 a checkpoint becomes a bundle of engines
    wavekit generate bundle "Once upon a time"     a bundle writes text
    wavekit build bundle --compute-capability 8.9  TensorRT engines from it, with or without a GPU
    wavekit bench bundle                           how fast, in each of its modes
    wavekit tune bundle                            the fastest setting on this machine
    wavekit verify bundle                          whether it writes what it should; names what is wrong
    wavekit serve bundle                           and answers OpenAI's clients over HTTP
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code; SIGTERM interrupts it as Ctrl-C does, so that it cleans up."""
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is usual:
            signal.signal(number, _interrupts)
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result = wavekit.main(args=arguments, prog_name="wavekit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(_one_line(error), error.exit_code)
    except WavekitError as error:
        return _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail(_INTERRUPTED, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        return 1
    except OSError as error:
        if _interrupts.heard:
            return _fail(_INTERRUPTED, 1)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail("the disk is full; make room and try again", 1)
        if error.errno in _REFUSALS:
            return _fail(f"{error.filename or 'a file'}: {error.strerror}", 1)
        raise
    except Exception:
        if _interrupts.heard:
            return _fail(_INTERRUPTED, 1)
        raise


def _one_line(error: click.ClickException) -> str:
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{message} (see {context.command_path} --help)" if context else message


def _fail(message: str, code: int) -> int:
    click.echo(f"wavekit: {message}", err=True)
    return code
