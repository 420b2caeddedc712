"""Write model folders with minimal.py, and read them with transformers, the package and train.py, and vice versa."""

import json
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import minimal
from minivlmrl.__main__ import main as package_main
from minivlmrl.data.messages import conversation
from minivlmrl.extras.answers.evaluate import build_parser, evaluation_config
from minivlmrl.model.checkpoint import load_model, load_processor
from tests.helpers.runs import write_lines
from tests.minimal.pairs import ROWS, main, row_of, write_folder

SFT = ("--sft", "--max_steps=2", "--warmup_steps=1", "--prompts_per_step=2", "--learning_rate=1e-3")
PROBLEM, SIZES = ROWS["text around images"]
TEXT = "Is <|box_start|> caf\u00e9 12\n\n left of it?"


def is_tied(name: str) -> bool:
    return name.startswith("tied")


@pytest.fixture(scope="module", params=["train.py", "built-in", "untied shards", "tied bfloat16"])
def trained(request, checkpoint, rows, tmp_path_factory, transformers):
    """Return a model folder by train.py, minimal.py or transformers, and the folder after training with minimal.py."""
    base = tmp_path_factory.mktemp("base")
    if request.param == "train.py":
        shutil.copytree(checkpoint, base, dirs_exist_ok=True)
    elif request.param == "built-in":
        minimal.make_folder(base)
    else:
        model = write_folder(base, tied=is_tied(request.param))
        if "shards" in request.param:
            (base / "model.safetensors").unlink()
            model.save_pretrained(base, max_shard_size=200_000)
            assert (base / "model.safetensors.index.json").exists()
        if "bfloat16" in request.param:
            model.to(torch.bfloat16).save_pretrained(base)
    folder = tmp_path_factory.mktemp("trained") / "model"
    main(base, rows, *SFT, f"--output_dir={folder}")
    return SimpleNamespace(name=request.param, base=base, folder=folder)


def state(model) -> dict[str, torch.Tensor]:
    return {name: weight.float() for name, weight in model.state_dict().items()}


def differing(one: dict, other: dict) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, weight in one.items() if not torch.equal(weight, other[name])]


def test_the_package_reads_the_base_and_the_trained_folder(trained):
    for folder in (trained.base, trained.folder):
        ours, package, processor = minimal.load(folder), load_model(folder), load_processor(folder)
        assert differing(state(ours), state(package)) == []
        row = row_of(PROBLEM, SIZES)
        prompt = minimal.make_prompt(ours, row)
        expected = processor(conversation(row["problem"], {"image": 2}), row["images"])
        assert torch.equal(prompt.ids, expected.input_ids)
        assert torch.equal(torch.cat([patches for patches, _, _ in prompt.images]), expected.pixel_values)
        assert minimal.to_ids(ours.tokenizer, TEXT) == processor.tokenizer.encode(TEXT)
    assert len(differing(state(minimal.load(trained.base)), state(ours))) == len(state(ours))


def test_transformers_reads_the_trained_folder(trained, transformers):
    weights = load_file(trained.folder / "model.safetensors")
    assert [file.name for file in trained.folder.glob("model*")] == ["model.safetensors"]
    config = json.loads((trained.folder / "config.json").read_text())
    assert {weight.dtype for weight in weights.values()} == {torch.float32} and config["torch_dtype"] == "float32"
    load = transformers.AutoModelForImageTextToText.from_pretrained
    theirs, info = load(trained.folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()) and theirs.dtype == torch.float32
    ours = minimal.load(trained.folder)
    assert ("lm_head.weight" in weights) != is_tied(trained.name)
    if is_tied(trained.name):
        assert ours.lm_head.weight is ours.model["embed_tokens"].weight
        assert theirs.lm_head.weight is theirs.model.language_model.embed_tokens.weight
    images = transformers.AutoImageProcessor.from_pretrained(trained.folder)
    row = row_of(PROBLEM, SIZES)
    patches = images(images=[minimal.load_image(image) for image in row["images"]], return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat([own for own, _, _ in minimal.make_prompt(ours, row).images]), patches)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained.folder)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == minimal.to_ids(ours.tokenizer, TEXT)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_train_goes_on_with_the_trained_folder(trained, run, quick, rows):
    own = ["--model.config=null", "--data.task=null", f"--data.train_file={rows}", "--data.eval_rows=256"]
    small = ["--stages=[sft]", "--sft.max_steps=1", "--sft.prompts_per_step=2"]
    folder = run(*own, *small, f"--model.path={trained.folder}") / "checkpoint"
    ours, package = minimal.load(folder), load_model(folder)
    assert differing(state(ours), state(package)) == []
    assert len(differing(state(minimal.load(trained.folder)), state(ours))) > 10


WITHOUT_FORM = {"completion": "red", "chosen": "red", "rejected": "blue"}


@pytest.mark.parametrize(("words", "changes", "command"), [
    ([], WITHOUT_FORM, "evaluate"), (["--sft"], {}, "generate"), (["--sft"], WITHOUT_FORM, "generate"),
    (["--dpo"], WITHOUT_FORM, "generate"),
])  # fmt: skip
def test_the_folder_tells_the_package_its_sentence(checkpoint, rows, tmp_path, words, changes, command, capsys):
    """The command that minimal.py prints asks as minimal.py asked in the training."""
    lines = [json.loads(line) | changes for line in rows.read_text().splitlines()[:2]]
    for line in lines:
        line["image"] = str(rows.parent / line["image"])
    write_lines(tmp_path / "my rows.jsonl", lines)
    short = ("--max_steps=1", "--prompts_per_step=1", "--num_generations=2", "--max_new_tokens=3")
    main(checkpoint, tmp_path / "my rows.jsonl", *words, *short, f"--output_dir={tmp_path / 'out'}")
    printed = capsys.readouterr().out.splitlines()
    [text] = [line.partition("next, in a clone of minivlmrl: ")[2] for line in printed if line.startswith("next")]
    python, dash_m, package, *words = shlex.split(text)
    assert [python, dash_m, package, words[0]] == ["python", "-m", "minivlmrl", command]
    options = build_parser(command).parse_args([*words[1:], "--temperature=0"])
    config = evaluation_config(options, [], with_rewards=command == "evaluate")
    assert config.data.prompt_template == "{problem}" + minimal.ASK * (command == "evaluate" or changes == {})
    assert (config.data.min_pixels, config.data.max_pixels) == minimal.load(tmp_path / "out").pixels
    assert config.data.answer_format == "tags"
    assert package_main([*words, "--rows=2", "--sampling.max_new_tokens=2"]) == 0
    capsys.readouterr()
    words = ["--model", str(tmp_path / "out"), "--image", lines[0]["image"], "--prompt", "What?"]
    assert package_main(["chat", *words, "--sampling.max_new_tokens=2"]) == 0
    assert "prompt" in capsys.readouterr().err


def test_the_weights_may_have_their_names_in_the_modules_of_transformers(tmp_path):
    """The files of the Hub have the names of minimal.py."""
    minimal.make_folder(tmp_path)
    expected = state(minimal.load(tmp_path))
    renamed = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        name = name.replace("visual.", "model.visual.")
        renamed[name.replace("model.", "model.language_model.") if name.startswith("model.l") else name] = weight
    assert {"model.visual.merger.ln_q.weight", "model.language_model.layers.0.mlp.up_proj.weight"} <= {*renamed}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    assert differing(state(minimal.load(tmp_path)), expected) == []


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_loaded_model_is_saved_in_its_dtype(tmp_path, dtype, transformers):
    (tmp_path / "base").mkdir()
    write_folder(tmp_path / "base", tied=True)
    minimal.save(minimal.load(tmp_path / "base", dtype=getattr(torch, dtype)), tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    assert load_model(tmp_path / "saved").lm_head.weight.dtype == getattr(torch, dtype)


def test_other_families_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ValueError, match=r"is not a Qwen2\.5-VL folder; train\.py reads other families"):
        minimal.load(tmp_path)
