"""Train the first GRPO steps of recipes/look.yaml with minivlmrl and with TRL's GRPOTrainer; compare their cost.

    python benchmarks/beside_trl.py minivlmrl work/sums/sft_0/checkpoint/ --rows work/sums --json a.json
    python benchmarks/beside_trl.py TRL work/sums/sft_0/checkpoint/ --rows work/sums --json b.json --order a.json

benchmarks/look.py wrote `work`. TRL trains with the same rows in the same order and the recipe's method options, in
float32, and scores completions alone, as on a GPU. Both freeze the decoder, and train tower and merger. minivlmrl
trains only groups with different rewards, unless --all is given. Runs end after --steps steps, without saving a model.
Accuracy is over a step's completions, before the update.
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
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from minivlmrl.config.loading import load_config  # noqa: E402
from minivlmrl.config.options import RunConfig  # noqa: E402
from minivlmrl.data.messages import add_system_prompt, content_parts, text_of  # noqa: E402
from minivlmrl.data.rows import Row  # noqa: E402
from minivlmrl.rewards.registry import Reward, training_rewards  # noqa: E402
from minivlmrl.rewards.text import find_answer  # noqa: E402
from minivlmrl.run.callbacks import Callback, default_callbacks  # noqa: E402
from minivlmrl.run.datasets import load_datasets  # noqa: E402
from minivlmrl.run.loop import run_training  # noqa: E402
from minivlmrl.trainers.grpo import GRPOTrainer  # noqa: E402

# options with the same name in TRL's GRPOConfig
SAME = "num_generations", "loss_type", "beta", "max_steps", "learning_rate", "warmup_steps", "adam_beta2"


class Clock:
    """CPU seconds in this process, without what `resume` leaves out."""

    def __init__(self):
        self.seconds = 0.0
        self.resume()

    def stop(self) -> float:
        self.seconds += time.process_time() - self.started
        return self.seconds

    def resume(self):
        self.started = time.process_time()


class Recorder(Callback):
    """Record row indices and CPU seconds in a minivlmrl run; evaluations do not count."""

    def __init__(self):
        self.rows, self.seconds = [], []

    def on_stage_begin(self, trainer, optimizer, state):
        self.clock = Clock()

    def on_step_begin(self, trainer, optimizer, step, number, batches):
        self.rows += [group[0].row.index for group in step.rollout.groups]

    def on_step_end(self, trainer, step, number, values):
        self.seconds.append(self.clock.stop())
        self.clock.resume()

    def on_evaluation(self, stage, steps_done, num_rows):
        if self.rows:
            self.clock.resume()


def as_chat(row: Row) -> dict:
    """Return a row in TRL's format."""
    turns = []
    for turn in add_system_prompt(row.messages, "You are a helpful assistant."):
        turns.append({"role": turn["role"], "content": content_parts(turn) if row.images else text_of(turn)})
    chat = {"prompt": turns, "solution": row.columns.get("solution")}
    return chat | ({"images": [image.convert("RGB") for image in row.images]} if row.images else {})


def trl_reward(reward: Reward, answer_format: str):
    """Return a reward function for TRL."""

    def judge(completions, solution, **columns):
        texts = [message["content"] for (message,) in completions]
        answers = [find_answer(text, answer_format) for text in texts]
        return reward(completions=texts, answer_texts=answers, solution=solution)

    return judge


def trl_trainer(model, config: RunConfig, rows: list[Row], callback, peft_config=None, **more):
    """Build TRL's GRPOTrainer with the method of a recipe, in float32 on a CPU, with one batch per step.

    Args:
        model: model from transformers, or its folder.
        more: options of GRPOConfig.
    """
    import datasets
    import trl
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda *args, **kwargs: True  # score completions alone, as on a GPU
    grpo = config.grpo
    options = {
        **{name: getattr(grpo, name) for name in SAME}, "seed": config.seed, "shuffle_dataset": False,
        "max_completion_length": config.sampling.max_new_tokens, "temperature": config.sampling.temperature,
        "reward_weights": [*config.rewards.values()],
        "lr_scheduler_type": {"constant": "constant_with_warmup"}.get(grpo.lr_scheduler_type, grpo.lr_scheduler_type),
        "per_device_train_batch_size": grpo.prompts_per_step * grpo.num_generations,
        "output_dir": f"{config.output_dir}_trl",
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
        "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    return trl.GRPOTrainer(
        model,
        [trl_reward(reward, config.data.answer_format) for reward in training_rewards(config)],
        trl.GRPOConfig(**options | more),
        train_dataset=datasets.Dataset.from_list([as_chat(row) for row in rows]),
        processing_class=None if isinstance(model, str) else trl_processor(Path(model.name_or_path)),
        callbacks=[callback],
        peft_config=peft_config,
    )


def trl_processor(folder: Path):
    """Load tokenizer and image settings of a checkpoint as a transformers processor."""
    import transformers
    import trl
    from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImageOnlyProcessor(Qwen2_5_VLProcessor):
        """Processor without type check, because checking the video processor needs torchvision."""

        def check_argument_for_proper_class(self, argument_name, argument):
            return type(argument)

    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5_vl.jinja"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        padding_side="left",
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return ImageOnlyProcessor(images, tokenizer, video_processor=None, chat_template=template.read_text())


class Steps:
    """Write accuracy, CPU seconds and peak memory of each step; end the process after the last step."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.steps, self.start = options, [], time.process_time()

    def add(self, accuracy: float, rows: list[int]):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = time.process_time() - self.start
        self.steps.append({"accuracy": accuracy, "cpu_seconds": round(seconds, 1), "peak_gib": round(peak, 2)})
        print(json.dumps(self.steps[-1]), flush=True)
        self.options.json.write_text(json.dumps({"steps": self.steps, "rows": rows}) + "\n")
        if len(self.steps) == self.options.steps:
            os._exit(0)


class OurSteps(Recorder):
    """Write the steps of a minivlmrl run."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options

    def on_stage_begin(self, trainer, optimizer, state):
        self.steps = Steps(self.options)

    def on_step_end(self, trainer, step, number, values):
        self.steps.add(values["rewards/accuracy/mean"], self.rows)


def train_trl(options: argparse.Namespace, config: RunConfig):
    import transformers

    class TheirSteps(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            self.steps = Steps(options)

        def on_log(self, args, state, control, logs, **kwargs):
            self.steps.add(float(logs["reward"]), order)

    order = json.loads(options.order.read_text())["rows"]
    rows = load_datasets(config, {"grpo": "prompts"})["grpo"]
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(str(options.model), dtype=torch.float32)
    model.model.language_model.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    trl_trainer(model, config, [rows[index] for index in order], TheirSteps()).train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["minivlmrl", "TRL"])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--rows", type=Path, required=True, help="folder with the recipe's rows")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--order", type=Path, help="JSON file of our run, for the order of TRL's rows")
    parser.add_argument("--all", action="store_true", help="train groups with equal rewards too, as TRL does")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = ["--stages=[grpo]", f"--model.path={options.model}", "--model.compute_dtype=float32", "--eval_steps=0"]
    changes += ["--data.files={}", f"--data.train_file={options.rows / 'look_train.jsonl'}"]
    changes += ["--data.eval_file=null", "--data.eval_rows=0", "--num_threads=1", "--resume=never"]
    changes += ["--state_minutes=0", f"--output_dir={options.json.with_suffix('')}_run"]
    config = load_config(str(ROOT / "recipes/look.yaml"), changes)
    if options.trainer == "TRL":
        return train_trl(options, config)
    if options.all:
        GRPOTrainer.needs_all_samples = True
    run_training(config, [*default_callbacks(config), OurSteps(options)])


if __name__ == "__main__":
    main()
