"""Write a small task for any trainer: images, rows, a model after SFT, and a reward.

python -m minivlmrl task shapes FOLDER    # about 20 seconds on a CPU

docs/public_task.md shows how TRL, EasyR1, verl and minivlmrl train on the folder.
"""

import argparse
import base64
import shutil
import tempfile
from pathlib import Path

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.json_files import json_text
from minivlmrl.run.loop import run_training
from minivlmrl.tasks import shapes

NUM_TRAIN, NUM_EVAL = 512, 256
README = """\
This folder is a task for reinforcement learning: name the colour and the shape of an object.

    train.jsonl, eval.jsonl              rows for TRL and minivlmrl; image paths are relative to this folder
    easyr1_train.jsonl, ..._eval.jsonl   the same rows for EasyR1
    verl_train.json, verl_eval.json      the same rows for verl; they contain the images
    train/, eval/                        images of 56 x 56 pixels
    reward.py                            the reward, as a function for TRL, EasyR1 and verl
    model/                               a Qwen2.5-VL of 0.74 million parameters after SFT; train it further

`python -m minivlmrl task shapes FOLDER` wrote it, and docs/public_task.md in the repository of minivlmrl says how to
train on it and what a correct trainer reaches.
"""


def main(arguments: list[str]) -> int:
    """Run the command `task`; return the exit status, which is not 0 if a signal ended it."""
    parser = argparse.ArgumentParser(
        prog="python -m minivlmrl task", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("name", choices=["shapes"], help="the only task so far")
    parser.add_argument("folder", type=Path, help="folder to create")
    folder = parser.parse_args(arguments).folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists; choose another folder")
    # The folder has its name only when it is complete, so an interrupted command can be repeated.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # the held-out rows and the first training rows in the default run with seed 0
    write_split(partial, "train", shapes.Shapes(NUM_TRAIN, "0/grpo"))
    write_split(partial, "eval", shapes.Shapes(NUM_EVAL, "eval"))
    exit_code = train_model(partial / "model")
    if exit_code:
        shutil.rmtree(partial)
        print(f"{folder} was not written; repeat the command")
        return exit_code
    shutil.copy(recipes_folder() / "shapes_reward.py", partial / "reward.py")
    (partial / "README.md").write_text(README)
    if folder.exists():
        folder.rmdir()  # an empty folder, which Windows would not replace
    partial.rename(folder)
    print(f"wrote {folder}")
    return 0


def write_split(folder: Path, split: str, rows: shapes.Shapes):
    """Write a split's images, and its rows in three trainers' formats."""
    (folder / split).mkdir()
    lines: dict[str, list[dict]] = {
        f"{split}.jsonl": [],
        f"easyr1_{split}.jsonl": [],
        f"verl_{split}.json": [],
    }
    for number, row in enumerate(rows):
        path = f"{split}/{number:03}.png"
        row.images[0].save(folder / path)
        solution = row.columns["solution"]
        trl, easyr1, verl = lines.values()
        # TRL itself puts the image before the question
        trl.append({"prompt": user(shapes.PROBLEM), "images": [path], "solution": solution})
        question = f"<image>{shapes.PROBLEM}"
        easyr1.append({"problem": question, "images": [path], "answer": solution})
        verl.append(
            {
                "data_source": "shapes",
                "prompt": user(question),
                "images": [{"image": data_uri(folder / path)}],
                "reward_model": {"style": "rule", "ground_truth": solution},
            }
        )
    for name, content in lines.items():
        texts = [json_text(line) for line in content]
        # verl accepts .json only, which is a list here
        text = "[\n" + ",\n".join(texts) + "\n]" if name.endswith(".json") else "\n".join(texts)
        (folder / name).write_text(text + "\n")


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def data_uri(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def train_model(folder: Path) -> int:
    """Train the default run's model with its SFT stage, and save the model.

    Returns:
        0, or the exit code of a run that a signal ended; then there is no model.
    """
    with tempfile.TemporaryDirectory() as run:
        options = ["--stages=[sft]", f"--output_dir={run}", "--num_threads=1"]
        exit_code = run_training(load_config(recipes_folder() / "shapes.yaml", options))
        if not exit_code:
            shutil.copytree(Path(run) / "checkpoint", folder)
        return exit_code
