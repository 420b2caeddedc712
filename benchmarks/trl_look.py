"""Train the first GRPO steps of recipes/look.yaml with minivlmrl and with TRL's GRPOTrainer; compare their cost.

    python benchmarks/trl_look.py minivlmrl work/sft_0/checkpoint/ --rows work --steps 4 --json ours.json
    python benchmarks/trl_look.py TRL work/sft_0/checkpoint/ --rows work --steps 4 --json trl.json --order ours.json

benchmarks/look.py wrote `work`. TRL trains the same folder, with the same rows in the same order and the recipe's
method options: a frozen decoder, a trained tower and merger, float32, 192 completions in one batch. TRL scores
completions alone, as on a GPU. minivlmrl trains only groups with different rewards, unless --all is given. Files are
like those of trl_sums.py.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import PIL.Image  # noqa: E402
import torch  # noqa: E402
from grpo_step import trl_processor  # noqa: E402
from trl_sums import OurRecord, Record, accuracy  # noqa: E402

from minivlmrl.config.loading import load_config  # noqa: E402
from minivlmrl.config.options import RunConfig  # noqa: E402
from minivlmrl.run.callbacks import default_callbacks  # noqa: E402
from minivlmrl.run.loop import run_training  # noqa: E402
from minivlmrl.trainers.grpo import GRPOTrainer  # noqa: E402


def read_config(options: argparse.Namespace) -> RunConfig:
    changes = ["--stages=[grpo]", f"--model.path={options.model}", "--model.compute_dtype=float32", "--eval_steps=0"]
    changes += ["--data.files={}", f"--data.train_file={options.rows / 'look_train.jsonl'}", "--data.eval_file=null"]
    changes += ["--data.eval_rows=0", "--num_threads=1", "--resume=never", "--state_minutes=0"]
    changes += [f"--output_dir={options.json.with_suffix('')}_run"]
    return load_config(str(ROOT / "recipes/look.yaml"), changes)


def train_ours(options: argparse.Namespace):
    if options.all:
        GRPOTrainer.needs_all_samples = True
    config = read_config(options)
    run_training(config, [*default_callbacks(config), OurRecord(options)])


def train_trl(options: argparse.Namespace):
    import datasets
    import transformers
    import trl
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda *args, **kwargs: True  # score completions alone, as on a GPU
    config = read_config(options)
    grpo = config.grpo

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, *given, **kwargs):
            self.record = Record(options)

        def on_log(self, args, state, control, logs, **kwargs):
            self.record.add(float(logs["reward"]))

    lines = (options.rows / "look_train.jsonl").read_text(encoding="utf-8").splitlines()
    given = [json.loads(line) for line in lines]
    rows = [given[index] for index in json.loads(options.order.read_text())["rows"]]
    content = [{"type": "image"}, {"type": "text", "text": "+"}, {"type": "image"}, {"type": "text", "text": "=?"}]
    system = {"role": "system", "content": [{"type": "text", "text": config.data.system_prompt}]}
    columns = {
        "prompt": [[system, {"role": "user", "content": content}]] * len(rows),
        "images": [[PIL.Image.open(options.rows / name).convert("RGB") for name in row["images"]] for row in rows],
        "solution": [row["solution"] for row in rows],
    }
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    model.model.language_model.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    trl_config = trl.GRPOConfig(
        num_generations=grpo.num_generations, max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature, loss_type=grpo.loss_type, beta=grpo.beta, max_steps=grpo.max_steps,
        learning_rate=grpo.learning_rate, lr_scheduler_type="constant_with_warmup", warmup_steps=grpo.warmup_steps,
        adam_beta2=grpo.adam_beta2, shuffle_dataset=False,
        per_device_train_batch_size=grpo.prompts_per_step * grpo.num_generations,
        use_cpu=True, bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, output_dir=f"{options.json.with_suffix('')}_run",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model,
        accuracy,
        trl_config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=trl_processor(Path(options.model)),
        callbacks=[Recorder()],
    )
    trainer.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=["minivlmrl", "TRL"])
    parser.add_argument("model", help="folder of the model after SFT")
    parser.add_argument("--rows", type=Path, required=True, help="folder with look_train.jsonl")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--order", type=Path, help="JSON file of our run, for the order of TRL's rows")
    parser.add_argument("--all", action="store_true", help="train groups with equal rewards too, as TRL does")
    options = parser.parse_args()
    options.batch, options.dtype = 192, "float32"
    torch.set_num_threads(1)
    {"minivlmrl": train_ours, "TRL": train_trl}[options.run](options)


if __name__ == "__main__":
    main()
