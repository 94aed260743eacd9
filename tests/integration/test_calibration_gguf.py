"""A GGUF file is calibrated as the model it holds."""

from pathlib import Path

import pytest
import torch
from gguf_writer import write_gguf
from tiny_models import save_tiny

from wavekit_calibration.model import open_decoder
from wavekit_engines.errors import MisuseError


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-tied", "qwen3-untied", "granite-tied"])
def test_the_model_of_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path / "model", seed=4)
    write_gguf(model, tmp_path / "model.gguf")
    decoder, tokenizer = open_decoder(str(tmp_path / "model.gguf"))
    ids = torch.tensor([list(range(3, 40))])
    with torch.no_grad():
        torch.testing.assert_close(decoder.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert len(tokenizer) >= 3


def test_a_gguf_file_goes_on_one_device(tmp_path: Path) -> None:
    write_gguf(save_tiny("llama-tied", tmp_path / "model", seed=4), tmp_path / "model.gguf")
    with pytest.raises(MisuseError, match="name one device"):
        open_decoder(str(tmp_path / "model.gguf"), device="auto")
