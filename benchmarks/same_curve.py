"""Train the built-in task with GRPO in minivlmrl and TRL, and compare accuracy over steps and over CPU seconds.

    python benchmarks/same_curve.py --work W --json same_curve.json    # seven CPU minutes a seed; needs .[test,boxes]
    python benchmarks/same_curve.py --toy --seeds 0 --work toy --json toy.json   # two steps per trainer

Both trainers start from the same SFT model, with the same rows in the same order and the same options, which were not
tuned. The same function evaluates both models on held-out images, while the clock is stopped. A run is a process with
one thread, and the trainers alternate. TRL has its defaults, except for method options, and for what makes it faster on
a CPU: all completions of a step in one batch, no gradient checkpointing, log-probabilities of completions alone.

Criterion (2026-12-01, before seeds 5 to 19): runs are paired by seed, and a two-sided paired t-test with p < 0.05, in
the mean accuracy over the second half of the evaluations or in the last accuracy, is a difference. Seeds 0 to 4 had
been seen, so seeds 5 and later are also compared alone.

Runs in the file are not repeated.
"""

import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.beside_trl import Clock, Recorder, trl_trainer  # noqa: E402
from minivlmrl.config.loading import load_config  # noqa: E402
from minivlmrl.config.options import RunConfig  # noqa: E402
from minivlmrl.distributed.process_group import World  # noqa: E402
from minivlmrl.model.checkpoint import load_model, load_processor  # noqa: E402
from minivlmrl.model.families.registry import hub_name  # noqa: E402
from minivlmrl.run.callbacks import default_callbacks  # noqa: E402
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


def read_config(sizes: tuple, seed: int, *options: str) -> RunConfig:
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
    config = read_config(sizes, seed, *model, f"--output_dir={out}")
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
    import transformers

    torch.set_num_threads(1)
    steps, every = sizes[:2]
    folder = work / "sft" / "checkpoint"
    config = read_config(sizes, seed, f"--output_dir={work / f'run_{seed}'}")
    rows = load_task(config, {"grpo": "prompts"})
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
                add_evaluation(state.global_step, model.state_dict(), self.clock.stop())
                self.clock.resume()

    order = json.loads((work / f"rows_{seed}.json").read_text())
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    chosen = [prompts[index] for index in order]
    trl_trainer(theirs, config, chosen, Evaluator(), logging_steps=steps + 1).train()
    return result


def compare(runs: list[dict]) -> dict:
    """Apply the criterion: {statistic: means, TRL's mean lead with its 95 % interval, p, number of seeds}."""
    from scipy.stats import ttest_1samp

    found = {}
    for (name, statistic), first in product(STATISTICS.items(), (0, FIRST_UNSEEN)):
        kept = [run for run in runs if run["seed"] >= first]
        ours, theirs = (
            {run["seed"]: statistic(run["accuracy"][1:]) for run in kept if run["side"] == side} for side in SIDES
        )
        seeds = sorted(ours.keys() & theirs.keys())
        if len(seeds) > 1:
            leads = [theirs[seed] - ours[seed] for seed in seeds]
            test = ttest_1samp(leads, 0)
            found[f"{name}, seeds from {first}" if first else name] = {
                "seeds": len(seeds),
                "minivlmrl": statistics.mean(ours[seed] for seed in seeds),
                "TRL": statistics.mean(theirs[seed] for seed in seeds),
                "lead": statistics.mean(leads),
                "interval": [*test.confidence_interval()],
                "p": test.pvalue,
                "seeds that TRL leads": sum(lead > 0 for lead in leads),
            }
    return found


def run_in_process(work: Path, sizes: tuple, side: str, seed: int) -> dict:
    """Train in a process of its own."""
    train = train_ours if side == SIDES[0] else train_trl
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(train, work, sizes, seed).result()


def main(arguments: list[str] | None = None):
    parser = common.study_options(__doc__, seeds=range(5))
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--toy", action="store_true", help="two steps of both trainers")
    options = parser.parse_args(arguments)
    sizes = TOY if options.toy else FULL
    work = options.work.resolve()
    if not (work / "sft").exists():
        sft = read_config(sizes, 0, "--stages=[sft]", f"--output_dir={work / 'sft'}")
        run_training(sft, default_callbacks(sft))
    keys = [{"side": side, "seed": seed} for seed, side in product(options.seeds, SIDES)]
    run = partial(run_in_process, work, sizes)
    results = common.study(options.json, keys, run, lambda runs: {"test": compare(runs)})
    print(json.dumps(results["test"]))


if __name__ == "__main__":
    main()
