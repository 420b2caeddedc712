"""Train recipes/sums.yaml with TRL's GRPOTrainer and PEFT on the text model, to compare speed, memory and accuracy.

    python benchmarks/trl_sums.py Qwen2.5-Coder-0.5B-Instruct/ --rows sums_train.jsonl --steps 20 --json trl.json

The folder of the text model is the one that recipes/from_text_model.py read. Options of the method are the recipe's.
The base model has bfloat16 weights and the adapters float32 weights, and both compute in bfloat16, as in the recipe.
After each step, the JSON file gets its mean accuracy, its CPU seconds, and the peak of memory so far.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported; no network is needed
import datasets
import peft
import torch
import transformers
import trl

SYSTEM = "You are a helpful assistant."
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMPLETIONS = 128  # 16 prompts, 8 completions each


def accuracy(completions, solution, **columns):
    texts = [message["content"].strip().rstrip(".") for (message,) in completions]
    return [float(text == right) for text, right in zip(texts, solution, strict=True)]


class Recorder(transformers.TrainerCallback):
    """Record accuracy, CPU seconds and memory of each step."""

    def __init__(self, file: Path):
        self.file, self.steps, self.start = file, [], time.process_time()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" not in logs:  # the summary at the end
            return
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        step = {"accuracy": float(logs["reward"]), "cpu_seconds": round(time.process_time() - self.start, 1)}
        self.steps.append(step | {"seconds": round(float(logs["step_time"]), 1), "peak_gib": round(peak, 2)})
        print(json.dumps(self.steps[-1]), flush=True)
        self.file.write_text(json.dumps(self.steps))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the text model")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="completions in a forward and backward pass")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.rows.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}] for row in rows]
    parts = COMPLETIONS // options.batch
    config = trl.GRPOConfig(
        # the method, as in recipes/sums.yaml
        num_generations=8, max_completion_length=12, max_steps=40, learning_rate=1e-4, warmup_steps=3,
        lr_scheduler_type="linear", adam_beta2=0.99, beta=0.0, loss_type="dapo",
        # the CPU
        per_device_train_batch_size=options.batch, gradient_accumulation_steps=parts, steps_per_generation=parts,
        use_cpu=True, bf16=options.dtype == "bfloat16", gradient_checkpointing=False,
        model_init_kwargs={"dtype": options.dtype},
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, output_dir="trl_sums",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        options.model,
        accuracy,
        config,
        train_dataset=datasets.Dataset.from_dict({"prompt": chats, "solution": [row["solution"] for row in rows]}),
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS, task_type="CAUSAL_LM"),
        callbacks=[Recorder(options.json), Stop(options.steps)],
    )
    trainer.train()


class Stop(transformers.TrainerCallback):
    """End training early, without changing the schedule of the learning rate."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.steps


if __name__ == "__main__":
    main()
