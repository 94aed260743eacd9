"""A server's life: a socket, a loop, and an orderly end.

SIGTERM or Ctrl-C: nobody is let in any more, texts under way may go on for a while, then they end where they are, and
their readers are told so in the form they expect. A second signal ends at once.
"""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from wavekit.serving.service import Service
from wavekit_engines.errors import MisuseError

_LAST_WORDS = 5  # seconds for cancelled texts to tell their readers


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        MisuseError: the address is taken, or is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or error
        raise MisuseError(f"cannot listen on {host} port {port} ({reason}): choose another --host or --port") from None
    except OverflowError:
        raise MisuseError(f"port {port} is none; they go from 0 to 65535") from None


def serve(app: FastAPI, listening: socket.socket, grace: float, started: Callable[[], None]) -> None:
    """Serve until a signal says to stop; ``started`` is called once requests are answered.

    Texts under way when it comes may take ``grace`` more seconds.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(grace) + _LAST_WORDS,
        timeout_keep_alive=30,
    )
    server = _Server(config, app.state.service, grace, started)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # the signal that ended it, raised once more when all is done
        if not server.started:
            raise


class _Server(uvicorn.Server):
    """uvicorn, which tells the service before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._grace, self._tell = service, grace, started
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        if self.started:
            self._tell()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn; a signal handler."""
        again = self.should_exit
        super().handle_exit(sig, frame)
        self.force_exit = self.force_exit or again  # uvicorn heeds a second Ctrl-C, but no second SIGTERM
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._service.drain()
        asyncio.get_running_loop().call_later(0 if self.force_exit else self._grace, self._service.cancel)
