"""A GGUF file as a model of transformers, through wavekit's own reader.

transformers reads GGUF files too, but parses them several times and loses how some tokenizers split numbers. Here the
configuration, the weights and the tokenizer are those that an export of the same file works with.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from wavekit_engines.checkpoint import Checkpoint
from wavekit_engines.errors import CheckpointError


def open_gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model, with dequantized weights of ``dtype`` on the CPU, and its tokenizer.

    Raises:
        CheckpointError: a weight that the model has is not in the file.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    settings = dict(checkpoint.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    found = model.load_state_dict(
        {name: torch.from_numpy(checkpoint.rows(name, 0, checkpoint.shape(name)[0])) for name in checkpoint.names()},
        strict=False,
    )
    model.tie_weights()
    missing = [name for name in found.missing_keys if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing:
        raise CheckpointError(f"{checkpoint.name} has no {missing[0]}, which its architecture needs")
    model.generation_config = GenerationConfig(**checkpoint.generation_config)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in checkpoint.tokenizer_files().items():
            (Path(folder) / name).write_bytes(data)
        return model, AutoTokenizer.from_pretrained(folder)
