"""Train the first steps of recipes/sums.yaml with minivlmrl and with TRL's GRPOTrainer and PEFT; compare the cost.

    python benchmarks/trl_sums.py minivlmrl vlm/ --rows . --steps 20 --json ours.json
    python benchmarks/trl_sums.py TRL Qwen2.5-Coder-0.5B-Instruct/ --rows . --steps 20 --json trl.json --order ours.json

recipes/from_text_model.py made vlm/ from the text model, and recipes/sums.py wrote the rows. TRL trains with the same
rows in the same order, and with the recipe's method options. TRL's base model has bfloat16 weights, its adapters
float32, and both compute in bfloat16, or all in float32 with --dtype float32. TRL scores completions alone, as on a
GPU; --batch is its number of completions per forward and backward pass. Runs end after --steps steps in a schedule of
40, without saving a model. Accuracy is over a step's 128 completions, before the update.
"""

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before importing transformers, to use no network
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import torch  # noqa: E402
from common import read_lines  # noqa: E402

from minivlmrl.config.loading import load_config  # noqa: E402
from minivlmrl.run.callbacks import Callback, default_callbacks  # noqa: E402
from minivlmrl.run.loop import run_training  # noqa: E402

SYSTEM = "You are a helpful assistant."
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMPLETIONS = 128  # 16 prompts, 8 completions each
# options of TRL's GRPOConfig
ON_CPU = {
    "use_cpu": True, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip


class Record:
    """Write accuracy, CPU seconds and peak memory per step to a file; end the process after the last step."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.steps, self.rows, self.start = options, [], [], time.process_time()

    def add(self, accuracy: float):
        seconds = time.process_time() - self.start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.steps.append({"accuracy": accuracy, "cpu_seconds": round(seconds, 1), "peak_gib": round(peak, 2)})
        print(json.dumps(self.steps[-1]), flush=True)
        content = {"batch": self.options.batch, "dtype": self.options.dtype, "steps": self.steps, "rows": self.rows}
        self.options.json.write_text(json.dumps(content) + "\n")
        if len(self.steps) == self.options.steps:
            os._exit(0)  # without saving the model


class OurRecord(Callback):
    """Record a minivlmrl run."""

    def __init__(self, options: argparse.Namespace):
        self.options = options

    def on_stage_begin(self, trainer, optimizer, state):
        self.record = Record(self.options)

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        self.record.rows += [group[0].row.index for group in step.rollout.groups]

    def on_step_end(self, trainer, step, number, values):
        self.record.add(values["rewards/accuracy/mean"])


def train_ours(options: argparse.Namespace):
    changes = [f"--model.path={options.model}", f"--model.compute_dtype={options.dtype}"]
    changes += [f"--data.train_file={options.rows / 'sums_train.jsonl'}"]
    changes += ["--data.eval_file=null", "--data.eval_rows=0", "--eval_steps=0", "--resume=never"]
    changes += [f"--output_dir={options.json.with_suffix('')}_run", "--num_threads=1", "--state_minutes=0"]
    config = load_config(str(ROOT / "recipes" / "sums.yaml"), changes)
    run_training(config, [*default_callbacks(config), OurRecord(options)])


def accuracy(completions, solution, **columns):
    texts = [message["content"].strip().rstrip(".") for (message,) in completions]
    return [float(text == right) for text, right in zip(texts, solution, strict=True)]


def train_trl(options: argparse.Namespace):
    import datasets
    import peft
    import transformers
    import trl
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda *args, **kwargs: True  # score completions alone, as on a GPU

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, *given, **kwargs):
            self.record = Record(options)

        def on_log(self, args, state, control, logs, **kwargs):
            self.record.add(float(logs["reward"]))

    order = json.loads(options.order.read_text())["rows"]
    given = read_lines(options.rows / "sums_train.jsonl")
    rows = [given[index] for index in order]
    system = {"role": "system", "content": SYSTEM}
    prompts = [[system, {"role": "user", "content": row["problem"]}] for row in rows]
    columns = {"prompt": prompts, "solution": [row["solution"] for row in rows]}
    parts = COMPLETIONS // options.batch
    config = trl.GRPOConfig(
        # method options, as in recipes/sums.yaml
        num_generations=8, max_completion_length=12, max_steps=40, learning_rate=1e-4, warmup_steps=3,
        lr_scheduler_type="linear", adam_beta2=0.99, beta=0.0, loss_type="dapo", shuffle_dataset=False,
        per_device_train_batch_size=options.batch, gradient_accumulation_steps=parts, steps_per_generation=parts,
        bf16=options.dtype == "bfloat16", model_init_kwargs={"dtype": options.dtype}, **ON_CPU,
        output_dir=str(options.json.with_suffix("")) + "_run",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        options.model,
        accuracy,
        config,
        train_dataset=datasets.Dataset.from_dict(columns),
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS, task_type="CAUSAL_LM"),
        callbacks=[Recorder()],
    )
    trainer.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["minivlmrl", "TRL"])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--rows", type=Path, required=True, help="folder with sums_train.jsonl")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--order", type=Path, help="JSON file of our run, for the order of TRL's rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"minivlmrl": train_ours, "TRL": train_trl}[options.run](options)


if __name__ == "__main__":
    main()
