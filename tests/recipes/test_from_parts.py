"""Test that recipes/from_parts.py keeps a text model's decoder and tokenizer, and that transformers loads it."""

import json
import struct
import sys

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from minivlmrl.__main__ import main as command
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, train_tokenizer
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.packing import pack
from recipes import from_parts

TEXTS = ["the cat sat on the mat, a small red cat", "a colour has a name, and so has a shape"] * 3
VOCAB = 400  # more rows than the tokenizer has tokens
PAIRS = [("qwen2", "qwen2_5_vl"), ("qwen2", "qwen2_vl"), ("qwen3", "qwen3_vl")]
SMALL = ["--depth=2", "--width=32", "--heads=2"]
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}  # fmt: skip


def make_text_model(folder, model_type="qwen2", tied=False, dtype=torch.float64):
    """Write a random text model with transformers, and its tokenizer. Return the model."""
    import transformers

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }  # fmt: skip
    if model_type == "qwen3":
        sizes["head_dim"] = 48
    name = model_type.capitalize()
    config = getattr(transformers, f"{name}Config")(
        **sizes, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # also biases and norms
    model.save_pretrained(folder)
    train_tokenizer(TEXTS, 300).save(folder / "tokenizer.json")
    return model


def text_logits(model, ids):
    """Compute our logits (N, V) for a text."""
    no_patches = torch.zeros(0, model.config.vision_config.patch_dim)
    prompt = Prompt(ids, no_patches, torch.zeros(0, 3, dtype=torch.long))
    batch = pack([prompt], [[Completion(torch.tensor([1]))]], model.config)
    with torch.no_grad():
        return model.lm_head(model(batch))


def decoder_tensors(folder):
    """Return the decoder's tensors in a folder, without transformers' prefixes."""
    tensors = load_file(folder / "model.safetensors")
    return {k.replace("language_model.", ""): v for k, v in tensors.items() if "visual" not in k}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model_type", "family"), PAIRS)
def test_the_logits_are_those_of_the_text_model(tmp_path, model_type, family, tied):
    import transformers

    theirs = make_text_model(tmp_path / "text", model_type, tied)
    from_parts.main([str(tmp_path / "text"), str(tmp_path / "vlm"), f"--family={family}", *SMALL])
    ids = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    logits = text_logits(load_model(tmp_path / "vlm"), ids)
    assert logits.dtype == torch.float64 and logits.abs().max() > 1
    bound = 1e-6 * expected.abs().max().item()  # transformers computes rotary angles in float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=bound)
    both = getattr(transformers, CLASSES[family]).from_pretrained(tmp_path / "vlm", output_loading_info=True)
    assert not any(both[1].values())
    with torch.no_grad():
        theirs_of_family = both[0].double()(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(theirs_of_family, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "family"), PAIRS)
def test_the_decoder_keeps_its_bits_and_the_tokenizer_its_file(tmp_path, model_type, family, dtype):
    make_text_model(tmp_path / "text", model_type, dtype=dtype)
    from_parts.main([str(tmp_path / "text"), str(tmp_path / "vlm"), f"--family={family}", *SMALL])
    before = decoder_tensors(tmp_path / "text")
    after = decoder_tensors(tmp_path / "vlm")
    assert before.keys() == after.keys() and len(before) > 30
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name
    assert (tmp_path / "vlm" / "tokenizer.json").read_bytes() == (tmp_path / "text" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("model_type", "family"), PAIRS)
def test_it_chats_about_a_picture(tmp_path, capsys, model_type, family):
    make_text_model(tmp_path / "text", model_type, dtype=torch.float32)
    from_parts.main([str(tmp_path / "text"), str(tmp_path / "vlm"), f"--family={family}", *SMALL])
    PIL.Image.new("RGB", (60, 90), "teal").save(tmp_path / "teal.png")
    question = ["--prompt", "What?", "--image", str(tmp_path / "teal.png"), "--max_new_tokens=3"]
    assert command(["chat", "--model", str(tmp_path / "vlm"), *question]) == 0
    assert "new ones" in capsys.readouterr().out


def test_missing_control_tokens_are_added(tmp_path):
    """Qwen2, unlike Qwen2.5, has no token <|image_pad|>."""
    make_text_model(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS[:3]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    from_parts.main([str(tmp_path), str(tmp_path / "vlm"), *SMALL])
    tokenizer = load_processor(tmp_path / "vlm").tokenizer
    assert set(SPECIAL_TOKENS) <= tokenizer.special_tokens.keys()
    assert [
        token for token in content["added_tokens"] if tokenizer.special_tokens[token["content"]] != token["id"]
    ] == []


def add_tokenizer(writer, file):
    """Add a tokenizer.json's tokens to a GGUF file, and padding up to VOCAB tokens."""
    content = json.loads(file.read_text())
    tokens = {i: (token, 1) for token, i in content["model"]["vocab"].items()}
    tokens |= {token["id"]: (token["content"], from_parts.CONTROL) for token in content["added_tokens"]}
    tokens |= {i: (f"[PAD{i}]", from_parts.UNUSED) for i in range(len(tokens), VOCAB)}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[i][0] for i in range(VOCAB)])
    writer.add_token_types([tokens[i][1] for i in range(VOCAB)])
    merges = content["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def write_gguf(file, model, folder, kind, missing=()):
    """Write a text model as a GGUF file, with the same type for all matrices, as llama.cpp's converter does."""
    gguf = pytest.importorskip("gguf", reason="extra missing: pip install gguf")
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(500.0)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    add_tokenizer(writer, folder / "tokenizer.json")
    names = {ours: theirs for theirs, ours in from_parts.GGUF_TENSORS.items()}
    written = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        stem, _, ending = name.rpartition(".")
        short = (
            names[name] if layer is None else names[stem.replace(f".{layer}.", ".{}.", 1)].format(layer) + "." + ending
        )
        values = tensor.float().numpy()
        kind_of = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        data = gguf.quantize(values, kind_of)
        if short not in missing:
            writer.add_tensor(short, data, raw_dtype=kind_of)
        written[name] = torch.from_numpy(gguf.dequantize(data, kind_of).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_a_gguf_file_gives_its_dequantised_tensors_and_its_tokenizer(tmp_path, model_type, kind):
    model = make_text_model(tmp_path, model_type, dtype=torch.float32)
    expected = write_gguf(tmp_path / "text.gguf", model, tmp_path, kind)
    from_parts.main([str(tmp_path / "text.gguf"), str(tmp_path / "vlm"), *SMALL])
    found = decoder_tensors(tmp_path / "vlm")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    config = load_model(tmp_path / "vlm").config
    assert (config.rope_theta, config.rms_norm_eps, config.head_dim) == (
        500.0,
        pytest.approx(1e-5),
        48 if model_type == "qwen3" else 32,
    )
    theirs = load_processor(tmp_path / "vlm").tokenizer
    ours = from_parts.load_tokenizer_with_images(tmp_path / "tokenizer.json")
    for text in [*TEXTS, "It'll cost 3 €, naïve café\n\n  日本語", "<|im_end|>"]:
        assert theirs.encode(text) == ours.encode(text) and theirs.decode(theirs.encode(text)) == text
    assert theirs.special_tokens == ours.special_tokens


def test_a_gguf_file_needs_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "text.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        SystemExit, match=r"text\.gguf: reading a GGUF file needs the package gguf; run pip install gguf"
    ):
        from_parts.main([str(tmp_path / "text.gguf"), str(tmp_path / "vlm")])


def test_an_incomplete_gguf_file_is_refused(tmp_path):
    pytest.importorskip("gguf", reason="extra missing: pip install gguf")
    for content in (b"GGUF", b"not a model" * 9):
        (tmp_path / "text.gguf").write_bytes(content)
        with pytest.raises(SystemExit, match=r"text.gguf is not a complete GGUF file \(.*\); download it again"):
            from_parts.main([str(tmp_path / "text.gguf"), str(tmp_path / "vlm")])


def edit(folder, **values):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | values))


def drop(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("change", "options", "message"), [
    (lambda f: edit(f, model_type="llama"), [], "the text model is 'llama', but it must be qwen2 or qwen3"),
    (lambda f: edit(f, use_sliding_window=True), [], "use_sliding_window is true, which is not supported"),
    (lambda f: edit(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), [], "the rotary embedding is scaled"),
    (lambda f: edit(f, vocab_size=290), [], "the tokenizer has 300 tokens, but the head has only 290 rows"),
    (lambda f: edit(f, intermediate_size=97), [], "has shape (96, 64), but the config requires (97, 64)"),
    (lambda f: edit(f, num_hidden_layers=2), [], "the decoder has no parameter model.layers.2."),
    (lambda f: drop(f, "model.norm.weight"), [], "the tensor model.norm.weight is missing; download the model again"),
    (lambda f: (f / "tokenizer.json").unlink(), [], "tokenizer.json: the file does not exist"),
    (lambda f: None, ["--family=qwen3_vl"], "--family is qwen3_vl, but a decoder of qwen2 fits qwen2_5_vl or qwen2_vl"),
])  # fmt: skip
def test_other_sources_are_refused(tmp_path, change, options, message):
    make_text_model(tmp_path)
    change(tmp_path)
    with pytest.raises(SystemExit) as error:
        from_parts.main([str(tmp_path), str(tmp_path / "vlm"), *SMALL, *options])
    assert message in str(error.value)
    assert not (tmp_path / "vlm").exists()


WRONG = (-1, 0, 10**9, 10**30, 1.5, "x", None, [1], {"a": 1})
KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rope_parameters")


def refused(source, out):
    """Return the sentence with which the script refuses a model; any other error fails the test."""
    with pytest.raises(SystemExit) as error:
        from_parts.main([str(source), str(out), *SMALL])
    return str(error.value)


def test_wrong_values_in_config_json_are_sentences(tmp_path):
    """Each of 54 wrong values and six missing keys is refused before memory is used."""
    make_text_model(tmp_path, dtype=torch.float32)
    original = (tmp_path / "config.json").read_text()
    for key in KEYS:
        for value in WRONG:
            edit(tmp_path, **{key: value})
            assert refused(tmp_path, tmp_path / "vlm").startswith(str(tmp_path)), (key, value)
        (tmp_path / "config.json").write_text(original)
        content = json.loads(original)
        del content[key]
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert "is missing" in refused(tmp_path, tmp_path / "vlm"), key
        (tmp_path / "config.json").write_text(original)
    edit(tmp_path, model_type=[1])
    assert "the text model is [1]" in refused(tmp_path, tmp_path / "vlm")


DAMAGED = (b"", b"[1]", b"{}", b"[" * 10**5, b"<html>", bytes(100), b"\xff\xfe", b"version https://git-lfs.github.com/")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_damaged_files_are_sentences(tmp_path, name):
    make_text_model(tmp_path, dtype=torch.float32)
    for content in (*DAMAGED, (tmp_path / name).read_bytes()[:-100]):
        (tmp_path / name).write_bytes(content)
        assert name in refused(tmp_path, tmp_path / "vlm"), content[:20]


@pytest.mark.parametrize("change", [
    {"model": None}, {"model": {"type": "WordPiece"}}, {"added_tokens": 3}, {"version": "x"}, {"decoder": [1]},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 3}}, {"post_processor": "x"},
    {"added_tokens": [], "normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}},
], ids=str)  # fmt: skip
def test_damaged_tokenizers_are_sentences(tmp_path, change):
    make_text_model(tmp_path, dtype=torch.float32)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
    assert "tokenizer.json: the file is not a usable tokenizer.json" in refused(tmp_path, tmp_path / "vlm")


def test_weights_without_an_embedding_are_sentences(tmp_path):
    make_text_model(tmp_path, dtype=torch.float32)
    name = "model.embed_tokens.weight"
    for tensor in (None, torch.ones(3), torch.tensor(1.0)):
        tensors = load_file(tmp_path / "model.safetensors") | {name: tensor}
        save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors", {"format": "pt"})
        assert f"the tensor {name} " in refused(tmp_path, tmp_path / "vlm")


def test_damaged_gguf_files_are_sentences(tmp_path):
    """Files are cut, counts are huge, and values have wrong types and names. No file is read in an endless loop."""
    model = make_text_model(tmp_path, dtype=torch.float32)
    file = tmp_path / "text.gguf"
    write_gguf(file, model, tmp_path, "F32")
    good = file.read_bytes()
    damaged = [good[:size] for size in (*range(0, 1200, 61), len(good) // 2, len(good) - 1)]

    def put(position, layout, value):
        content = bytearray(good)
        struct.pack_into(layout, content, position, value)
        damaged.append(bytes(content))

    for position in (8, 16, 24):  # tensor count, value count, and length of the first name
        for value in (0, 2**31, 2**63, 2**64 - 1):
            put(position, "<Q", value)
    tokens = good.find(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for value in (2**32 + 9, 2**40, 2**63):
        put(tokens + 8, "<Q", value)
    put(tokens + 4, "<I", 9)  # a list of lists
    for key in (b"general.architecture", b"qwen2.block_count", b"qwen2.attention.head_count", b"tokenizer.ggml.merges"):
        start = good.find(key)
        put(start, "<B", ord("Z"))
        for kind in (0, 7, 12, 99):
            put(start + len(key), "<I", kind)
    for number, content in enumerate(damaged):
        file.write_bytes(content)
        assert str(tmp_path) in refused(file, tmp_path / "vlm"), number
    assert len(damaged) > 50  # all were refused


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"none is neither a folder with config.json nor a \.gguf file"):
        from_parts.main([str(tmp_path / "none"), str(tmp_path / "vlm")])
