"""Test the command `memory`, and the memory sizes in recipes, docs and README."""

import copy
import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from minivlmrl.__main__ import main as start
from minivlmrl.config.loading import load_config
from minivlmrl.model import config_json
from minivlmrl.model.build import read_sizes
from minivlmrl.monitor.memory.command import find_memory, main
from minivlmrl.monitor.memory.estimate import GB, MemoryEstimator, MemoryQuestion, estimate_phases, peak_bytes
from tests.helpers import tiny
from tests.helpers.hub_configs import real_config


def head_of(path):
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


@functools.cache
def estimator_for(model, num_layers=None):
    """Return the estimator for a model on the Hub, or for the model with only its first layers."""
    values = copy.deepcopy(real_config(model))
    if num_layers is not None:
        values["text_config"]["num_hidden_layers"] = num_layers
        if "layer_types" in values["text_config"]:
            del values["text_config"]["layer_types"][num_layers:]
    return MemoryEstimator(config_json.from_dict(values))


pytestmark = pytest.mark.usefixtures("cached_activations")


def needed(config, stage, model, num_layers=None, gpus=1):
    return peak_bytes(estimate_phases(MemoryQuestion(config, stage, estimator_for(model, num_layers), gpus))) / GB


def needed_by_layers(config, stage, model):
    """Extrapolate the memory from 4 and 8 layers, because each layer adds the same amount."""
    gb_of_4_layers, gb_of_8_layers = (needed(config, stage, model, num_layers) for num_layers in (4, 8))
    num_layers = real_config(model)["text_config"]["num_hidden_layers"]
    return gb_of_4_layers + (gb_of_8_layers - gb_of_4_layers) / 4 * (num_layers - 4)


def rows_of_memory(name):
    """Return the cells of the rows in docs/memory.md whose first cell is `name`."""
    lines = Path("docs/memory.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith(f"| {name} |")]
    return [[text.strip() for text in row] for row in rows]


ONE_CARD = {"own_demonstrations_one_card": "sft", "own_pairs_one_card": "dpo", "own_data_one_card": "grpo"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_CARD)
def test_the_table_of_one_card_equals_the_command(name):
    lines = Path("docs/memory.md").read_text().splitlines()
    [head] = [line for line in lines if line.startswith("| recipe |")]
    [row] = [line for line in lines if line.startswith(f"| [{name}]")]
    for column, size in zip(head.split("|")[3:-1], row.split("|")[3:-1], strict=True):
        model, card = re.fullmatch(r" (.B)(?:, NF4)?: (\d+) GB ", column).groups()
        options = ["--adapter.quantize=nf4"] if "NF4" in column else []
        found = needed(load_config(f"recipes/{name}.yaml", options), ONE_CARD[name], f"Qwen2.5-VL-{model}")
        assert f"{found:.1f}" == size.strip() and found <= float(card), column
        if name in (readme := Path("README.md").read_text()) and column == " 3B: 16 GB ":
            assert f"{size.strip()} GB" in readme


THOUGHTS = ["--data.chat_template_kwargs.enable_thinking=true", "--sampling.max_new_tokens=2048"]
BFLOAT16 = ["--model.dtype=bfloat16", "--model.compute_dtype=null"]


def test_the_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny.RUN_MODEL))
    short = "--sampling.max_new_tokens=8"
    start(["memory", "--model", str(file), "--gpus", "2", "recipes/own_data.yaml", short])
    shown = capsys.readouterr().out
    assert f"{MemoryEstimator(read_sizes(file)).parameters:,} parameters; 2 GPUs of 80 GB" in shown
    assert "grpo" in shown and "does not fit" not in shown
    start(["memory", "--model", str(tmp_path / "config.json"), "--gpu_memory", "1", short])
    shown = capsys.readouterr().out
    assert re.search(r"\ntraining +3\.\d GB: .* gradients, .* 3\.0 in reserve\n", shown)
    assert "grpo does not fit. Try --sampling.max_batch_tokens=" in shown
    start(["memory", "--model", str(file), "--gpu_memory=300", "--data.train_file=none.jsonl", short])
    shown = capsys.readouterr().out
    assert "1 GPU of 300 GB" in shown  # not 3e+02 GB
    assert "Prompt sizes are assumed, because these rows were not read: none.jsonl\n" in shown
    with pytest.raises(ValueError, match="--gpus is 0, but it must be at least 1"):
        main(["--gpus=0"])


def test_auto_is_what_is_free_on_the_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (15 * GB, 16 * GB))
    assert find_memory("auto") == 15 * GB and find_memory("10.5") == 10.5 * GB


@pytest.mark.parametrize("text", ["2080", "nan", "-8", "RTX 4090"])
def test_a_memory_that_is_no_size_is_refused(text):
    with pytest.raises(
        ValueError, match=f"--gpu_memory is '{text}', but it must be a number of GB, such as 24, or auto"
    ):
        find_memory(text)


@pytest.mark.slow
def test_recipes_fit_the_gpus_that_their_comments_name():
    recipes, on_eight = [], []
    for path in sorted(Path("recipes").glob("*.yaml")):
        head = head_of(path)
        if "80 GB: " not in head:
            continue
        recipes.append(path.stem)
        sizes = (re.search(text, head)[1] for text in (r"80 GB: (\d+) GB by", r": (\d+) GB on the card"))
        by_plan, on_small = map(int, sizes)
        small = re.search(r"on the card with ((?:--[^\s,]*[^\s,.] ?)+)", head)[1].split()
        for options, expected, card in (([], by_plan, 80), (small, on_small, 24)):
            run = load_config(path, options)
            [stage] = run.stages
            assert round(needed(run, stage, "Qwen2.5-VL-3B")) == expected <= card, (path, options)
        if eight := re.search(r"8 GPUs needs (\d+) GB.*and (\d+) GB with (--\S+),", head):
            for options, expected in (([], eight[1]), ([eight[3]], eight[2])):
                run = load_config(path, options)
                assert round(needed(run, stage, "Qwen2.5-VL-3B", gpus=8)) == int(expected)
            on_eight.append(path.stem)
    assert recipes == ["own_data", "own_pairs", "rec_qwen2_5_vl_3b"] and on_eight == ["rec_qwen2_5_vl_3b"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "other", "options"), [
    ("own_demonstrations_one_card", "Qwen2.5-VL-3B", 10, ["--adapter.quantize=nf4"]),
    ("own_pairs_one_card", "Qwen2.5-VL-3B", 10, ["--adapter.quantize=nf4"]),
    ("own_data_one_card", "Qwen2.5-VL-3B", 11, ["--adapter.quantize=nf4"]),
    ("rec_qwen2_5_vl_3b_one_card", "Qwen2.5-VL-3B", 11, ["--adapter.quantize=nf4"]),
    ("cls_qwen2_vl_2b", "Qwen2-VL-2B", 12, ["--adapter.r=64", *BFLOAT16]),
    ("lora_7b", "Qwen2.5-VL-7B", 26, ["--adapter.quantize=null"]),
    ("rec_qwen3_vl_4b_one_card", "Qwen3-VL-4B", 16, ["--adapter.quantize=nf4"]),
    ("lora_qwen3_vl_8b", "Qwen3-VL-8B", 28, ["--adapter.quantize=null"]),
    ("lora_qwen3_5_2b", "Qwen3.5-2B", 11, THOUGHTS), ("lora_qwen3_5_0_8b", "Qwen3.5-0.8B", 7, THOUGHTS),
    ("lora_qwen3_vl_30b_a3b", "Qwen3-VL-30B-A3B", None, []), ("lora_qwen3_5_35b_a3b", "Qwen3.5-35B-A3B", None, []),
])  # fmt: skip
def test_recipes_for_one_gpu_fit(name, model, other, options):
    """`other` is the memory in GB with `options`, or None for a mixture of experts."""
    path = Path("recipes") / f"{name}.yaml"
    head = head_of(path)
    card, by_plan = map(int, re.search(r"card of (\d+) GB: (\d+) GB by `minivlmrl memory`", head).groups())
    page = " ".join(Path("docs/memory.md").read_text().split())
    if other is None:
        size = needed_by_layers(load_config(path), "grpo", model)
        assert round(size) == by_plan <= card and f"{name}.yaml) needs {size:.1f} GB" in page
        return
    configs = [load_config(path, given) for given in ([], options)]
    found = [needed(config, config.stage_names[0], model) for config in configs]
    assert [round(size) for size in found] == [by_plan, other] and found[0] <= card
    assert f"with [{name}.yaml]" not in page or f"needs {found[0]:.1f} GB with [{name}.yaml]" in page
    assert f"{other} GB" in head and model.partition("VL-")[2] in head
    if stated := re.search(r"with max_batch_tokens 16384 the recipe needs (\d+) GB", head):
        config = load_config(path, ["--sampling.max_batch_tokens=16384"])
        assert round(needed(config, "grpo", model)) == int(stated[1])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "card", "stated"), [
    ("Qwen3.5-2B", 16, ["11.3", "10.9"]), ("Qwen3.5-4B", 24, ["19.2", "18.1"]), ("Qwen3.5-9B", 48, ["29.7", "29.4"]),
])  # fmt: skip
def test_sizes_of_qwen3_5(model, card, stated):
    """A recipe states the memory without and with thoughts; only the 2B is estimated with all its layers."""
    path = Path("recipes/lora_qwen3_5_2b.yaml")
    size_of = needed if model == "Qwen3.5-2B" else needed_by_layers
    found = [size_of(load_config(path, options), "grpo", model) for options in ([], THOUGHTS)]
    assert [f"{size:.1f}" for size in found] == stated and max(found) <= card
    head = head_of(path)
    assert f"{card} GB" in head and model in head and " ".join(THOUGHTS) in head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "model"), [("all weights, float32", "3B"), ("LoRA on bfloat16", "3B"), ("LoRA on NF4", "7B")]
)
def test_memory_sizes_in_the_readme(row, model):
    [[*cells, options]] = rows_of_memory(row)
    config = load_config("own_data.yaml", shlex.split(options.replace("`", "")))
    size = needed(config, "grpo", f"Qwen2.5-VL-{model}")
    assert cells[1 if model == "3B" else 2] == f"{size:.1f}"
    assert row != "all weights, float32" or f"{size:.1f} GB" in Path("README.md").read_text()
