"""A student that sees one token of a picture learns from a teacher that sees four, beside SFT and GRPO.

    python benchmarks/distill.py --seeds 0 1 2      # each a few minutes on one core; prints a table

Teacher: SFT with right labels on the pictures of `shapes` as they are, 56 pixels a side. Student: a short SFT on half
wrong labels with 28 pixels a side, then as many steps of the stage distill, of SFT on the teacher's greedy answers, or
of GRPO with the true reward.
"""

import argparse
import contextlib
import copy
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from minivlmrl import train  # noqa: E402
from minivlmrl.environments.tool_sampler import build_sampler  # noqa: E402
from minivlmrl.sampling.filters import SamplingOptions  # noqa: E402
from minivlmrl.scale.checkpoint import load_model, load_processor  # noqa: E402
from minivlmrl.scale.ranks import World  # noqa: E402
from minivlmrl.tasks import shapes  # noqa: E402

STEPS, PROMPTS = 40, 16
SMALL = ["--data.min_pixels=784", "--data.max_pixels=784"]


class Taught:
    """The rows that GRPO asks about, with the teacher's answers as demonstrations."""

    def __init__(self, rows):
        self.rows, self.answers = rows, json.loads(Path(os.environ["TAUGHT"]).read_text())

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int):
        return replace(self.rows[index], completion=self.answers[index])


def datasets(data, seed: int):
    training, held_out = shapes.datasets(data, seed)
    return training | {"demonstrations": Taught(training["prompts"])}, held_out


TASK = replace(shapes.TASK, datasets=datasets)


def uncut(row):
    """What the teacher sees: the picture as it is."""
    messages = copy.deepcopy(row.messages)
    messages[-1]["content"][0]["max_pixels"] = shapes.SIZE**2
    return replace(row, messages=messages)


def run(folder: Path, *options: str) -> dict:
    """Results of a run, by stage."""
    given = [str(ROOT / "recipes" / "shapes.yaml"), f"--output_dir={folder}", "--num_threads=1", *options]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train.main([*given, "--state_minutes=0", "--log_completions=0"])
    return json.loads((folder / "summary.json").read_text())


@torch.no_grad()
def ask(teacher: Path, seed: int) -> list[str]:
    """What the teacher answers to the first rows of a seed, greedily."""
    model, processor = load_model(teacher, torch.float32), load_processor(teacher)
    sample = build_sampler(model, processor, SamplingOptions(temperature=0.0, max_new_tokens=20), World())
    rows, answers = shapes.Shapes(STEPS * PROMPTS, f"{seed}/grpo"), []
    for start in range(0, len(rows), 64):
        prompts = [rows[i].prompt(processor) for i in range(start, min(start + 64, len(rows)))]
        answers += [processor.decode(said.ids) for [said] in sample(prompts, 1, [""] * len(prompts))]
    return answers


def main():
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = p.parse_args()
    with tempfile.TemporaryDirectory() as home:
        home, right = Path(home), ["--data.task=shapes(demonstrations=4096, wrong_demonstrations=0)"]
        found = run(home / "teacher", "--stages=[sft]", "--sft.max_steps=100", *right)
        teacher = home / "teacher" / "checkpoint"
        print(f"teacher {found['after_sft']}", flush=True)
        for seed in options.seeds:
            here, own = home / str(seed), [f"--seed={seed}", *SMALL]
            found = run(here / "start", *own, "--stages=[sft]", "--sft.max_steps=15")
            print(f"seed {seed} start {found['after_sft']}", flush=True)
            begin = [*own, "--model.config=null", f"--model.path={here / 'start' / 'checkpoint'}"]
            online = [f"--grpo.max_steps={STEPS}", f"--grpo.prompts_per_step={PROMPTS}", "--grpo.num_generations=4"]
            told = [f"--reference.teacher={teacher}", f"--reference.teacher_prompt={__file__}:uncut"]
            ways = {"distill": [*online, *told, "--stages=[distill]", "--grpo.learning_rate=1e-3"]}
            ways["grpo"] = [*online, "--stages=[grpo]", "--grpo.learning_rate=1e-3"]
            for name, given in ways.items():
                print(f"seed {seed} {name} {run(here / name, *begin, *given)[f'after_{name}']}", flush=True)
            os.environ["TAUGHT"] = str(here / "taught.json")
            (here / "taught.json").write_text(json.dumps(ask(teacher, seed)))
            given = [f"--sft.max_steps={STEPS}", f"--sft.prompts_per_step={PROMPTS}", "--sft.learning_rate=1e-3"]
            found = run(here / "sft", *begin, *given, "--stages=[sft]", f"--data.task={__file__}:TASK")
            print(f"seed {seed} sft on the teacher's answers {found['after_sft']}", flush=True)


if __name__ == "__main__":
    main()
