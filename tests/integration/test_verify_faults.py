"""Faults of the kinds that users of such tools suffer from, planted in bundles: each is caught and named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from command_line import save_text_model, wavekit_here
from draft_models import draft_of
from engines import exported
from planted_faults import bypass, edit, keys_of_single_tokens_lost, manifest_of, planted, reader, stored
from tokenizers import Tokenizer, processors

from wavekit.verification import distribution, lossless
from wavekit.verification.against_checkpoint.torch_draft import DraftText, TorchDraft
from wavekit.verification.ways import ways_of
from wavekit_calibration.training.draft_loss import Acceptance
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import write_draft
from wavekit_engines.kv_cache import KVCache

SOUND: dict[str, dict[str, Any]] = {
    "llama-untied": {},
    "qwen2-tied": {"split": (2,)},
    "qwen3-window": {"split": (2,)},
    "gemma3-tied": {"precision": "int4"},
    "gemma3-untied": {},
}
NORMED = {"fc_norm": "joint"}


@dataclasses.dataclass(frozen=True)
class Sound:
    """A model, its draft head's folder, and the bundle made from both."""

    model: Path
    draft: Path
    bundle: Path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sound]:
    folder, made = tmp_path_factory.mktemp("sound"), dict[str, Sound]()

    def make(name: str) -> Sound:
        if name not in made:
            model = save_text_model(name, folder / name, seed=1)
            draft = draft_of(open_checkpoint(str(model)), seed=2, **NORMED)
            write_draft(folder / f"{name}-draft", draft, "speculators")
            options = {"draft_precision": SOUND[name].get("precision", "fp32"), **SOUND[name]}
            bundle = exported(model, folder / f"{name}-bundle", draft=draft, **options)
            made[name] = Sound(model, folder / f"{name}-draft", bundle)
        return made[name]

    return make


def verified(
    bundle: Path, of: Sound | None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, str]]:
    """The exit code, and what the failed checks say."""
    compared = ("--checkpoint", of.model, "--draft", of.draft) if of is not None else ()
    common = ("--count", "2", "--new-tokens", "6", "--threads", "1", "--json", folder / "found.json")
    result = wavekit_here(capfd, "verify", bundle, *compared, *common)
    found = json.loads((folder / "found.json").read_text())
    assert found["verdict"] == ("FAIL" if result.returncode else "pass"), result.stderr.decode()
    failed = {f"{c['group']}: {c['name']}": c["says"] for c in found["checks"] if c["verdict"] == "FAIL"}
    return result.returncode, failed


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "_SEEDS", 40)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_bundle_passes(name: str, sound: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verified(sound(name).bundle, sound(name), tmp_path, capfd) == (0, {})


def wrong_tap(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        at = {value.name: index for index, value in enumerate(graph.outputs)}
        second, third = (graph.outputs[at[f"boundary_{k}"]] for k in (2, 3))
        node = ir.node("Identity", [second])
        third.name, node.outputs[0].name = "moved", "boundary_3"
        node.outputs[0].type, node.outputs[0].shape = third.type, third.shape
        graph.append(node)
        graph.outputs[at["boundary_3"]] = node.outputs[0]

    edit(copy, "stage_0", change)


def tap_of_another_boundary(copy: Path) -> dict[str, Any]:
    manifest = manifest_of(copy)
    assert manifest.draft is not None
    spec = dataclasses.replace(manifest.draft.spec, boundaries=(2, 3, 4))
    return {"taps": (1, 2, 3, 4), "draft": dataclasses.replace(manifest.draft, spec=spec)}


def swapped_map(copy: Path) -> None:
    ids = stored(copy, "draft", "draft.target_ids")
    ids[[5, 40]] = ids[[40, 5]]


def wrong_rope(copy: Path) -> dict[str, Any]:
    decoder = manifest_of(copy).decoder
    rope = decoder.ropes["full_attention"]
    inv_freq = tuple(float(500.0 ** (-2 * i / rope.rotary_dim)) for i in range(len(rope.inv_freq)))
    ropes = {"full_attention": dataclasses.replace(rope, inv_freq=inv_freq)}
    return {"decoder": dataclasses.replace(decoder, ropes=ropes)}


def stale_row(copy: Path) -> None:
    spec = manifest_of(copy).decoder
    packed = spec.query_size + 2 * spec.kv_size
    edit(copy, "stage_0", lambda graph: keys_of_single_tokens_lost(graph, 1, spec.query_size, packed))


def permuted_head(copy: Path) -> None:
    head = stored(copy, "head", "head")
    head[[7, 100, 200]] = head[[100, 200, 7]]


def head_of_another_model(copy: Path) -> None:
    head = stored(copy, "head", "head")
    head += 0.3 * np.random.default_rng(0).standard_normal(head.shape).astype(np.float32) * head.std()


def missing_draft_norm(copy: Path) -> None:
    edit(copy, "draft", lambda graph: bypass(graph, "draft.fc_norm"))


def wrong_eps(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        for layer in range(4):
            for role in ("attention_norm_in", "mlp_norm_in"):
                reader(graph, f"layers.{layer}.{role}").attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-3)

    edit(copy, "stage_0", change)


def missing_offset(copy: Path) -> None:
    for layer in range(6):
        stored(copy, "stage_0", f"layers.{layer}.mlp_norm_in")[:] -= 1


def missing_qk_norm(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        bypass(graph, "layers.2.q_norm")
        bypass(graph, "layers.2.k_norm")

    edit(copy, "stage_1", change)


def missing_bias(copy: Path) -> None:
    edit(copy, "stage_0", lambda graph: bypass(graph, "layers.1.qkv_bias"))


def window_off(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        inputs = {value.name: value for value in graph.inputs}
        for usage in tuple(inputs["mask_8"].uses()):
            usage.node.replace_input_with(usage.idx, inputs["mask"])

    edit(copy, "stage_0", change)


def embedding_scale_lost(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        scale = graph.initializers["embedding_scale"]
        scale.const_value = ir.Tensor(np.array(1, np.float32), name="embedding_scale")

    edit(copy, "stage_0", change)


def swapped_scales(copy: Path) -> None:
    scales = stored(copy, "stage_0", "layers.3.down.scales")
    scales[:] = -scales[::-1]


def doubled_bos(copy: Path) -> None:
    file = str(copy / "tokenizer" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(file)


def wrong_activation(copy: Path) -> None:
    def change(graph: ir.Graph) -> None:
        for node in [node for node in graph if node.op_type == "Gelu"]:
            node.attributes["approximate"] = ir.AttrString("approximate", "none")

    edit(copy, "stage_0", change)


FAULTS: dict[str, tuple[str, Callable[[Path], Any], str, str]] = {
    "wrong tap": ("llama-untied", wrong_tap, "checkpoint: boundaries", "boundary 3 does not match the checkpoint's"),
    "tap of another boundary": ("llama-untied", tap_of_another_boundary, "draft: taps", "off by one: wrong tap"),
    "swapped d2t": (
        "llama-untied",
        swapped_map,
        "draft: d2t",
        "d2t differs from the draft's: 2 of 80 entries are swapped",
    ),
    "wrong rope base": ("llama-untied", wrong_rope, "checkpoint: layers", "rotary base 500, the checkpoint's is 10000"),
    "stale cache row": (
        "llama-untied",
        stale_row,
        "engines: one token at a time",
        "stale cache row: run one token at a t",
    ),
    "permuted head": ("llama-untied", permuted_head, "checkpoint: head", "rows permuted: 3 of 320 rows are others'"),
    "head of another model": ("llama-untied", head_of_another_model, "checkpoint: head", "of another fine-tune"),
    "missing draft norm": ("llama-untied", missing_draft_norm, "draft: arithmetic", "draft.fc_norm is missing"),
    "wrong eps": ("llama-untied", wrong_eps, "checkpoint: layers", "epsilon is 0.001, the checkpoint's is 1e-06"),
    "missing norm offset": (
        "gemma3-untied",
        missing_offset,
        "checkpoint: layers",
        "offset is added twice or not at all",
    ),
    "missing q/k norm": ("qwen3-window", missing_qk_norm, "checkpoint: layers", "layer 2's attention"),
    "missing bias": ("qwen2-tied", missing_bias, "checkpoint: layers", "its qkv_bias is missing"),
    "window off in int4": ("gemma3-tied", window_off, "checkpoint: layers as stored", "the sliding window is off"),
    "window off": ("qwen3-window", window_off, "checkpoint: layers", "the sliding window is off"),
    "embedding scale lost": (
        "gemma3-tied",
        embedding_scale_lost,
        "checkpoint: embedding",
        "the embedding scale is lost",
    ),
    "swapped scales": ("gemma3-tied", swapped_scales, "checkpoint: layers", "scales swapped"),
    "BOS added twice": ("llama-untied", doubled_bos, "text: tokenizer", "BOS added twice"),
    "wrong activation": (
        "gemma3-untied",
        wrong_activation,
        "checkpoint: layers",
        "the activation is gelu, the checkpoint",
    ),
}


@pytest.fixture
def few_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of weights and graphs change all ways of writing alike, and adaptive ways measure the machine first."""
    monkeypatch.setattr(lossless, "ways_of", lambda decoder: [way for way in ways_of(decoder) if "tree" in way.name])


@pytest.mark.usefixtures("few_ways")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(
    fault: str, sound: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, plant, check, says = FAULTS[fault]
    code, failed = verified(planted(sound(name).bundle, tmp_path / "copy", plant), sound(name), tmp_path, capfd)
    assert code == 1
    assert says in failed.get(check, ""), failed


@pytest.mark.usefixtures("few_ways")
def test_a_head_that_drafts_better_one_boundary_down_has_its_layer_ids_misread(
    sound: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(self: TorchDraft, text: DraftText, depth: int, found: Acceptance, shift: int = 0) -> None:
        rows = len(text.tokens) - text.prompt - 1
        found.walk(torch.full((rows, depth), shift == -1))

    monkeypatch.setattr(TorchDraft, "walk", walk)
    code, failed = verified(sound("llama-untied").bundle, sound("llama-untied"), tmp_path, capfd)
    assert code == 1
    assert "its layer ids were read one off; `wavekit convert-draft --boundaries 0,1,2`" in failed["draft: layer ids"]


@pytest.mark.usefixtures("few_ways")
def test_a_cache_that_is_not_closed_up_is_caught_without_the_checkpoint(
    sound: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(self: KVCache, start: int, rows: Any) -> None:
        self.length = start + len(rows)

    monkeypatch.setattr(KVCache, "keep", keep)
    code, failed = verified(sound("llama-untied").bundle, None, tmp_path, capfd)
    assert code == 1
    assert "the cache is not closed up after a tree" in failed["engines: after a tree"]
    assert "caches are not closed up" in failed["decoding: known text"]
