"""``wavekit generate``: a bundle writes text."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

import wavekit
from wavekit.commands.engine_options import engine_options
from wavekit.commands.export import Boundaries
from wavekit.decoding.speculation import Mode
from wavekit_engines.atomic import write_file
from wavekit_engines.errors import MisuseError
from wavekit_engines.outputs import check_file

if TYPE_CHECKING:
    from wavekit.results import GenerationResult
    from wavekit.streams import GenerationStream


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message for the model's chat template.")
@click.option("-n", "--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off.")
@click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--frequency-penalty", type=float, default=0.0, show_default=True, help="0 is off.")
@click.option("--presence-penalty", type=float, default=0.0, show_default=True, help="0 is off.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stop", multiple=True, help="End the text before this string; may be given several times.")
@click.option(
    "--speculate",
    type=click.Choice(get_args(Mode)),
    default="auto",
    show_default=True,
    help="Who proposes tokens ahead of the model; never changes the text. auto: draft+lookup where there is a head.",
)
@click.option("--draft-depth", type=int, help="The most tokens proposed in a row.")
@click.option("--draft-top-k", type=int, help="Children of a token in the draft's tree; 1 makes it a chain.")
@click.option("--draft-tokens", type=int, help="The most tokens proposed for one pass.")
@click.option("--exits", type=Boundaries(), help="Boundaries of the exits that propose.  [default: all]")
@click.option("--no-decs", is_flag=True, help="Let a deeper exit repeat what is proposed already.")
@click.option("--least-probability", type=float, default=0.0, show_default=True, help="Of what an exit proposes.")
@click.option("--nodes", type=int, help="The most nodes explored at once.")
@click.option(
    "--threads",
    type=int,
    help="Threads an engine may use.  [default: as `wavekit tune` found here, or the cores, shared by the lanes]",
)
@click.option("--lanes", type=int, help="Stages that run at once.  [default: 1, or as `wavekit tune` found]")
@engine_options
@click.option("--trace", type=click.Path(path_type=Path), help="Write a timeline for Chrome's trace viewer there.")
@click.option("--stats", is_flag=True, help="Tell on standard error how the text was written.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, token ids, timings and speculation as JSON.")
def generate(
    bundle: Path,
    prompt: str | None,
    file: Path | None,
    chat: bool,
    speculate: Mode,
    draft_depth: int | None,
    draft_top_k: int | None,
    draft_tokens: int | None,
    exits: tuple[int, ...] | None,
    no_decs: bool,
    least_probability: float,
    nodes: int | None,
    threads: int | None,
    lanes: int | None,
    engine: str,
    device: str | None,
    trace: Path | None,
    stats: bool,
    as_json: bool,
    **choice: Any,  # of tokens, as `LLM.stream` takes it
) -> None:
    """Write text with BUNDLE after PROMPT, a file's text, or standard input.

    \b
    wavekit generate bundle "The capital of France is"
    wavekit generate bundle --chat "What is the capital of France?"
    wavekit generate bundle --file notes.txt --temperature 0.8 --top-p 0.95
    wavekit generate bundle --speculate lookup --file notes.txt
    wavekit generate bundle --speculate exits --lanes 2 --trace timeline.json "The capital of France is"
    echo "Once upon a time" | wavekit generate bundle --json
    """
    check_file(trace)
    limits = {"depth": draft_depth, "top_k": draft_top_k, "tokens": draft_tokens, "nodes": nodes}
    speculation = _speculation(speculate, exits, not no_decs, least_probability, limits)
    text = _prompt_text(prompt, file)
    timeline = wavekit.Timeline() if trace is not None else None
    llm = wavekit.load(bundle, threads=threads, lanes=lanes, engine=engine, device=device)
    asked = [{"role": "user", "content": text}] if chat else text
    stream = llm.stream(asked, **choice, speculate=speculation, timeline=timeline)
    _tell(stream, as_json)
    if timeline is not None and trace is not None:
        write_file(trace, timeline.encode())
    if stats:
        click.echo(_told(stream.result), err=True)


def _speculation(
    mode: Mode, exits: tuple[int, ...] | None, decs: bool, least_probability: float, limits: dict[str, int | None]
) -> wavekit.Speculation:
    """How to speculate; limits that are None stay what they are by default."""
    if exits is not None and "exits" not in mode:
        raise MisuseError("--exits says which exits propose, and none does here; add --speculate exits")
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    return wavekit.Speculation(mode, exits=exits, decs=decs, least_probability=least_probability, **given)


def _tell(stream: "GenerationStream", as_json: bool) -> None:
    """The text piece by piece, or the whole result at its end."""
    for piece in stream:
        if not as_json:
            click.echo(piece, nl=False)
    click.echo(json.dumps(dataclasses.asdict(stream.result), ensure_ascii=False) if as_json else "")


def _told(result: "GenerationResult") -> str:
    """How a text was written, in a few lines."""
    timings, speculation, exploration = result.timings, result.speculation, result.exploration
    commits = ", ".join(f"{count} {name}" for name, count in exploration.commits.items())
    lines = [
        f"{len(result.token_ids)} tokens, {timings.tokens_per_second:.1f} a second after the first; "
        f"{speculation.passes} passes, {speculation.tau:.2f} tokens each",
        f"{exploration.ticks} ticks, {exploration.ticks_per_token:.2f} a token; proposed first by: {commits}",
        f"{exploration.explored} nodes explored, {exploration.wasted} of them in vain, "
        f"{exploration.peak_nodes} at once at most",
    ]
    if len(exploration.stage_seconds) > 1:
        times = zip(exploration.stage_seconds, exploration.idle_seconds, strict=True)
        lines.append("stages at work / idle in ticks: " + ", ".join(f"{a:.2f} / {b:.2f} s" for a, b in times))
    return "\n".join(lines)


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise MisuseError("a prompt and --file are two prompts; give one of them")
    if prompt is not None:
        text = prompt
    elif file is not None:
        text = _read(file)
    elif sys.stdin is None or sys.stdin.isatty():
        raise MisuseError("there is no prompt: give it as an argument, with --file, or on standard input")
    else:
        text = _decoded(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise MisuseError("the prompt is empty; give at least one character")
    return text


def _read(file: Path) -> str:
    try:
        return _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise MisuseError(f"cannot read {file}: {error.strerror}") from None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MisuseError(f"{name} is not UTF-8 text; convert it first") from None
