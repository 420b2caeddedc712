"""Train on the public task with minivlmrl, with TRL and with bugs, and record held-out accuracies during training.

    python -m minivlmrl task shapes shapes_task
    python benchmarks/public_task.py shapes_task --runs ours --seeds 0 1 2 3 4 5 6 7 8 9   # ten minutes on one core
    python benchmarks/public_task.py shapes_task --runs trl --seeds 0 1 2                  # needs `pip install .[test]`
    python benchmarks/public_task.py shapes_task --runs labels_of_next_row no_kl           # two of BUGS

A run has 160 steps of 16 prompts x 8 completions, one thread, and the options of recipes/shapes.yaml, with both
trainers. Before training, after every 20 steps and at the end, minivlmrl's evaluation answers the 256 held-out images
at temperature 1, also for the models of TRL. Runs are added to docs/public_task.json, from which
`python -m docs.scripts.make_pages` draws docs/public_task.svg.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from grpo_step import trl_processor

from minivlmrl.config.import_utils import recipes_folder, run_file
from minivlmrl.config.loading import load_config
from minivlmrl.distributed.process_group import World
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "public_task.json"
STEPS, EVERY = 160, 20
PROMPTS, GROUP = 16, 8
METRIC = "eval/accuracy_sampled"
# names on the page -> options of audit/mutation_study.py
BUGS = {
    "labels_of_next_row": ["--bug", "rewards_see_other_rows"],
    "images_of_next_row": ["--bug", "pictures_of_others"],
    "mask_off_by_one": ["--bug", "end_token_masked"],
    "no_kl": ["--grpo.beta=0"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that `python -m minivlmrl task shapes` wrote")
    parser.add_argument("--runs", nargs="+", choices=["ours", "trl", *BUGS], default=["ours", "trl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    folder = options.folder.resolve()
    for name in options.runs:
        for seed in options.seeds:
            run = train_with_trl if name == "trl" else train
            accuracies = run(folder, seed, BUGS.get(name, []))
            print(f"{name}, seed {seed}: {accuracies}", flush=True)
            add(name, seed, accuracies)


def recipe(folder: Path) -> list[str]:
    """Options of recipes/shapes.yaml that read the task's files."""
    return [
        "--stages=[grpo]",
        "--model.config=null",
        f"--model.path={folder}/model",
        "--data.task=null",
        f"--data.train_file={folder}/train.jsonl",
        f"--data.eval_file={folder}/eval.jsonl",
        f"--eval_steps={EVERY}",
        "--num_threads=1",
    ]


def train(folder: Path, seed: int, options: list[str]) -> list[float]:
    """Train with minivlmrl in a new process, with a bug if `options` has one."""
    script = ["audit/mutation_study.py"] if "--bug" in options else ["train.py", "recipes/shapes.yaml"]
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, *script, *options, *recipe(folder), f"--seed={seed}", f"--output_dir={run}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(run) / "evaluations.jsonl").read_text().splitlines()]
    return [round(line[METRIC], 4) for line in lines]


def train_with_trl(folder: Path, seed: int, options: list[str]) -> list[float]:
    """Train with TRL's GRPOTrainer and reward.py of the folder."""
    import datasets
    import transformers
    import trl

    accuracies = []

    class Evaluate(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **others):
            if state.global_step == 0:
                accuracies.append(held_out_accuracy(folder, model))

        def on_step_end(self, args, state, control, model=None, **others):
            if state.global_step % EVERY == 0:
                accuracies.append(held_out_accuracy(folder, model))

    rows = datasets.load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    rows = rows.map(lambda row: {"images": [str(folder / path) for path in row["images"]]})
    rows = rows.cast_column("images", datasets.List(datasets.Image()))
    section = load_config(recipes_folder() / "shapes.yaml", recipe(folder)).grpo
    with tempfile.TemporaryDirectory() as output:
        config = trl.GRPOConfig(
            output_dir=output,
            seed=seed,
            max_steps=STEPS,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=20,
            loss_type=section.loss_type,
            beta=section.beta,
            learning_rate=section.learning_rate,
            warmup_steps=section.warmup_steps,
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": section.learning_rate * section.min_lr_ratio, "power": 1.0},
            adam_beta2=section.adam_beta2,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
        reward = run_file(str(folder / "reward.py")).trl_reward
        processor = trl_processor(folder / "model")
        trainer = trl.GRPOTrainer(
            model, reward, config, train_dataset=rows, processing_class=processor, callbacks=[Evaluate()]
        )
        trainer.train()
    return accuracies


def held_out_accuracy(folder: Path, model: torch.nn.Module) -> float:
    """Answer the held-out rows with the weights of a model of transformers."""
    config = load_config(recipes_folder() / "shapes.yaml", recipe(folder))
    with tempfile.TemporaryDirectory() as copy:
        model.save_pretrained(copy)
        policy = load_model(Path(copy))
    processor = load_processor(folder / "model")
    rows = load_datasets(config, {"grpo": "prompts"})["eval"]
    return round(evaluate(policy, processor, rows, config, World())[METRIC], 4)


def add(name: str, seed: int, accuracies: list[float]):
    """Add a run to the results, in place of an earlier run with the same name and seed."""
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    runs = [run for run in runs if (run["run"], run["seed"]) != (name, seed)]
    runs.append({"run": name, "seed": seed, "accuracies": accuracies})
    runs.sort(key=lambda run: (run["run"], run["seed"]))
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
