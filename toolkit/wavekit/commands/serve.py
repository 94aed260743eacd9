"""``wavekit serve``: an HTTP server with the interface of OpenAI's completions."""

import ipaddress
import logging
from pathlib import Path

import click

from wavekit.commands.engine_options import engine_options
from wavekit.commands.extras import require
from wavekit_engines.errors import MisuseError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; loopback unless told.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 picks a free one.")
@click.option("--name", help="The model's name in requests.  [default: the bundle's folder]")
@click.option("--api-key", envvar="WAVEKIT_API_KEY", help="Ask for this key; better set in WAVEKIT_API_KEY.")
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Web pages that may use it: https://a.org; * any.")
@click.option("--max-concurrent", type=click.IntRange(1, 1024), default=4, show_default=True, help="Texts at a time.")
@click.option("--queue", type=click.IntRange(0), default=64, show_default=True, help="Requests that may wait.")
@click.option("--max-body", type=click.IntRange(1), default=1 << 20, show_default=True, help="Bytes of a request.")
@click.option(
    "--max-seconds", type=click.FloatRange(0, min_open=True), help="End texts after so long.  [default: never]"
)
@click.option(
    "--grace", type=click.FloatRange(0, 3600), default=10, show_default=True, help="Seconds for texts to end."
)
@click.option(
    "--threads", type=int, help="Threads an engine may use.  [default: as `wavekit tune` found here, or all cores]"
)
@engine_options
@click.option("--prefix-memory", type=click.IntRange(0), default=256, show_default=True, help="MB of earlier texts.")
@click.option("--quiet", is_flag=True, help="Do not log every request.")
def serve(
    bundle: Path,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    cors: tuple[str, ...],
    max_concurrent: int,
    queue: int,
    max_body: int,
    max_seconds: float | None,
    grace: float,
    threads: int | None,
    engine: str,
    device: str | None,
    prefix_memory: int,
    quiet: bool,
) -> None:
    """Serve BUNDLE over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a page at /.

    \b
    wavekit serve bundle
    WAVEKIT_API_KEY=secret wavekit serve bundle --host 0.0.0.0 --port 8080 --max-concurrent 8
    """
    if api_key == "":
        raise MisuseError("--api-key is empty: give a key, or leave it out and ask for none")
    require("serve", "fastapi", "uvicorn", "prometheus_client")
    from wavekit.llm import load
    from wavekit.serving.app import Limits, create_app
    from wavekit.serving.server import bind
    from wavekit.serving.server import serve as run

    with bind(host, port) as listening:
        _log(logging.WARNING if quiet else logging.INFO)
        llm = load(
            bundle,
            threads=threads,
            concurrency=max_concurrent,
            prefix_memory=prefix_memory << 20,
            engine=engine,
            device=device,
        )
        try:
            for temperature in (0.0, 1.0):  # what is made or measured once is there before the first request
                llm.generate([0], max_new_tokens=2, temperature=temperature)
            model = name or bundle.resolve().name
            app = create_app(llm, model, Limits(max_concurrent, queue, max_body, max_seconds), api_key, cors)
            port = listening.getsockname()[1]
            shown = f"[{host}]" if ":" in host else host
            if not (api_key or _is_loopback(host)):
                click.echo(
                    f"wavekit: anybody who reaches {shown}:{port} may use it; --api-key asks for a key", err=True
                )
            run(app, listening, grace, lambda: click.echo(f"serving {model} on http://{shown}:{port}"))
        finally:
            llm.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _log(level: int) -> None:
    """Tell of requests from ``level`` up, and of what goes wrong elsewhere."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("wavekit.serve").setLevel(level)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that leaves in mid-stream
