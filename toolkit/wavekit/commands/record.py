"""``wavekit record``: what a bundle's exits say along its texts, and what its stages cost here."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

from wavekit.commands.extras import require
from wavekit.commands.progress import Progress, progress
from wavekit.llm import LLM, available_cores, load
from wavekit_engines.atomic import atomic_directory
from wavekit_engines.bundle import Manifest, open_bundle
from wavekit_engines.errors import MisuseError

if TYPE_CHECKING:
    from wavekit_calibration.simulation.trace import ExitTrace

TRACE, COSTS = "trace.npz", "costs.json"
_DRAFT_DEPTH = 5
_PLAIN_TOKENS, _PLAIN_ROUNDS = 48, 3


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for trace and costs.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A .txt, .jsonl or .json file.  [shipped set]")
@click.option("--count", type=click.IntRange(min=1), default=20, show_default=True, help="Prompts to answer.")
@click.option("-n", "--max-new-tokens", type=click.IntRange(min=2), default=96, show_default=True)
@click.option("--lanes", type=click.IntRange(min=1), help="Stages that run at once.  [the cores, at most the stages]")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of a stage.  [the cores, shared by the lanes]")
@click.option("--force", is_flag=True, help="Replace the folder.")
def record(
    bundle: Path,
    output: Path,
    prompts: Path | None,
    count: int,
    max_new_tokens: int,
    lanes: int | None,
    threads: int | None,
    force: bool,
) -> None:
    """Write texts with BUNDLE and note what every exit, and the draft head if there is one, says along them.

    The folder gets trace.npz and costs.json: what stages, exits and head cost here, with all lanes at work, and a
    token of plain decoding with all cores. Both are what `wavekit simulate` and `wavekit plan` read.

    \b
    wavekit record bundle -o recorded --prompts mine.jsonl
    wavekit simulate recorded/trace.npz --depths 15,30 --costs recorded/costs.json --draft-acceptance recorded
    """
    require("onnxruntime", "onnxruntime")
    manifest = open_bundle(bundle, check_hashes=False).manifest
    if manifest.exits is None:
        raise MisuseError(
            f"{bundle} has no exits to record; `wavekit add-exits` adds them, `wavekit train exits` makes them"
        )
    lanes = lanes or min(available_cores(), len(manifest.stages))
    with atomic_directory(output, force) as folder, progress("recording") as line:
        llm = load(bundle, threads=threads, lanes=lanes)
        trace = _trace(llm, _encoded(llm, prompts, count), max_new_tokens, line)
        costs = _stage_costs(llm, line)
        llm.close()
        trace.save(folder / TRACE)
        costs["plain"] = _plain(bundle, line)
        (folder / COSTS).write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")
    ends = ",".join(str(stage.last) for stage in manifest.stages)
    click.echo(f"{output}: {len(trace)} tokens of {len(trace.starts)} texts, exits at {_exits(manifest)}")
    click.echo(f"next: wavekit simulate {output / TRACE} --depths {ends} --costs {output / COSTS}")


def _exits(manifest: Manifest) -> str:
    return ",".join(map(str, manifest.exits.spec.boundaries)) if manifest.exits is not None else ""


def _encoded(llm: LLM, file: Path | None, count: int) -> list[list[int]]:
    from wavekit_calibration.prompts import read_prompts, shipped_prompts

    found = read_prompts(file) if file is not None else shipped_prompts()
    chats = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in found.prompts[:count]]
    return [llm.encode(chat) for chat in chats]


def _trace(llm: LLM, prompts: list[list[int]], max_new_tokens: int, line: Progress) -> "ExitTrace":
    from wavekit.decoding.exit_recording import record as recorded
    from wavekit_calibration.simulation.trace import ExitTrace, TraceHeader

    manifest, ends = llm.manifest, frozenset(llm.manifest.generation.stop_token_ids)
    assert manifest.exits is not None
    depth = _DRAFT_DEPTH if manifest.draft is not None else 0
    texts = []
    for number, prompt in enumerate(prompts):
        line(f"text {number + 1} of {len(prompts)}", number, len(prompts) + 2)
        texts.append(recorded(llm.decoder, prompt, max_new_tokens, ends, depth))
    header = TraceHeader(
        num_layers=manifest.decoder.num_layers,
        boundaries=manifest.exits.spec.boundaries,
        model=manifest.provenance.checkpoint,
        checkpoint_digest=manifest.provenance.checkpoint_digest,
        origin=f"texts written greedily by a bundle; exits of {manifest.exits.origin}",
    )
    return ExitTrace(
        header,
        np.concatenate([text.candidates for text in texts]),
        np.concatenate([np.array(text.written, np.int32) for text in texts]),
        np.cumsum([0, *(len(text.written) for text in texts[:-1])]).astype(np.int64),
        np.concatenate([text.draft for text in texts]) if depth else None,
    )


def _stage_costs(llm: LLM, line: Progress) -> dict[str, object]:
    """Milliseconds, as `wavekit_calibration.simulation.timing` reads them."""
    from wavekit.decoding.stage_costs import measure_stage_costs

    line("what stages cost", 1, 2)
    costs = measure_stage_costs(llm.decoder)
    found: dict[str, object] = {
        "stages": [[boundary, seconds * 1e3] for boundary, seconds in costs.stages],
        "head": costs.head * 1e3,
        "exit_head": costs.exit_head * 1e3,
        "rows": [list(pair) for pair in costs.rows],
        "overhead": costs.overhead * 1e3,
        "unit": "ms",
    }
    if llm.manifest.draft is not None:
        found["draft"] = llm.decoder.draft_costs().of(1) * 1e3
    return found


def _plain(bundle: Path, line: Progress) -> float:
    """Milliseconds of a token of plain decoding with all cores, the best of a few texts."""
    line("plain decoding", 1, 2)
    llm = load(bundle, check_hashes=False)
    prompt = [0] * 16
    speeds = [
        llm.generate(prompt, max_new_tokens=_PLAIN_TOKENS, stop_token_ids=(), speculate="off").timings.tokens_per_second
        for _ in range(_PLAIN_ROUNDS)
    ]
    llm.close()
    return 1e3 / max(speeds)
