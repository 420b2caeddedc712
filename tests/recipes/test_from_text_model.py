"""Test that recipes/from_text_model.py keeps a text model's decoder and tokenizer, and that transformers loads it."""

import json

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from minivlmrl.__main__ import main as command
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, train_tokenizer
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.packing import pack
from recipes import from_text_model

TEXTS = ["the cat sat on the mat, a small red cat", "a color has a name, and so has a shape"] * 3
VOCAB = 400  # more rows than tokens
CLASSES = {"qwen2": "Qwen2_5_VLForConditionalGeneration", "qwen3": "Qwen3VLForConditionalGeneration"}
SMALL = ["--depth=2", "--width=32", "--heads=2"]


def make_text_model(folder, model_type="qwen2", tied=False, dtype=torch.float64):
    """Write a random text model with transformers, and its tokenizer. Return the model."""
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    if model_type == "qwen3":
        sizes["head_dim"] = 48
    name = model_type.capitalize()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # also biases and norms
    model.save_pretrained(folder)
    train_tokenizer(TEXTS, 300).save(folder / "tokenizer.json")
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", CLASSES)
def test_the_logits_are_those_of_the_text_model(tmp_path, model_type, tied):
    import transformers

    theirs = make_text_model(tmp_path / "text", model_type, tied)
    from_text_model.main([str(tmp_path / "text"), str(tmp_path / "vlm"), *SMALL])
    ids = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    ours = load_model(tmp_path / "vlm")
    prompt = Prompt(ids, torch.zeros(0, ours.config.vision_config.patch_dim), torch.zeros(0, 3, dtype=torch.long))
    with torch.no_grad():
        logits = ours.lm_head(ours(pack([prompt], [[Completion(torch.tensor([1]))]], ours.config)))
    assert logits.dtype == torch.float64 and logits.abs().max() > 1
    bound = 1e-6 * expected.abs().max().item()  # transformers computes rotary angles in float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    model = getattr(transformers, CLASSES[model_type])
    theirs, info = model.from_pretrained(tmp_path / "vlm", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        logits = theirs.double()(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("model_type", CLASSES)
def test_decoder_and_tokenizer_keep_their_bits_and_the_model_chats(tmp_path, capsys, model_type):
    make_text_model(tmp_path / "text", model_type, dtype=torch.bfloat16)
    from_text_model.main([str(tmp_path / "text"), str(tmp_path / "vlm"), *SMALL])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("text", "vlm"))
    kept = {name.replace("language_model.", ""): tensor for name, tensor in after.items() if "visual" not in name}
    assert before.keys() == kept.keys() and len(before) > 30
    for name, tensor in before.items():
        assert kept[name].dtype == torch.bfloat16 and torch.equal(kept[name], tensor), name
    assert (tmp_path / "vlm" / "tokenizer.json").read_bytes() == (tmp_path / "text" / "tokenizer.json").read_bytes()
    PIL.Image.new("RGB", (60, 90), "teal").save(tmp_path / "teal.png")
    question = ["--prompt", "What?", "--image", str(tmp_path / "teal.png"), "--sampling.max_new_tokens=3"]
    assert command(["chat", "--model", str(tmp_path / "vlm"), *question]) == 0
    assert "random ones" in capsys.readouterr().out


def test_missing_control_tokens_are_added(tmp_path):
    """Qwen2, unlike Qwen2.5, has no token <|image_pad|>."""
    make_text_model(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS[:3]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    from_text_model.main([str(tmp_path), str(tmp_path / "vlm"), *SMALL])
    found = load_processor(tmp_path / "vlm").tokenizer.special_tokens
    assert set(SPECIAL_TOKENS) <= found.keys()
    assert all(found[token["content"]] == token["id"] for token in content["added_tokens"])


def edit(folder, **values):
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))


@pytest.mark.parametrize(("change", "expected"), [
    (lambda f: edit(f, model_type="llama"), "model_type is 'llama', but it must be qwen2 or qwen3"),
    (lambda f: edit(f, use_sliding_window=True), "use_sliding_window is True, but it must be false"),
    (lambda f: edit(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_type is 'yarn'"),
    (lambda f: edit(f, vocab_size=290), "the number of tokens with images is 300, but it must be at most vocab_size"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: the file does not exist"),
    (lambda f: (f / "model.safetensors").write_bytes(b"{}"), "model.safetensors: not a complete safetensors file"),
])  # fmt: skip
def test_other_folders_are_refused_in_one_line(tmp_path, change, expected):
    make_text_model(tmp_path)
    change(tmp_path)
    with pytest.raises(SystemExit) as error:
        from_text_model.main([str(tmp_path), str(tmp_path / "vlm"), *SMALL])
    message = str(error.value)
    assert expected in message and str(tmp_path) in message and "\n" not in message
    assert not (tmp_path / "vlm").exists()


def test_a_missing_base_of_rope_is_not_guessed(tmp_path):
    make_text_model(tmp_path)
    edit(tmp_path, rope_parameters={})
    with pytest.raises(KeyError, match="rope_theta"):
        from_text_model.main([str(tmp_path), str(tmp_path / "vlm"), *SMALL])
