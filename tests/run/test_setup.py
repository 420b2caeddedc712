"""Test how the model and the processor of a recipe are built."""

import json

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.data.image import ImageProcessor
from minivlmrl.model import config_json
from minivlmrl.rewards.columns import image_and_box_sizes
from minivlmrl.run import setup
from minivlmrl.run.datasets import load_datasets
from minivlmrl.tasks import shapes
from tests.helpers import tiny
from tests.helpers.stages import ONE


@pytest.fixture
def build(home):
    return lambda *overrides: setup.build_model(load_config(home / "recipe.yaml", overrides), ONE)


def test_random_weights_depend_on_the_seed(build):
    first, again, other = (dict(build(f"--seed={seed}")[0].named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_options_of_data_reach_the_processor(build, user_data):
    _, plain = build(*user_data)
    options = "--data.image={max_pixels: 1000}", "--data.video={fps: 1}", "--sampling.stop_token_ids=[40]"
    _, changed = build(*user_data, *options)
    assert changed.sizes == {"image": {"max_pixels": 1000}, "video": {"fps": 1}}
    assert changed.stop_token_ids == (*plain.stop_token_ids, 40)


HALF = "--model.dtype=bfloat16"


@pytest.mark.parametrize(("options", "dtype"), [
    ([], torch.float32),
    (["--model.dtype=float64"], torch.float32),
    (["--model.compute_dtype=bfloat16"], torch.bfloat16),
    ([HALF], torch.bfloat16),
    ([HALF, "--model.compute_dtype=float32"], torch.float32),
    (["--model.dtype=float16"], torch.float16),
])  # fmt: skip
def test_patches_have_the_dtype_of_a_16_bit_computation(home, options, dtype):
    assert setup.patch_dtype(load_config(home / "recipe.yaml", options)) == dtype


def test_patches_of_16_bits_change_no_byte_of_a_run(run, varied_rollouts, monkeypatch, quick):
    """The vision tower rounds the patches to 16 bits in any case."""
    options = [HALF, "--stages=[dpo, grpo]", "--data.eval_rows=1"]
    options += ["--dpo.max_steps=1", "--grpo.max_steps=1", "--data.task=shapes(pairs=8)"]
    seen = []
    original = ImageProcessor.patches
    monkeypatch.setattr(ImageProcessor, "patches", lambda *given: seen.append(original(*given)) or seen[-1])
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(setup, "patch_dtype", lambda config, dtype=dtype: dtype)
        seen.clear()
        found.append((run(*options, name=str(dtype)) / "checkpoint" / "model.safetensors").read_bytes())
        assert {patches.dtype for patches, _ in seen} == {dtype}
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_the_default_box_space_depends_on_the_family(build, tmp_path, family):
    (tmp_path / "model.json").write_text(json.dumps(config_json.to_dict(tiny.config(model_type=family))))
    options = f"--model.config={tmp_path / 'model.json'}", "--data.task=shapes"
    _, plain = build(*options)
    assert plain.box_space == ("resized" if family == "qwen2_5_vl" else "thousandths")
    assert build(*options, "--data.box_space=unit")[1].box_space == "unit"
    row = shapes.Shapes(1, "a")[0]
    _, extent = image_and_box_sizes(row, row.prompt(plain), plain)
    assert (extent == (1000, 1000)) == (family != "qwen2_5_vl")


@pytest.mark.parametrize("sizes", [
    tiny.RUN_MODEL, tiny.RUN_MODEL | {"vocab_size": 1024}, tiny.RUN_QWEN3, tiny.RUN_QWEN35,
], ids=range(4))  # fmt: skip
def test_random_weights_with_a_tokenizer_trained_on_custom_rows(home, rows, tmp_path, sizes):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(sizes | {"text_config": sizes.get("text_config", {})}))
    own = [f"--model.config={file}", "--data.task=null", f"--data.train_file={rows}"]
    config = load_config(home / "recipe.yaml", own)
    datasets = load_datasets(config, {"sft": "demonstrations", "grpo": "prompts"}, ["solution"])
    processor = setup.build_processor(config, datasets)
    model = setup.build_weights(config, ONE, processor)
    stated = sizes.get("vocab_size") or sizes.get("text_config", {}).get("vocab_size")
    assert len(processor.tokenizer) < 512 and model.config.vocab_size == (stated or len(processor.tokenizer))
    assert model.config.eos_token_id == processor.tokenizer.special_tokens["<|im_end|>"]
    assert len(processor.tokenizer.encode("Name it.")) <= 4
    assert processor.decode(torch.tensor(processor.tokenizer.encode("<answer>é"))) == "<answer>é"
    with pytest.raises(ValueError, match=r"model\.config needs the tokenizer of a built-in task, or rows to train a"):
        setup.build_model(config, ONE)
