"""Engine builds, never runs: SmolLM2-135M in two stages, with taps and the draft head of the examples."""

from pathlib import Path

import pytest

from wavekit_engines.bundle import Bundle, open_bundle
from wavekit_engines.checkpoint import open_checkpoint
from wavekit_engines.draft_formats import read_draft
from wavekit_engines.export import ExportOptions, export_bundle
from wavekit_engines.families import decoder_spec
from wavekit_engines.tensorrt.engine_cache import PRECISIONS, EnginePrecision
from wavekit_engines.tensorrt.engines import BuildOptions, build_engines
from wavekit_engines.tensorrt.profiles import Limits

pytest.importorskip("tensorrt_rtx", reason="engine builds need tensorrt_rtx: pip install -e '.[tensorrt]'")

DRAFT = Path(__file__).parents[2] / "examples" / "02_train_a_draft" / "draft"


@pytest.fixture(scope="module")
def bundle(smollm2_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path, checkpoint = tmp_path_factory.mktemp("real") / "bundle", open_checkpoint(str(smollm2_checkpoint))
    draft = read_draft(DRAFT, target=decoder_spec(checkpoint.config))
    export_bundle(checkpoint, path, ExportOptions(precision="fp16", split=(15,), taps=(2, 15), draft=draft))
    return open_bundle(path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_two_stages_of_smollm2_build_for_three_cards(bundle: Bundle, precision: EnginePrecision) -> None:
    options = BuildOptions(Limits(2048, 64), precision, ("8.6", "8.9", "12.0"))
    built = {one.info.part: one.info for one in build_engines(bundle, options)}
    assert set(built) == {"stage_0", "stage_1", "head", "draft"}
    for number in (0, 1):
        info, stage = built[f"stage_{number}"], bundle.manifest.stages[number]
        outputs = {tensor.name: tensor for tensor in info.outputs}
        for boundary in stage.boundaries:
            tensor = outputs[f"boundary_{boundary}"]
            assert (tensor.dtype, tensor.shape) == (PRECISIONS[precision], (1, "S", 576))
        assert (outputs[f"key_{stage.first}_out"].shape) == (1, 3, 2176, 64)
        assert sum("mha" in name for name in info.facts.fused) == 2 * 15  # attention of each layer, in two profiles
        assert info.facts.weight_bytes >= 2 * stage.graph.parameters
    assert [tensor.name for tensor in built["draft"].outputs][:3] == ["fed_back", "top_tokens", "top_logprobs"]
