"""Test that weights that `merge` writes have the logits of the base model with its adapter."""

import shutil
from operator import attrgetter

import pytest
import torch

from minivlmrl.__main__ import main
from minivlmrl.config.loading import as_overrides
from minivlmrl.extras import merge
from minivlmrl.extras.answers.chat import inference_config
from minivlmrl.extras.answers.evaluate import build_parser, evaluation_config
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.peft import gather_adapter, load_adapter
from tests.helpers import tiny
from tests.helpers.oracle import CLASSES, ROUNDING, worst_difference
from tests.model.test_lora import EVERYTHING, adapted
from tests.model.test_peft import base, prompts

SAID = {
    "data.prompt_template": "Look. {problem}", "data.system_prompt": "Be brief.", "data.answer_format": "whole",
    "data.max_pixels": 3136, "data.box_space": "thousandths", "sampling.stop_token_ids": [7],
    "sampling.stop_strings": ["x"],
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", CLASSES)
def test_merged_logits(tmp_path, monkeypatch, model_type, tied):
    # the prompts are random ids, so any tokenizer will do
    processor = tiny.processor()
    monkeypatch.setattr(merge, "load_processor", lambda folder: processor)
    base(tmp_path, model_type, tied)
    gather_adapter(adapted(EVERYTHING, model_type=model_type, dtype=torch.float32))(tmp_path / "adapter")
    options = {"model": "base", "adapter": "adapter", "out": "merged"}
    assert main(["merge", *(f"--{name}={tmp_path / folder}" for name, folder in options.items())]) == 0
    ours = load_model(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    theirs = CLASSES[model_type].from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert worst_difference(theirs, ours, prompts()) < ROUNDING[model_type]


def test_a_copied_folder_says_how_it_was_trained(tmp_path, checkpoint, user_data, run, quick, capsys):
    options = [*user_data, "--adapter.r=2", "--stages=[sft]", "--sft.max_steps=1", "--data.eval_rows=0"]
    trained = run(*options, "--adapter.quantize=nf4", *as_overrides(SAID)) / "checkpoint"
    adapter = shutil.copytree(trained / "adapter", tmp_path / "copied")
    for out, more in (("plain", []), ("told", ["--quantize=nf4"])):
        given = {"model": checkpoint, "adapter": adapter, "out": tmp_path / out}
        assert main(["merge", *(f"--{name}={folder}" for name, folder in given.items()), *more]) == 0
        assert (tmp_path / out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    merged = shutil.copytree(trained, tmp_path / "merged", ignore=shutil.ignore_patterns("adapter"))
    for model in (adapter, merged, tmp_path / "plain"):
        arguments = build_parser("generate").parse_args([f"--model={model}", "--data=rows.jsonl", "--temperature=0"])
        for config in (evaluation_config(arguments, [], with_rewards=False), inference_config(arguments, [])):
            assert {name: attrgetter(name)(config) for name in SAID} == SAID
            assert (config.adapter.r and config.adapter.quantize) == ("nf4" if model == adapter else 0)
    capsys.readouterr()
    run(*options, f"--adapter.path={adapter}", name="again")
    printed = capsys.readouterr().out
    assert f"{adapter} was trained on nf4 weights; set adapter.quantize=nf4" in printed
    assert f"{adapter / 'minivlmrl.yaml'}, with which the model was trained, sets other values for data.p" in printed


def test_a_merged_folder_keeps_its_options_and_is_not_merged_again(tmp_path, checkpoint, user_data, run, quick, capsys):
    message = "--data.prompt_template=Look. {problem}"
    trained = run(*user_data, message, "--adapter.r=2", "--stages=[sft]", "--sft.max_steps=1") / "checkpoint"

    def merge_with(folder, out, adapter=trained / "adapter"):
        return main(["merge", f"--model={folder}", f"--adapter={adapter}", f"--out={out}"])

    capsys.readouterr()
    assert merge_with(checkpoint, tmp_path / "merged") == 0
    assert f"wrote {tmp_path / 'merged'}" in capsys.readouterr().out
    load_processor(tmp_path / "merged")
    assert (tmp_path / "merged/minivlmrl.yaml").read_text() == (trained / "minivlmrl.yaml").read_text()
    assert "Look. {problem}" in (trained / "minivlmrl.yaml").read_text()
    assert merge_with(checkpoint, tmp_path / "of_run", trained.parent) == 0
    assert (tmp_path / "of_run/model.safetensors").read_bytes() == (tmp_path / "merged/model.safetensors").read_bytes()
    assert merge_with(checkpoint, tmp_path / "again", tmp_path) == 2
    assert f"{tmp_path} does not contain an adapter" in capsys.readouterr().err
    assert merge_with(checkpoint, checkpoint) == 2
    assert f"--out is {checkpoint}, the base model, which would be lost" in capsys.readouterr().err
    sent = shutil.copytree(trained / "adapter", tmp_path / "sent")
    (sent / "minivlmrl.yaml").unlink()
    (sent / "minivlmrl.yaml").symlink_to(trained / "config.json")
    assert merge_with(checkpoint, tmp_path / "again", sent) == 2
    assert "sent/minivlmrl.yaml is a link to " in capsys.readouterr().err and not (tmp_path / "again").exists()
    for merged in (trained, tmp_path / "merged"):
        capsys.readouterr()
        assert merge_with(merged, tmp_path / "again") == 2
        assert f"the weights in {merged} already contain this adapter; pass the base model" in capsys.readouterr().err
