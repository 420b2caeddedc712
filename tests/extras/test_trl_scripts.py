"""A script for TRL's GRPOTrainer runs with our trainer in its place, as docs/library.md shows."""

import json
import os
import re
import subprocess
import sys

import pytest
from trl_fixtures import model

from minivlmrl.__main__ import main
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import save_model
from minivlmrl.tasks import shapes
from tests.helpers.links import ROOT

LIBRARY_PAGE = (ROOT / "docs" / "library.md").read_text("utf-8")
SCRIPT = """\
from pathlib import Path

import datasets
import torch
import transformers
import trl
from reward import trl_reward
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class ImageOnlyProcessor(Qwen2_5_VLProcessor):
    # without videos, whose processor would need torchvision
    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


torch.set_num_threads(1)
model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained("model", dtype=torch.float32)
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_file="model/tokenizer.json", eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
)
images = Qwen2VLImageProcessorPil.from_pretrained("model")
template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5_vl.jinja"
processor = ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=template.read_text())
rows = datasets.load_dataset("json", data_files="train.jsonl", split="train")
rows = rows.cast_column("images", datasets.List(datasets.Image()))
config = trl.GRPOConfig(
    output_dir="out",
    seed=0,
    max_steps=2,
    per_device_train_batch_size=128,
    num_generations=8,
    max_completion_length=20,
    loss_type="grpo",
    beta=0.02,
    learning_rate=3e-4,
    adam_beta2=0.99,
    warmup_steps=0,
    lr_scheduler_type="polynomial",
    lr_scheduler_kwargs={"lr_end": 3e-5, "power": 1.0},
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    save_strategy="no",
)
trl.GRPOTrainer(model, trl_reward, config, train_dataset=rows, processing_class=processor).train()
for part in (model, tokenizer, images):
    part.save_pretrained("out/model")
"""
REWARD = """\
def trl_reward(completions, **columns):
    return [float("e" in messages[-1]["content"]) for messages in completions]
"""
THEIR_TRAINER = re.search(r"^trl\.GRPOTrainer\(.*\n", SCRIPT, re.MULTILINE)[0]
codes = re.findall(r"```python\n(.*?)```", LIBRARY_PAGE, re.DOTALL)
OUR_TRAINER = next(code for code in codes if "minivlmrl.extras.trl" in code)


def write_rows(folder, split, number):
    """Write rows of the built-in task with their images, as TRL reads them."""
    (folder / split).mkdir()
    with open(folder / f"{split}.jsonl", "w") as file:
        for index, row in enumerate(shapes.Shapes(number, split)):
            path = f"{split}/{index}.png"
            row.images[0].save(folder / path)
            prompt = [{"role": "user", "content": shapes.PROBLEM}]
            print(json.dumps({"prompt": prompt, "images": [path], "solution": row.columns["solution"]}), file=file)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [THEIR_TRAINER, OUR_TRAINER], ids=["TRL's trainer", "our trainer"])
def test_the_script_trains_and_its_model_is_evaluated(tmp_path, trainer, monkeypatch):
    for split, number in (("train", 64), ("eval", 4)):
        write_rows(tmp_path, split, number)
    save_model(tmp_path / "model", *random_model(ROOT / "recipes" / "shapes_model.json", shapes.tokenizer(), seed=0))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "script.py").write_text(SCRIPT.replace(THEIR_TRAINER, trainer))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = [dict(model(tmp_path / name).named_parameters()) for name in ("model", "out/model")]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) > 1e-4
    monkeypatch.chdir(tmp_path)
    command = "evaluate --model out/model --data eval.jsonl --recipe shapes.yaml --temperature 1 --num_generations 8"
    assert main(command.split()) == 0
