"""Peak memory of ``wavekit export``, above that of a Python interpreter that does nothing.

    python benchmarks/export_memory.py MODEL                          # fp32 and int4
    python benchmarks/export_memory.py                                # of a random model of 300 MB, made here

Each export is a process of its own; its peak resident set is what the kernel reports when it ends (``ru_maxrss``, the
number of ``/usr/bin/time -v``). This process stays small: a child inherits its parent's peak.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_MB = 1500
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 24576}


def peak_mb(command: Sequence[str]) -> float:
    """Run a command to its end and return its peak resident memory in MB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return usage.ru_maxrss * 1024 / 1e6


def write_random_model(folder: Path) -> None:
    """Write a Llama checkpoint in fp32 with a tied head, one tensor at a time."""
    import numpy as np

    hidden, inner, vocabulary = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{prefix}{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            file.write(generator.standard_normal(shape, np.float32).data)
    attention = {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048}
    config = {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5, **SHAPE, **attention}
    (folder / "config.json").write_text(json.dumps(config))


def measure(model: str, precisions: Sequence[str], folder: str) -> bool:
    """Export at every precision, print the peaks, and say whether all are under the limit."""
    interpreter = peak_mb([sys.executable, "-c", "pass"])
    print(f"interpreter alone: {interpreter:.0f} MB")
    fits = True
    for precision in precisions:
        start = time.perf_counter()
        bundle = str(Path(folder) / "bundle")
        export = [sys.executable, "-c", "from wavekit.commands.main import main; main()", "export", model]
        above = peak_mb([*export, "-o", bundle, "--precision", precision, "--force"]) - interpreter
        seconds = time.perf_counter() - start
        written = sum(file.stat().st_size for file in Path(bundle).rglob("*") if file.is_file()) / 1e6
        print(f"{precision}: {above:.0f} MB above it, for a bundle of {written:.0f} MB in {seconds:.0f} s")
        fits &= above < LIMIT_MB
    return fits


def main() -> int:
    """Measure; exit code 1 where a peak is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint; without one, a random model is made")
    parser.add_argument("--precisions", default="fp32,int4", help="comma-separated; default: %(default)s")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_random_model(options.write)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.model is None:
            model = Path(folder) / "model"
            model.mkdir()
            subprocess.run([sys.executable, __file__, "--write", model], check=True)
        fits = measure(options.model or str(model), options.precisions.split(","), folder)
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main())
