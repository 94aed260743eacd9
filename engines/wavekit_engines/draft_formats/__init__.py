"""EAGLE-3 heads as checkpoints: the formats of EAGLE, SpecForge, Model-Optimizer and speculators, read and written.

`read_draft` gives the one internal form, `Draft`; `write_draft` writes it in any format; `check_target` says whether a
head goes with a model. No torch is needed, not even for ``pytorch_model.bin``.
"""

from wavekit_engines.draft_formats.check import check_target, drop_copied_embedding
from wavekit_engines.draft_formats.layouts import FORMATS, DraftFormat
from wavekit_engines.draft_formats.reader import read_draft
from wavekit_engines.draft_formats.rope_config import normalized_rope
from wavekit_engines.draft_formats.writer import write_draft

__all__ = [
    "FORMATS",
    "DraftFormat",
    "check_target",
    "drop_copied_embedding",
    "normalized_rope",
    "read_draft",
    "write_draft",
]
