"""Does it matter which boundaries feed the draft head? The same training for several sets, judged on held-out texts.

Compares what `wavekit calibrate` chose (ELSI, ELSI-C), the EAGLE-3 rule [2, N//2, N-3], the last boundary but one alone
and one random set of three: same texts, same steps, same first weights but for what the set decides, several seeds
(order of the texts, noise of the first weights). Reported is tau on held-out greedy texts, drafting chains as long as
training looked ahead, as mean and range over the seeds, and the difference to the rule seed by seed: what is smaller
than the range means nothing.

    wavekit calibrate MODEL -o calibrated
    wavekit train draft MODEL --calibration calibrated -o draft          # leaves draft/texts.jsonl
    python benchmarks/layer_choice.py MODEL calibration draft/texts.jsonl -o layer_choice.json
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from wavekit_calibration.model import open_decoder
from wavekit_calibration.result import Calibration, load_calibration
from wavekit_calibration.training.draft_data import StateStore
from wavekit_calibration.training.draft_head import DraftHead
from wavekit_calibration.training.draft_loss import Teacher
from wavekit_calibration.training.draft_start import choose_vocabulary, untrained_draft
from wavekit_calibration.training.draft_texts import read_texts, split_held_out
from wavekit_calibration.training.draft_train import DraftLearner, TrainSettings
from wavekit_calibration.training.training_loop import Trainer
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.families import decoder_spec

RULE = "EAGLE-3 rule"


def main() -> None:
    """Train every set with every seed and print the table."""
    options = _options()
    torch.set_num_threads(options.threads)
    checkpoint = open_checkpoint(options.model)
    spec = decoder_spec(checkpoint.config)
    calibration = load_calibration(options.calibration)
    calibration.check_model(checkpoint.digest())
    _, texts = read_texts(options.texts, checkpoint.digest(), spec.vocab_size)
    texts = texts[: options.count]
    train, held_out = split_held_out(texts, 0.15, seed=0)
    sets = compared_sets(calibration)
    decoder, _ = open_decoder(options.model, dtype="float32")
    folder = Path(tempfile.mkdtemp(prefix="layer-choice-"))
    try:
        store = StateStore(folder, sorted({b for chosen in sets.values() for b in chosen}))
        store.fill(texts, decoder, 8, _progress)
        d2t = choose_vocabulary(train, spec.vocab_size, options.draft_vocab)
        teacher = Teacher(
            decoder, torch.from_numpy(d2t + np.arange(len(d2t))), spec.embedding_scale, torch.device("cpu")
        )
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sets}
        for seed in range(options.seeds):
            for name, boundaries in sets.items():
                settings = TrainSettings(
                    steps_ahead=options.steps_ahead, epochs=options.epochs, learning_rate=options.learning_rate,
                    evaluate_every=10**9, seed=seed,
                )  # fmt: skip
                start = untrained_draft(checkpoint, spec, boundaries, d2t, seed)
                head = DraftHead(start.spec, max(len(text.tokens) for text in texts) + options.steps_ahead)
                head.load(start)
                learner = DraftLearner(head, teacher, store, settings, torch.device("cpu"))
                trainer = Trainer(learner, (train, held_out), settings, folder / "none.pt")
                trainer.run(None, _progress, lambda look: None)
                last = trainer.state.looks[-1]
                found[name].append({"seed": seed, "tau": last.tau, "acceptance": last.acceptance})
                print(f"\r\033[K{name} {list(boundaries)}, seed {seed}: tau {last.tau:.3f}", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "settings": {k: str(v) for k, v in vars(options).items()},
        "train": asdict(settings),
        "texts": len(train),
        "answer_tokens": sum(len(text.answer) for text in train),
        "held_out": len(held_out),
        "sets": {name: {"boundaries": sets[name], "runs": runs} for name, runs in found.items()},
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(sets, found))


def compared_sets(calibration: Calibration) -> dict[str, tuple[int, ...]]:
    """The sets by name."""
    layers = calibration.model.num_layers
    named = {name: row.boundaries for row in calibration.selection.sets for name in row.names}
    size = len(named[RULE])
    drawn = np.random.default_rng(0).choice(np.arange(1, layers), size, replace=False)
    sets = {name: named[name] for name in ("ELSI", "ELSI-C", RULE) if name in named}
    return {**sets, "last but one": (layers - 1,), "random": tuple(sorted(int(b) for b in drawn))}


def table(sets: dict[str, tuple[int, ...]], found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: tau and first-position acceptance, mean and range over seeds, best first."""
    rule = [run["tau"] for run in found[RULE]]
    lines = ["| set | boundaries | tau | over the rule | first token accepted |", "| --- | --- | --- | --- | --- |"]
    for name in sorted(found, key=lambda name: -mean(run["tau"] for run in found[name])):
        taus = [run["tau"] for run in found[name]]
        first = [100 * run["acceptance"][0] for run in found[name]]
        over = [tau - other for tau, other in zip(taus, rule, strict=True)]
        boundaries = ", ".join(map(str, sets[name]))
        lines.append(
            f"| {name} | {boundaries} | {_spread(taus, '.3f')} | {_spread(over, '+.3f')} | {_spread(first, '.1f')} % |"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{what} {done} of {total}", end="", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder or GGUF file")
    parser.add_argument("calibration", type=Path, help="folder that wavekit calibrate wrote for it")
    parser.add_argument("texts", type=Path, help="texts.jsonl that wavekit train draft wrote for it")
    parser.add_argument("-o", "--output", type=Path, help="JSON with every run")
    parser.add_argument("--count", type=int, default=300, help="texts used, held-out ones included (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every set (%(default)s)")
    parser.add_argument("--epochs", type=float, default=1.0, help="passes over the texts (%(default)s)")
    parser.add_argument("--steps-ahead", type=int, default=3, help="steps of the training-time test (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
