"""Train the built-in task with GRPO in minivlmrl and TRL, and compare accuracy over steps and over CPU seconds.

    python benchmarks/same_curve.py --work W --json same_curve.json    # seven CPU minutes a seed; needs .[test,boxes]
    python benchmarks/same_curve.py --toy                              # two steps per trainer

Both trainers start from the same SFT model, with the same rows in the same order and the same options, which were not
tuned. The same function evaluates both models on held-out images, while the clock is stopped. A run is a process with
one thread, and the trainers alternate. TRL has its defaults, except for method options, and for what makes it faster on
a CPU: all completions of a step in one batch, no gradient checkpointing, log-probabilities of completions alone.

Criterion (2026-12-01, before seeds 5 to 19): runs are paired by seed, and a two-sided paired t-test with p < 0.05, in
the mean accuracy over the second half of the evaluations or in the last accuracy, is a difference. Seeds 0 to 4 had
been seen, so seeds 5 and later are also compared alone.

Finished runs, in --work or --json, are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before importing transformers, to use no network
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import common  # noqa: E402
import torch  # noqa: E402
from grpo_step import trl_processor  # noqa: E402

from minivlmrl.config.loading import load_config  # noqa: E402
from minivlmrl.config.options import RunConfig  # noqa: E402
from minivlmrl.distributed.process_group import World  # noqa: E402
from minivlmrl.model.checkpoint import load_model, load_processor  # noqa: E402
from minivlmrl.model.families.registry import hub_name  # noqa: E402
from minivlmrl.rewards import text  # noqa: E402
from minivlmrl.run.callbacks import Callback, default_callbacks  # noqa: E402
from minivlmrl.run.datasets import load_task  # noqa: E402
from minivlmrl.run.evaluate import evaluate  # noqa: E402
from minivlmrl.run.loop import run_training  # noqa: E402

SIDES = ("minivlmrl", "TRL")
ACCURACY = "eval/accuracy_sampled"
# a run's accuracies after the start -> what the criterion compares
STATISTICS = {
    "second half": lambda accuracies: statistics.mean(accuracies[len(accuracies) // 2 :]),
    "last": lambda accuracies: accuracies[-1],
}
FIRST_UNSEEN = 5  # the criterion was written after seeds 0 to 4
# steps, steps between evaluations, held-out images, SFT steps
FULL, TOY = (160, 20, 256, 40), (2, 1, 4, 1)


class Clock:
    """CPU seconds in this process, without evaluations."""

    def __init__(self):
        self.seconds = 0.0
        self.resume()

    def stop(self):
        self.seconds += time.process_time() - self.started

    def resume(self):
        self.started = time.process_time()


class Recorder(Callback):
    """Record row indices and CPU seconds in a minivlmrl run."""

    def __init__(self):
        self.rows, self.seconds = [], []

    def on_stage_begin(self, trainer, optimizer, state):
        self.clock = Clock()

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        self.rows += [group[0].row.index for group in step.rollout.groups]

    def on_step_end(self, trainer, step, number, values):
        self.clock.stop()
        self.seconds.append(self.clock.seconds)
        self.clock.resume()

    def on_evaluation(self, stage, steps_done, num_rows):
        if self.rows:
            self.clock.resume()


def read_config(work: Path, sizes: tuple, seed: int, *options: str) -> RunConfig:
    """Read the built-in task's recipe, with a learning rate that falls to zero, as in TRL's linear schedule."""
    steps, every, rows, sft_steps = sizes
    options = (
        f"--seed={seed}", "--num_threads=1", f"--data.eval_rows={rows}", f"--sft.max_steps={sft_steps}",
        f"--grpo.max_steps={steps}", f"--eval_steps={every}", "--grpo.min_lr_ratio=0", "--state_minutes=0",
        "--resume=never", *options,
    )  # fmt: skip
    return load_config(str(ROOT / "recipes" / "shapes.yaml"), list(options))


def train_ours(work: Path, sizes: tuple, seed: int) -> dict:
    """Train with minivlmrl, and write the row indices for TRL."""
    out = work / f"ours_{seed}"
    model = [f"--model.path={work / 'sft' / 'checkpoint'}", "--model.config=null", "--stages=[grpo]"]
    config = read_config(work, sizes, seed, *model, f"--output_dir={out}")
    recorder = Recorder()
    run_training(config, [*default_callbacks(config), recorder])
    (work / f"rows_{seed}.json").write_text(json.dumps(recorder.rows))
    lines = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines}  # the last step is evaluated again after the stage
    seconds = [0.0, *recorder.seconds]
    return {
        "steps": list(evaluations),
        "accuracy": [line[ACCURACY] for line in evaluations.values()],
        "cpu_seconds": [round(seconds[step], 2) for step in evaluations],
    }


def train_trl(work: Path, sizes: tuple, seed: int) -> dict:
    """Train with TRL on the same rows, and evaluate its weights with our function."""
    import datasets
    import transformers
    import trl
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda *args, **kwargs: True  # score completions alone, as on a GPU
    steps, every = sizes[:2]
    folder = work / "sft" / "checkpoint"
    config = read_config(work, sizes, seed)
    rows, grpo = load_task(config, {"grpo": "prompts"}), config.grpo
    held_out, prompts = rows["eval"], rows["grpo"]
    model, processor = load_model(folder), load_processor(folder)
    result = {"steps": [], "accuracy": [], "cpu_seconds": []}

    def add_evaluation(step: int, weights: dict, seconds: float):
        model.load_state_dict({hub_name(name): weight for name, weight in weights.items()})
        result["steps"].append(step)
        result["accuracy"].append(evaluate(model, processor, held_out, config, World())[ACCURACY])
        result["cpu_seconds"].append(round(seconds, 2))

    class Evaluator(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            add_evaluation(0, model.state_dict(), 0.0)
            self.clock = Clock()

        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step % every == 0 or state.global_step == steps:
                self.clock.stop()
                add_evaluation(state.global_step, model.state_dict(), self.clock.seconds)
                self.clock.resume()

    def as_chat(row) -> dict:
        problem = row.columns["problem"]
        return {
            "prompt": [{"role": "user", "content": problem}],
            "image": row.images[0],
            "solution": row.columns["solution"],
        }

    def reward_format(completions, **columns):
        return text.tag_format([message["content"] for (message,) in completions])

    def reward_accuracy(completions, solution, **columns):
        return text.accuracy([text.find_answer(message["content"]) for (message,) in completions], solution)

    order = json.loads((work / f"rows_{seed}.json").read_text())
    trainer = trl.GRPOTrainer(
        transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32),
        [reward_format, reward_accuracy],
        trl.GRPOConfig(
            # method options, as in recipes/shapes.yaml
            per_device_train_batch_size=grpo.prompts_per_step * grpo.num_generations,
            num_generations=grpo.num_generations, max_completion_length=config.sampling.max_new_tokens,
            max_steps=steps, learning_rate=grpo.learning_rate, lr_scheduler_type="linear",
            warmup_steps=grpo.warmup_steps, adam_beta2=grpo.adam_beta2, beta=grpo.beta, loss_type=grpo.loss_type,
            reward_weights=list(config.rewards.values()), seed=seed, shuffle_dataset=False,
            # float32 on a CPU, without checkpoints and logs
            use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=steps + 1, save_strategy="no",
            report_to="none", disable_tqdm=True, output_dir=str(work / f"trl_{seed}"),
        ),
        train_dataset=datasets.Dataset.from_list([as_chat(prompts[index]) for index in order]),
        processing_class=trl_processor(folder),
        callbacks=[Evaluator()],
    )  # fmt: skip
    trainer.train()
    return result


def compare(runs: list[dict]) -> dict:
    """Apply the criterion: {statistic: means, TRL's mean lead with its 95 % interval, p, number of seeds}."""
    from scipy.stats import ttest_1samp

    found = {}
    for (name, statistic), first in product(STATISTICS.items(), (0, FIRST_UNSEEN)):
        name += f", seeds from {first}" if first else ""
        kept = [run for run in runs if run["seed"] >= first]
        sides = [{run["seed"]: statistic(run["accuracy"][1:]) for run in kept if run["side"] == side} for side in SIDES]
        seeds = sorted(sides[0].keys() & sides[1].keys())
        if not seeds:
            continue
        ours, theirs = ([side[seed] for seed in seeds] for side in sides)
        leads = [b - a for a, b in zip(ours, theirs, strict=True)]
        found[name] = {"seeds": len(seeds), "minivlmrl": statistics.mean(ours), "TRL": statistics.mean(theirs)}
        if len(seeds) > 1:
            test = ttest_1samp(leads, 0)
            found[name] |= {"lead": statistics.mean(leads), "interval": [*test.confidence_interval()], "p": test.pvalue}
            found[name]["seeds that TRL leads"] = sum(lead > 0 for lead in leads)
    return found


def run_in_process(work: Path, seed: int, side: str, options: list[str]) -> dict:
    """Train in a process of its own, unless `work` has the finished run."""
    file = work / f"{side}_{seed}.json"
    if not file.exists():
        command = [sys.executable, __file__, f"--run={side}", f"--seeds={seed}", f"--work={work}", f"--json={file}"]
        subprocess.run([*command, *options], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return json.loads(file.read_text())


def main(arguments: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--toy", action="store_true", help="two steps of both trainers")
    parser.add_argument("--json", type=Path, help="file for the results, which is written after each run")
    parser.add_argument("--work", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--run", choices=SIDES, help=argparse.SUPPRESS)  # internal: one run in this process
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = TOY if options.toy else FULL
    if options.run:
        train = train_ours if options.run == SIDES[0] else train_trl
        result = train(options.work, sizes, options.seeds[0]) | {"commit": common.commit()}
        return options.json.write_text(json.dumps(result))
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(exist_ok=True)
        if not (work / "sft").exists():
            sft = read_config(work, sizes, 0, "--stages=[sft]", f"--output_dir={work / 'sft'}")
            run_training(sft, default_callbacks(sft))
        results = {**common.provenance("trl"), "runs": [], "test": {}}
        if options.json and options.json.exists():
            results = json.loads(options.json.read_text())
        finished = {(run["seed"], run["side"]) for run in results["runs"]}
        runs = product([0] if options.toy else options.seeds, SIDES)
        for seed, side in runs:
            if (seed, side) not in finished:
                run = run_in_process(work, seed, side, ["--toy"] * options.toy)
                results["runs"].append({"side": side, "seed": seed, **run})
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
        results["test"] = compare(results["runs"])
        print(json.dumps(results["test"]))
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
