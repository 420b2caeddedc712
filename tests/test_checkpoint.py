"""Checkpoints both ways with transformers, and what is wrong with a folder is said by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_oracle_model import their_inputs

from minivlmrl.data import shapes
from minivlmrl.model.batch import pack
from minivlmrl.model.checkpoint import load_model, load_processor, random_model, save_checkpoint
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL

import tiny

RECIPE_MODEL = "recipes/shapes_model.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as train.py writes it."""
    model, processor = random_model(RECIPE_MODEL, shapes.tokenizer(), seed=0)
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    save_checkpoint(path, tiny.telling_weights(model), processor)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def logits(model, rows):
    return model.lm_head(model(pack(rows, [[] for _ in rows], model.config)))


def shape_prompts(folder, count=3):
    processor = load_processor(folder)
    rows = [shapes.Shapes(count, "test")[i] for i in range(count)]
    return [processor(row.messages, row.images) for row in rows]


def test_what_we_save_loads_in_transformers_with_equal_logits(folder):
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    theirs, info = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = load_model(folder)
    for prompt in shape_prompts(folder):
        inputs = their_inputs(prompt)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == ours.config.image_token_id).long()
        with torch.no_grad():
            expected = theirs(**inputs).logits[0]
            assert (logits(ours, [prompt]) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_saved_tokenizer_and_image_processor_load_in_transformers(folder):
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "I see green squares, 12 of them"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == load_processor(folder).tokenizer.encode(text)
    assert tokenizer.eos_token == "<|im_end|>"
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    assert (images.patch_size, images.merge_size) == (7, 2)


def test_saving_and_loading_is_exact(folder):
    model, processor = load_model(folder), load_processor(folder)
    again = folder.parent / "again"
    save_checkpoint(again, model, processor)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(load_file(again / "model.safetensors")[name], tensor)
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert load_processor(again).image_processor == processor.image_processor


@pytest.mark.parametrize("new_names", [False, True], ids=["hub names", "names of transformers >= 4.52"])
def test_shards_load(copy, new_names):
    weights = load_file(copy / "model.safetensors")
    expected = {name: p.clone() for name, p in load_model(copy).named_parameters()}
    (copy / "model.safetensors").unlink()

    def renamed(name):
        if not new_names or name == "lm_head.weight":
            return name
        return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.")

    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({renamed(n): weights[n] for n in weights if files[n] == file}, copy / file)
    index = {"metadata": {}, "weight_map": {renamed(name): file for name, file in files.items()}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, p in load_model(copy).named_parameters():
        assert torch.equal(p, expected[name])


def test_a_tied_head_is_stored_once_and_shared(tmp_path):
    values = json.loads(Path(RECIPE_MODEL).read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "tied.json").write_text(json.dumps(values))
    model, processor = random_model(tmp_path / "tied.json", shapes.tokenizer(), seed=0)
    save_checkpoint(tmp_path / "tied", model, processor)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    loaded = load_model(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    # some folders store the tied head as well
    edit_weights(tmp_path / "tied", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    loaded = load_model(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_dtype_of_the_parameters(copy):
    assert load_model(copy).lm_head.weight.dtype == torch.float32  # as config.json says
    model = load_model(copy, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    hidden = logits(model, shape_prompts(copy))
    exact = logits(load_model(copy), shape_prompts(copy))
    assert (hidden.float() - exact).square().mean().sqrt() < 0.03 * exact.square().mean().sqrt()


@pytest.mark.parametrize(
    "hidden, layers, heads, ffn, vocab, tied, expected",
    [
        (2048, 36, (16, 2), 11008, 151936, True, 3_754_622_976),  # Qwen2.5-VL-3B-Instruct
        (3584, 28, (28, 4), 18944, 152064, False, 8_292_166_656),  # 7B
    ],
    ids=["3B", "7B"],
)
def test_the_hubs_sizes_have_the_known_number_of_parameters(hidden, layers, heads, ffn, vocab, tied, expected):
    config = ModelConfig.from_dict({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": tied, "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16",
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
            "out_hidden_size": hidden, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    })  # fmt: skip
    with torch.device("meta"):
        model = Qwen2_5_VL(config)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert config.vision_config.patch_dim == 1176


def edit_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w.pop("visual.merger.ln_q.weight"), "missing.*visual.merger.ln_q.weight"),
        (lambda w: w.update(extra=torch.ones(1)), "unexpected tensor extra"),
        (lambda w: w.update({"lm_head.weight": torch.ones(3, 128)}), r"lm_head.weight has shape \(3, 128\)"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_wrong_tensor_is_named(copy, change, says):
    edit_weights(copy, change)
    with pytest.raises(ValueError, match=says):
        load_model(copy)


@pytest.mark.parametrize(
    "file, content, says",
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", b"{", "config.json: not JSON"),
        ("config.json", b'{"model_type": "llama"}', "model_type is 'llama'"),
        ("config.json", b'{"model_type": "qwen2_5_vl"}', "vocab_size is missing"),
        ("model.safetensors", None, "model.safetensors: no such file"),
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0garbage", "not a whole safetensors file"),
    ],
)
def test_a_broken_file_is_named(copy, file, content, says):
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_model(copy)


def test_a_cut_weight_file_is_named(copy):
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_model(copy)


def test_a_failed_save_leaves_the_checkpoint_before_it(copy, monkeypatch):
    model, processor = load_model(copy), load_processor(copy)
    before = (copy / "model.safetensors").read_bytes()

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("minivlmrl.model.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(copy, model, processor)
    assert (copy / "model.safetensors").read_bytes() == before
    load_model(copy)
