"""Run the commands of the section "The whole way" in docs/data.md, from a model folder to an evaluation."""

import shlex
import shutil

import PIL.Image
import transformers
import yaml

from minivlmrl.__main__ import main
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.model.checkpoint import load_processor
from tests.helpers.links import ROOT, blocks
from tests.helpers.runs import metrics, write_lines

PAGE = (ROOT / "docs" / "data.md").read_text()
# changes of the page's recipe: a reward that differs between completions of a tiny model, and few samples
SMALL = {
    "num_threads": 1, "model": {"path": "FOLDER"}, "rewards": {"my_rewards.py:letters": 0.1, "accuracy": 1.0},
    "sft": {"max_steps": 2, "prompts_per_step": 4, "micro_batch_size": 4},
    "grpo": {"max_steps": 12, "prompts_per_step": 2, "micro_batch_size": 2, "num_generations": 2},
}  # fmt: skip
REWARD = """
def letters(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]
"""


def test_the_commands_of_the_page(checkpoint, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    section = PAGE.partition("\n## The whole way\n")[2].partition("\n## ")[0]
    [block], [recipe] = blocks(section, "bash"), blocks(section, "yaml")
    recipe = yaml.safe_load(recipe) | SMALL
    recipe["data"]["max_pixels"] = 7056
    for name in ("shown", "train"):
        shutil.copy(rows, f"{name}.jsonl")
    held_out = [{"problem": "Hm?", "image": "eval0.png", "solution": f"square {i}"} for i in range(16)]
    write_lines(tmp_path / "eval.jsonl", held_out)
    for image in rows.parent.glob("*.png"):
        shutil.copy(image, tmp_path)
    PIL.Image.new("RGB", (56, 56), "red").save("eval0.png")
    shutil.copytree(checkpoint, "FOLDER")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "squares.yaml").write_text(yaml.safe_dump(recipe))
    for command in block.splitlines():
        capsys.readouterr()
        try:
            status = main(shlex.split(command)[1:])
        except SystemExit as end:
            status = end.code
        assert status == 0, capsys.readouterr().out[-900:]
    lines = metrics(tmp_path / "runs" / "squares")
    assert [line["stage"] for line in lines] == ["sft"] * 2 + ["grpo"] * 14
    assert any(line.get("reward", 0) > 0 for line in lines)
    saved = tmp_path / "runs" / "squares" / "checkpoint"
    words, [row, *_] = transformers.AutoTokenizer.from_pretrained(saved), FileDataset("eval.jsonl")
    prompt = row.prompt(load_processor(saved, max_pixels=7056))
    assert "Hm?" in words.decode(prompt.input_ids)
