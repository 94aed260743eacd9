"""Typed access to a model configuration that remembers which keys were understood.

A configuration is a dictionary whose every key may change what the model computes. `ConfigReader` hands out values with
one clear error for each way they can be wrong, and at the end `refuse_unread` names whatever nobody asked for. It knows
no model family.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from wavekit_engines.errors import MisuseError, UnsupportedModelError

# Keys that never change what an inference pass computes: bookkeeping, training, and defaults of text generation.
_HARMLESS_KEYS = frozenset(
    {
        *(
            "architectures",
            "model_type",
            "auto_map",
            "tokenizer_class",
            "transformers_version",
            "transformers.js_config",
        ),
        *("_name_or_path", "_model_name_or_path", "name_or_path", "_commit_hash", "base_model_name_or_path"),
        *("torch_dtype", "dtype", "use_cache", "pretraining_tp", "torchscript", "use_bfloat16", "tie_encoder_decoder"),
        *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "cache_implementation"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout", "classifier_dropout"),
        *(
            "initializer_range",
            "gradient_checkpointing",
            "use_flash_attention_2",
            "is_llama_config",
            "_flash_attn_2_enabled",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "cls_token_id",
            "decoder_start_token_id",
        ),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task"),
        *("return_dict", "output_attentions", "_output_attentions", "output_hidden_states", "is_decoder", "prefix"),
        *("max_length", "min_length", "max_new_tokens", "do_sample", "num_beams", "num_beam_groups", "early_stopping"),
        *(
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "diversity_penalty",
        ),
        *("num_return_sequences", "no_repeat_ngram_size", "return_dict_in_generate", "remove_invalid_values"),
        *("unsloth_fixed", "unsloth_version", "keys_to_ignore_at_inference", "model_max_length", "max_sequence_length"),
    }
)


class ConfigReader:
    """One configuration, with the defaults of its family for keys that the file leaves out."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Read from `config`; a key that it lacks takes its value from `defaults`."""
        self._config = config
        self._defaults = defaults
        self._read: set[str] = set()

    def value(self, key: str) -> Any:
        """The raw value, None where neither the configuration nor the family's defaults have one."""
        self._read.add(key)
        return self._config[key] if key in self._config else self._defaults.get(key)

    def ignore(self, keys: Iterable[str]) -> None:
        """Declare that `keys` are known to change nothing in this family."""
        self._read.update(keys)

    def integer(self, key: str) -> int:
        """A positive integer that has to be there."""
        value = self.optional_integer(key)
        if value is None:
            raise MisuseError(f"the model's configuration lacks {key}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None where the key is absent or null."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise MisuseError(f"{key} in the model's configuration must be a positive integer, not {value!r}")
        return value

    def number(self, key: str) -> float:
        """A positive number that has to be there."""
        value = self.optional_number(key)
        if value is None:
            raise MisuseError(f"the model's configuration lacks {key}")
        return value

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None where the key is absent or null."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise MisuseError(f"{key} in the model's configuration must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value; absent means false."""
        return bool(self.value(key))

    def mapping(self, key: str) -> dict[str, Any]:
        """A copy of a nested dictionary; absent or null is an empty one."""
        value = self.value(key)
        if value is not None and not isinstance(value, Mapping):
            raise MisuseError(f"{key} in the model's configuration must be a dictionary, not {value!r}")
        return dict(value or {})

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry for each of `layers` layers, or None where the key is absent or null."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) < layers:
            raise MisuseError(f"{key} in the model's configuration must list one value for each of {layers} layers")
        return list(value[:layers])

    def refuse_unread(self) -> None:
        """Raise for the keys that nobody read, that are set, and that are not known to be harmless.

        Raises:
            UnsupportedModelError: naming those keys.
        """
        unread = [
            f"{key}={_brief(value)}"
            for key, value in self._config.items()
            if value and key not in self._read and key not in _HARMLESS_KEYS
        ]
        if unread:
            raise UnsupportedModelError(
                f"the model's configuration sets {', '.join(unread)}: wavekit does not know what that changes"
            )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
