"""Run the last commands of docs/data.md, from a model folder as on the Hub to a rising reward."""

import json
import random
import re
import shlex
from pathlib import Path

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken

from minivlmrl.__main__ import main
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.tokenizer import SPECIAL_TOKENS, train_tokenizer
from minivlmrl.model.checkpoint import load_model, load_processor
from tests.data.test_qwen_vocabulary import WORDS
from tests.helpers import tiny
from tests.helpers.hub_configs import tiny_config
from tests.helpers.links import ROOT
from tests.helpers.runs import metrics, write_lines

transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")

from tests.helpers.oracle import CLASSES, ROUNDING, worst_difference  # noqa: E402 (needs transformers too)

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "data.md").read_text()
IDS = {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")}
IDS |= {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "eos_token_id": "<|im_end|>"}
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 60, 220), "yellow": (230, 210, 50)}
RECIPE = """
output_dir: runs/squares
stages: [sft, grpo]
num_threads: 1
checkpoint_steps: 10
model: {path: FOLDER}
data: {files: {sft: shown.jsonl}, train_file: train.jsonl, eval_file: eval.jsonl, max_pixels: 7056}
sampling: {max_new_tokens: 110, environment: tool.py:Enlarge}
rewards: {accuracy: 1.0, environment: 1.0}
sft: {max_steps: 40, prompts_per_step: 16, micro_batch_size: 16, learning_rate: 3.0e-3}
grpo: {max_steps: 12, prompts_per_step: 8, micro_batch_size: 8, learning_rate: 5.0e-4, adam_beta2: 0.95}
"""
TOOL = """
from PIL import Image, ImageOps


class Enlarge:
    def reset(self, images, **columns):
        self.image, self.asked = images[0], 0.0

    def enlarge(self, times: int) -> Image.Image:
        \"\"\"Show the picture larger.\"\"\"
        self.asked = 1.0
        return ImageOps.scale(self.image, times)

    def get_reward(self):
        return self.asked
"""


def draw(name, count):
    """Write rows whose images have one coloured half; half the demonstrations call the tool that enlarges it."""
    rng, lines = random.Random(name), []
    for i in range(count):
        color, half = rng.choice([*COLORS]), rng.randrange(2)
        picture = PIL.Image.new("RGB", (84, 84), tuple(rng.randrange(150, 200) for _ in "rgb"))
        picture.paste(COLORS[color], (42 * half + 3, rng.randrange(30), 42 * half + 39, 75))
        picture.save(f"{name}{i}.png")
        row = {"image": f"{name}{i}.png", "problem": "What colour is it?", "solution": color}
        if name == "shown":
            call = {"type": "function", "function": {"name": "enlarge", "arguments": {"times": 2}}}
            called = {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "<image>"}
            turns = [{"role": "user", "content": "<image>What colour is it?"}, *called * (i % 2)]
            turns.append({"role": "assistant", "content": f"<answer>{color}</answer>"})
            row = {"images": [row["image"]] * (1 + i % 2), "messages": turns}
        lines.append(row)
    write_lines(Path(f"{name}.jsonl"), lines)


def write_folder(path, template):
    """Write a tiny Qwen3.5 with transformers, including config, tokenizer and chat template."""
    texts = [*Path("shown.jsonl").read_text().splitlines(), *[template] * 20]
    trained = json.loads(train_tokenizer(texts, vocab_size=1500).backend.to_str())["model"]
    tokenizer = transformers.Qwen3_5Tokenizer(vocab=trained["vocab"], merges=list(map(tuple, trained["merges"])))
    words = (*WORDS, "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_tokens(tokens + [AddedToken(word, normalized=False) for word in words])
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|endoftext|>", template
    config = tiny_config("qwen3_5", tied=True)
    inside = config["text_config"]
    inside["vocab_size"] = -(-len(tokenizer) // 64) * 64
    for section in (config, inside):
        section |= {key: tokenizer.convert_tokens_to_ids(IDS[key]) for key in section.keys() & IDS.keys()}
    model = CLASSES["qwen3_5"]._from_config(transformers.AutoConfig.for_model(**config))
    drafter = {"mtp.fc.weight": torch.eye(64)}
    tiny.telling_weights(model).save_pretrained(path, state_dict=model.state_dict() | drafter)
    tokenizer.save_pretrained(path)
    images = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    images |= {"image_processor_type": "Qwen2VLImageProcessor"}
    (path / "preprocessor_config.json").write_text(json.dumps(images))


def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys, published):
    """Run the commands of the page, then compare the saved checkpoint's logits and token ids with transformers."""
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```bash\n(.*?)```", PAGE.partition("\n## The whole way\n")[2], re.DOTALL)
    for name, count in (("shown", 64), ("train", 128), ("eval", 16)):
        draw(name, count)
    write_folder(tmp_path / "FOLDER", published("qwen3_5_think"))
    (tmp_path / "tool.py").write_text(TOOL)
    (tmp_path / "squares.yaml").write_text(RECIPE)
    for command in block.splitlines():
        capsys.readouterr()
        try:
            status = main(shlex.split(command)[3:])
        except SystemExit as end:
            status = end.code
        assert status == 0, capsys.readouterr()

    lines = [line for line in metrics(tmp_path / "runs" / "squares") if line["stage"] == "grpo"]
    assert len(lines) == 14
    assert max(line["reward"] for line in lines) > 0  # the final reward depends on the machine
    saved = tmp_path / "runs" / "squares" / "checkpoint"
    theirs, info = CLASSES["qwen3_5"].from_pretrained(saved, output_loading_info=True)
    assert not any(info.values())
    assert load_file(saved / "model.safetensors")["mtp.fc.weight"].equal(torch.eye(64))
    processor, [row, *_] = load_processor(saved, max_pixels=7056), FileDataset("eval.jsonl")
    words = transformers.AutoTokenizer.from_pretrained(saved)
    prompt = row.prompt(processor)
    asked = words.apply_chat_template(row.messages, add_generation_prompt=True, tokenize=False)
    asked = words(asked.replace("<|image_pad|>", "<|image_pad|>" * 9))
    assert asked["input_ids"] == prompt.input_ids.tolist()
    monkeypatch.setattr(tiny, "IMAGE", words.convert_tokens_to_ids("<|image_pad|>"))
    assert worst_difference(theirs, load_model(saved), [prompt]) < ROUNDING["qwen3_5"]
