"""A short benchmark of every engine and device that is here: plain, EAGLE-3, DEX and hybrid decoding.

A small random model, and a checkpoint or bundle if one is given. Heads and exits that a model lacks are random ones:
they are hardly ever right, so their rows show that texts stay the same and what proposing costs, not what it wins.
What cannot run is a line of the table that says why. Called by `scripts/gpu_check.sh`.
"""

import argparse
import importlib.util
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

import wavekit
from wavekit import Speculation
from wavekit.decoding.lattice import LATTICE_ROWS
from wavekit_engines.atomic import write_file
from wavekit_engines.bundle import MANIFEST, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.errors import WavekitError
from wavekit_engines.export import ExportOptions, export_bundle

MODES: dict[str, Speculation] = {
    "plain": Speculation("off"),
    "EAGLE-3": Speculation("draft", depth=4, adaptive=False),
    "DEX": Speculation("exits"),
    "hybrid": Speculation("draft+exits", depth=4, adaptive=False),
}
PLACES = [("onnxruntime", "cpu"), ("torch", "cpu"), ("torch", "cuda"), ("onnxruntime", "cuda"), ("tensorrt", "cuda")]
PROMPT = [5, 9, 14, 20, 27, 35, 44, 54]
ROUNDS = 3
CONTEXT = 1024
MOST_BYTES = 1 << 30
MODEL_SECONDS = 90.0

Row = dict[str, Any]


def main() -> None:
    """Measure, print the table, write the JSON."""
    options = _options()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, bundle in _bundles(Path(folder), options.model, rows):
            rows += _measured(name, bundle, options.tokens, Path(folder))
    _print(rows)
    machine = {"python": platform.python_version(), "processor": platform.machine(), "gpu": _gpu()}
    result = {"machine": machine, "gpu_tests_exit_code": options.tests, "rows": rows}
    write_file(options.output, json.dumps(result, indent=1).encode())
    print(f"written to {options.output}")
    if any(row.get("same_text") is False for row in rows):
        sys.exit("a text differs from that of plain decoding")


def _bundles(folder: Path, model: Path | None, rows: list[Row]) -> Iterator[tuple[str, Path]]:
    """Bundles by name, made when their turn comes."""
    if importlib.util.find_spec("transformers") is None:
        rows.append({"model": "random", "skipped": "transformers, which makes the random model, is not installed"})
    else:
        from tiny_models import save_tiny

        save_tiny("llama-untied", folder / "model")
        for precision in ("fp32", "fp16"):
            yield f"random {precision}", _exported(folder / "model", folder / precision, precision)
    if model is None:
        rows.append({"model": "real", "skipped": "no checkpoint or bundle was given"})
    elif (model / MANIFEST).is_file():
        yield model.name, model
    else:
        yield f"{model.name} fp16", _exported(model, folder / "real", "fp16")


def _exported(model: Path, bundle: Path, precision: str) -> Path:
    """A bundle of two stages with a random draft head and a random exit."""
    from draft_models import draft_of
    from exit_models import random_exits

    checkpoint = open_checkpoint(str(model))
    middle = int(checkpoint.config["num_hidden_layers"]) // 2
    parts = dict.fromkeys(("precision", "draft_precision", "exit_precision"), precision)
    exits = random_exits(checkpoint, (middle,), vocab=None)
    export_bundle(checkpoint, bundle, ExportOptions(split=(middle,), draft=draft_of(checkpoint), exits=exits, **parts))
    return bundle


def _measured(name: str, bundle: Path, tokens: int, folder: Path) -> list[Row]:
    """A row for every engine, device and mode."""
    rows: list[Row] = []
    for engine, device in PLACES:
        began, here = time.monotonic(), {"model": name, "engine": engine, "device": device}
        if device == "cuda" and _gpu() is None:
            rows.append({**here, "skipped": "there is no GPU"})
            continue
        try:
            if engine == "tensorrt":
                bundle, began = _with_engines(bundle, folder), time.monotonic()
            llm = wavekit.load(bundle, lanes=2, engine=engine, device=device, check_hashes=False)
            plain = None
            for mode, speculation in MODES.items():
                if time.monotonic() - began > MODEL_SECONDS / len(PLACES):
                    rows.append({**here, "mode": mode, "skipped": "no time left"})
                    continue
                row, text = _timed(llm, speculation, tokens)
                plain = text if mode == "plain" else plain
                rows.append({**here, "mode": mode, **row, "same_text": text == plain})
            llm.close()
        except WavekitError as error:
            rows.append({**here, "skipped": str(error)})
    return rows


def _timed(llm: Any, speculation: Speculation, tokens: int) -> tuple[Row, tuple[int, ...]]:
    """Tokens a second after the first, the median of rounds, tau, and the text. The first round is not counted."""
    found = [
        llm.generate(PROMPT, max_new_tokens=tokens, stop_token_ids=(), speculate=speculation) for _ in range(1 + ROUNDS)
    ]
    speeds = [result.timings.tokens_per_second for result in found[1:]]
    row = {"tokens_per_second": statistics.median(speeds), "range": [min(speeds), max(speeds)]}
    return {**row, "tau": found[-1].speculation.tau}, tuple(found[-1].token_ids)


def _gpu() -> str | None:
    """The name of the GPU, as torch knows it, or else its compute capability."""
    from wavekit_engines.tensorrt.cuda import capability_here

    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    capability = capability_here()
    return f"compute capability {capability}" if capability is not None else None


def _with_engines(bundle: Path, folder: Path) -> Path:
    """A bundle with its TensorRT engines, or a copy of it with engines that are built now."""
    from wavekit_engines.tensorrt.engine_cache import FOLDER
    from wavekit_engines.tensorrt.engines import BuildOptions, build_engines
    from wavekit_engines.tensorrt.profiles import Limits

    if (bundle / FOLDER).is_dir():
        return bundle
    manifest = open_bundle(bundle, check_hashes=False).manifest
    if sum(info.bytes for info in manifest.files.values()) > MOST_BYTES:
        raise WavekitError(f"building engines takes minutes; first: wavekit build {bundle}")
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(bundle, copy)
    limits = Limits(min(CONTEXT, manifest.decoder.max_positions), LATTICE_ROWS)
    build_engines(open_bundle(copy, check_hashes=False), BuildOptions(limits, _precision(manifest.engine.precision)))
    return copy


def _precision(of_bundle: str) -> Any:
    """float32 where the bundle is, to compare the same; float16 for all others."""
    return "fp32" if of_bundle == "fp32" else "fp16"


def _print(rows: list[Row]) -> None:
    print(f"{'model':<16}{'engine':<13}{'device':<8}{'mode':<9}{'tokens/s':>9}  tau   text")
    for row in rows:
        place = (
            f"{row.get('model', ''):<16}{row.get('engine', ''):<13}{row.get('device', ''):<8}{row.get('mode', ''):<9}"
        )
        if "skipped" in row:
            print(f"{place}NOT RUN: {row['skipped']}")
        else:
            same = "same" if row["same_text"] else "DIFFERS"
            print(f"{place}{row['tokens_per_second']:>9.1f}  {row['tau']:<5.2f} {same}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every engine and device that is here, in every mode.")
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint folder or a bundle")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tests", type=int, help="how pytest ended, to write down")
    parser.add_argument("--tokens", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
