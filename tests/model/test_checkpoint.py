"""Test that model folders load here and in transformers, and that faulty folders are refused."""

import json
import math
import shutil
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.config.options import LoRAOptions
from minivlmrl.distributed.saving import save_model
from minivlmrl.extras.families.qwen3_5 import CenteredRMSNorm, GatedDeltaNet
from minivlmrl.files import INDEX
from minivlmrl.model import build, checkpoint, lora, value_head
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.families.registry import FAMILIES, find_family
from minivlmrl.tasks import shapes
from tests.helpers import tiny

# files of a Hub folder other than the weights, with their own chat template and stop ids
FOREIGN = {
    "chat_template.json": b'{"chat_template": "{{ messages }}"}', "merges.txt": b"#version: 0.2\n", "vocab.json": b"{}",
    "tokenizer_config.json": b'{"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 131072}', "LICENSE": b"Terms",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model, processor = build.random_model("recipes/shapes_model.json", shapes.tokenizer(), seed=0)
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    save_model(path, tiny.telling_weights(model), processor)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


@pytest.mark.parametrize(("read", "first"), [
    (load_model, "read_tensors"), (load_processor, "load_tokenizer"), (value_head.load_value_model, "read_tensors"),
])  # fmt: skip
def test_a_folder_that_is_replaced_while_it_is_read_gives_no_mixture(copy, monkeypatch, read, first):
    """A run saves its checkpoint again after the first file was read."""
    model, processor = load_model(copy), load_processor(copy)
    save_file({"score.weight": torch.zeros(1, model.config.hidden_size)}, copy / "score.safetensors")
    original = getattr(checkpoint, first)

    def read_and_replace(file, *options):
        monkeypatch.setattr(checkpoint, first, original)
        content = original(file, *options)
        save_model(copy, model, processor)
        return content

    monkeypatch.setattr(checkpoint, first, read_and_replace)
    with pytest.raises(ValueError, match="copy was replaced while it was read, for example by a run that saves its"):
        read(copy)


@pytest.fixture(scope="module")
def processor():
    return tiny.processor()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_weights(model_type):
    """Linear layers keep the standard deviation of inputs, and all layers of a residual stream add as much as one."""
    model = find_family(model_type).build_model(tiny.config(layers=3, model_type=model_type))
    build.initialize(model, torch.Generator().manual_seed(0))
    maps = 0
    for name, module in model.named_modules():
        if isinstance(module, CenteredRMSNorm):
            assert not module.weight.any(), name
        elif isinstance(module, GatedDeltaNet):
            halves = math.log(2) / (module.A_log.exp() * torch.nn.functional.softplus(module.dt_bias))
            assert halves.diff().max() < 0 and 0.4 < halves[-1] < 0.5 and 690 < halves[0] < 700
        elif isinstance(module, torch.nn.RMSNorm | torch.nn.LayerNorm):
            assert (module.weight == 1).all(), name
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert "norm" in name or name.endswith((".ln_q.weight", ".A_log", ".dt_bias")), name
        else:
            spread = 0.02 if "embed_tokens" in name or "pos_embed" in name else parameter[0].numel() ** -0.5
            ends = ("o_proj", "out_proj", "down_proj", "fc2", "attn.proj")
            if "merger" not in name and any(part in name for part in ends):
                # attention and MLP of each layer add to the residual stream
                spread /= (2 * (4 if "visual" in name else 3)) ** 0.5
            # bounds of four standard errors of the mean, and of more for the standard deviation
            error = 4 / parameter.numel() ** 0.5
            assert abs(parameter.mean() / spread) < error and abs(parameter.std() / spread - 1) < error, name
            maps += 1
    assert maps > 40


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(path, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("number", "model_type"), enumerate(FAMILIES))
def test_saved_models_load_in_transformers_with_equal_logits(tmp_path, processor, number, model_type, oracle):
    is_tied = number % 2 == 0
    config = tiny.config(is_tied, model_type=model_type)
    config.vision_config = replace(config.vision_config, rope_theta=100.0)
    model = tiny.model_of(config)
    save_model(tmp_path / "saved", model, processor, max_shard_size=10**9 if is_tied else 40_000)
    assert (tmp_path / "saved" / INDEX).exists() == (not is_tied)
    for file in (tmp_path / "saved").glob("model-*"):  # a larger file has a single tensor, which is larger by itself
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000
    theirs, info = oracle.CLASSES[model_type].from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs.save_pretrained(tmp_path / "theirs")
    assert theirs.config.vision_config.rope_parameters["rope_theta"] == 100
    generator = torch.Generator().manual_seed(0)
    rows = [tiny.prompt(generator, grids) for grids in ([], [(1, 6, 10)], [(1, 18, 4), (1, 6, 10)])]
    for ours in (model, load_model(tmp_path / "theirs")):
        assert oracle.worst_difference(theirs, ours, rows) <= oracle.ROUNDING[model_type]
    torch.testing.assert_close(load_model(tmp_path / "saved").state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_fine_tuned_folder_keeps_the_files_of_its_base(copy, tmp_path):
    for name, content in FOREIGN.items():
        (copy / name).write_bytes(content)
    # save_model would write the tokenizer file with another format
    tokenizer = (copy / "tokenizer.json").read_bytes() + b"\n \n"
    (copy / "tokenizer.json").write_bytes(tokenizer)
    model = load_model(copy)
    processor = load_processor(copy, max_pixels=56 * 56)
    shutil.rmtree(copy)  # the folder may be deleted during the run
    save_model(tmp_path / "saved", model, processor)
    assert {name: (tmp_path / "saved" / name).read_bytes() for name in FOREIGN} == FOREIGN
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == tokenizer
    # the package writes settings that were used in training
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())["max_pixels"] == 56 * 56


@pytest.mark.parametrize(("content", "more"), [
    (None, []),
    ({"eos_token_id": "DOCUMENT", "do_sample": True, "temperature": 0.1}, []),  # as in the folder of a base model
    ({"eos_token_id": 7, "pad_token_id": 9}, [7]),
    ({"eos_token_id": [8, "TURN", 7]}, [8, 7]),
], ids=str)  # fmt: skip
def test_a_saved_folder_ends_where_training_ends_turns(copy, tmp_path, content, more, transformers):
    """The saved folder ends a turn at <|im_end|>, at <|endoftext|> and at the stop ids of the loaded folder."""
    ends = {"TURN": "<|im_end|>", "DOCUMENT": "<|endoftext|>"}
    special = shapes.tokenizer().special_tokens
    (copy / "generation_config.json").unlink()
    if content is not None:
        text = json.dumps(content)
        for name, token in ends.items():
            text = text.replace(f'"{name}"', str(special[token]))
        (copy / "generation_config.json").write_text(text)
    processor = load_processor(copy)
    expected = [*(special[token] for token in ends.values()), *more]
    assert [*processor.stop_token_ids] == expected
    assert processor.decode(torch.tensor([20, expected[-1]])) == processor.tokenizer.decode([20])
    save_model(tmp_path / "saved", load_model(copy), processor)
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    kept = {name: value for name, value in (content or {}).items() if name != "eos_token_id"}
    assert written == {"pad_token_id": special["<|endoftext|>"], **kept, "eos_token_id": expected}
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == expected


@pytest.mark.parametrize("value", ["<|im_end|>", [1, "2"], -1, {"id": 3}], ids=str)
def test_end_tokens_that_are_no_ids_are_refused(copy, value):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is .* must be the id of a token"):
        load_processor(copy)


def test_a_tied_head_is_stored_once_and_shared(tmp_path, processor):
    """A stored head must equal the embeddings, because transformers 4 ignores it and transformers 5 uses it."""
    folder = tmp_path / "tied"
    model = tiny.model(tied=True)
    save_model(folder, model, processor)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    for change in (lambda w: None, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})):
        edit_weights(folder, change)
        loaded = load_model(folder)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 0.01}))
    with pytest.raises(ValueError, match=r"tie_word_embeddings to true, but the stored lm_head\.weight differs "):
        load_model(folder)
    # the error suggests tie_word_embeddings=False
    edit_json(folder / "config.json", tie_word_embeddings=False)
    assert torch.equal(load_model(folder).lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("stored", ["bfloat16", "float64"])
def test_dtype_of_the_parameters(copy, stored):
    model = load_model(copy).to(getattr(torch, stored))
    save_model(copy, model, load_processor(copy))
    assert {p.dtype for p in load_model(copy).parameters()} == {getattr(torch, stored)}
    for requested in (torch.float32, torch.bfloat16):
        loaded = dict(load_model(copy, requested).named_parameters())
        assert all(torch.equal(loaded[name], p.to(requested)) for name, p in model.named_parameters())


def test_every_parameter_has_its_own_memory_and_is_trainable(copy):
    """A parameter must not be a view of another parameter, or of the file, which another program may overwrite."""
    model = load_model(copy)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    assert all(p.requires_grad and p.is_leaf and not p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    before = [p.clone() for p in model.parameters()]
    (copy / "model.safetensors").write_bytes(b"\0" * (copy / "model.safetensors").stat().st_size)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


@pytest.mark.parametrize("requested", [torch.float32, torch.bfloat16], ids=str)
def test_loading_holds_at_most_one_tensor_of_the_file(copy, monkeypatch, requested):
    views = []
    read_tensors = checkpoint.read_tensors

    def watched(file):
        for name, tensor in read_tensors(file):
            # the loop variable still holds one tensor
            assert sum(view() is not None for view in views) <= 1, name
            views.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    monkeypatch.setattr(checkpoint, "read_tensors", watched)
    model = load_model(copy, requested)
    assert len(views) == len(list(model.parameters()))
    assert not any(view() is not None for view in views)


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(change):
    return lambda folder: edit_weights(folder, change)


def shards(change):
    """Return a function that saves the weights of a folder in shards and changes the files."""

    def split_and_change(folder):
        save_model(folder, load_model(folder), load_processor(folder), max_shard_size=300_000)
        change(sorted(folder.glob("model-*")))

    return split_and_change


def repeat(files, prefix=""):
    """Store a tensor of the first file also in the last file, with `prefix` before its name."""
    first, last = load_file(files[0]), load_file(files[-1])
    name = next(name for name in first if name.startswith("visual."))
    save_file(last | {prefix + name: first[name]}, files[-1], {"format": "pt"})


NORM, UP = "visual.merger.ln_q.weight", "model.layers.0.mlp.up_proj.weight"
TWICE = r"model-(\d+)-of-\1\.safetensors: the tensor visual\.\S+ occurs twice"
REFUSED = {  # fault of a folder: (change, sentence of the error)
    "a missing tensor": (weights(lambda w: w.pop(NORM)), f"lack 1 of the model's .*{NORM}"),
    "an unexpected tensor": (
        weights(lambda w: w.update(extra=torch.ones(1))), "the tensor extra is not a parameter of the model"),
    "another shape": (
        weights(lambda w: w.update({"lm_head.weight": torch.ones(3, 128)})), r"lm_head.weight has shape \(3, 128\)"),
    "integers": (weights(lambda w: w.update({NORM: w[NORM].long()})), f"{NORM} is torch.int64, but quantized"),
    "not a number": (weights(lambda w: w[NORM][1].fill_(torch.nan)), f"tensor {NORM} contains NaN or infinite values"),
    "a tensor in two files": (shards(repeat), TWICE),
    "a tensor under two names": (shards(partial(repeat, prefix="model.")), TWICE),
    "a missing shard": (
        shards(lambda files: files[-1].unlink()), r"lists model-(\d+)-of-\1\.safetensors, but the folder lacks it"),
    "an unknown dtype": (config(torch_dtype="int8"), "torch_dtype is 'int8', but it must be 'float32', "),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_folder_with_a_fault_is_refused(copy, change, expected):
    change(copy)
    with pytest.raises(ValueError, match=expected):
        load_model(copy)


def test_infinite_values_are_found_before_quantization(copy):
    checkpoint.check_loaded(torch.full((70_000,), 1.0, dtype=torch.float16), UP, copy)
    edit_weights(copy, lambda weights: weights[UP][0].fill_(torch.inf))
    with pytest.raises(ValueError, match=f"tensor {UP} contains NaN or infinite values"):
        load_model(copy, None, "cpu", None, partial(lora.inject_adapters, options=LoRAOptions(r=2, quantize="nf4")))


def other_patches(folder):
    edit_json(folder / "preprocessor_config.json", patch_size=14)


def large_id(folder):
    """Give a token an id beyond the vocabulary, for which the model would raise IndexError."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 9000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    edit_json(folder / "config.json", vocab_size=8000)


def linked_license(folder):
    """A link could copy any file of this machine into a checkpoint, which may be published."""
    (folder.parent / "secret").write_text("key")
    (folder / "LICENSE").symlink_to(folder.parent / "secret")


@pytest.mark.parametrize(("change", "expected"), [
    (other_patches, r"copy/config\.json: vision_config.patch_size is 7, but it must be 14 as in preprocessor_config"),
    (config(image_token_id=5), r"copy/config\.json: image_token_id is 5, but it must be \d+ as in tokenizer\.json"),
    (large_id, r"vocab_size is 8000, but it must be at least 9001, .*; if .* model.resize_token_embeddings\(9001\)"),
    (linked_license, "LICENSE is a link to .*secret, outside its folder. Replace the link"),
])  # fmt: skip
def test_a_folder_whose_files_do_not_fit_is_refused(copy, change, expected):
    """Folders with more embeddings than tokens are common and accepted."""
    edit_json(copy / "config.json", vocab_size=json.loads((copy / "config.json").read_text())["vocab_size"] + 100)
    load_processor(copy)
    change(copy)
    with pytest.raises(ValueError, match=expected):
        load_processor(copy)


def test_a_license_may_link_to_a_file_of_the_cache_of_the_hub(copy):
    (copy.parent / "blobs").mkdir()
    (copy.parent / "blobs" / "1234").write_text("key")
    (copy / "LICENSE").symlink_to("../blobs/1234")
    assert load_processor(copy).tokenizer.files["LICENSE"] == b"key"
