"""The examples run as their READMEs say."""

import subprocess
import sys
from pathlib import Path

from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.export import ExportOptions, export_bundle

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_embed(smollm2_checkpoint: Path, tmp_path: Path) -> None:
    export_bundle(open_checkpoint(str(smollm2_checkpoint)), tmp_path / "bundle", ExportOptions(precision="int8"))
    command = [sys.executable, str(EXAMPLES / "01_embed" / "embed.py"), str(tmp_path / "bundle")]
    written = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "Paris" in written.splitlines()[0]
    assert len(written.splitlines()) >= 4
