"""Measure the CPU seconds of a GRPO step and of its parts in minivlmrl and in TRL.

    python benchmarks/grpo_step.py --json docs/curves/grpo_step.json    # needs `pip install .[test]`
    python benchmarks/grpo_step.py --model vlm --steps 1 --json docs/curves/grpo_step_0_5b.json

TRL trains Qwen2_5_VLForConditionalGeneration from transformers, with SDPA, a KV cache, no gradient checkpointing, and
all completions in one batch. On a CPU, its LM head scores all positions ("TRL, as installed"), but completions alone
("TRL") if TRL believes that it has Triton, with equal numbers.

All start from the same random weights (recipes/shapes_model.json), with the same prompts, tokens and pixels, and 8
completions per prompt with an exact number of tokens. Steps alternate in one process, so other load on the machine
slows all. Before timing, tokens and pixels of a prompt must be equal. With --model, all train LoRA adapters on the
decoder of that model, in float32; the reference is the model without them.
"""

import functools
import os
import random
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# before importing torch, with minivlmrl's value
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch
from beside_trl import trl_trainer
from common import study, study_options

from minivlmrl.config.options import GRPOOptions, LoRAOptions, RunConfig, SamplingOptions
from minivlmrl.data.loader import Batches
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.saving import save_model
from minivlmrl.model.build import random_model
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.run.loop import optimizer_step
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.tasks import shapes
from minivlmrl.trainers.grpo import GRPOTrainer

MODEL_CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "shapes_model.json"
QUESTION = "What is it? Name it."  # 32 tokens with the template; 48, 96 and 288 with images in CASES
# (image side in pixels, prompts per step, tokens per completion)
CASES = ((56, 16, 14), (112, 8, 14), (224, 4, 14), (56, 4, 128), (224, 4, 128), (56, 4, 512), (224, 4, 512))
LORA_CASE = (56, 4, 14)  # with --model
LORA = {"r": 16, "alpha": 32.0}
DECODER_LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
WARMUP = 1  # untimed steps per side
TRL_SIDES = {"TRL": True, "TRL, as installed": False}  # whether TRL scores only completions
SIDES = ("minivlmrl", *TRL_SIDES)
PARTS = ("sampling", "reference", "forward", "backward", "update", "rest")


def distinct_characters(completions: list[str], **columns) -> list[float]:
    """Count distinct characters: a cheap reward that differs between random completions."""
    return [float(len(set(completion))) for completion in completions]


class EndlessProcessor(Processor):
    """Processor without stop tokens, so that all completions have the same length."""

    stop_token_ids = ()


class Ours:
    """GRPO in minivlmrl, as train.py runs it; `step` runs one optimizer step.

    `skipped` is the share of the last step's completions that were not trained on, because their advantage is 0.
    """

    def __init__(self, trainer: GRPOTrainer, rows: list[Row]):
        batches = Batches(rows, trainer)
        self.trainer = trainer
        self.steps = trainer.steps(batches)
        self.done = 0
        self.optimizer = build_optimizer(trainer.trained, trainer.options, trainer.config.optimizer)

    def step(self):
        step = next(self.steps)
        completions = sum(map(len, step.groups))
        self.skipped = 1 - sum(len(batch.samples) for batch in step.micro_batches) / completions
        optimizer_step(self.trainer, step, self.optimizer, self.done)
        self.done += 1


class PartTimer:
    """CPU seconds in the parts of a step."""

    def __init__(self):
        self.restart()

    def restart(self):
        self.parts = Counter()
        self.begin = time.process_time()

    def seconds(self) -> dict[str, float]:
        """Return CPU seconds since `restart`, per part and in total."""
        total = time.process_time() - self.begin
        return {**self.parts, "rest": total - sum(self.parts.values()), "step": total}

    def watch(self, owner, method: str, part: str | Callable[[], str]):
        """Add the CPU seconds in a method of a class or object to a part, or to the part that a function returns."""
        call = getattr(owner, method)

        def timed(*args, **kwargs):
            name = part if isinstance(part, str) else part()
            begin = time.process_time()
            result = call(*args, **kwargs)
            self.parts[name] += time.process_time() - begin
            return result

        setattr(owner, method, timed)


def main():
    parser = study_options(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each side and case")
    parser.add_argument("--cases", type=int, nargs="+", default=[*range(len(CASES))], help="indices in CASES")
    parser.add_argument("--model", type=Path, help="folder of a Qwen2.5-VL; trains LoRA adapters, one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    warnings.simplefilter("ignore", FutureWarning)  # TRL uses old option names in transformers
    transformers.logging.disable_progress_bar()
    timer = PartTimer()
    timer.watch(torch.Tensor, "backward", "backward")
    timer.watch(torch.optim.AdamW, "step", "update")
    cases = [LORA_CASE] if options.model else [CASES[index] for index in options.cases]
    keys = [{"size": size, "prompts": prompts, "new_tokens": new_tokens} for size, prompts, new_tokens in cases]
    run = functools.partial(measure, options.steps, timer, options.model)
    study(options.json, keys, run, steps=options.steps, load=os.getloadavg()[0])


def measure(steps: int, timer: PartTimer, lora_model: Path | None, size: int, prompts: int, new_tokens: int) -> dict:
    """Measure steps with one image size; return median CPU seconds per side and part."""
    import peft
    import transformers
    import trl.trainer.utils

    rows = make_rows(size, prompts)
    peft_config = None
    with tempfile.TemporaryDirectory() as folder:
        if lora_model:
            path = lora_model
            model, processor = load_model(path), load_processor(path)
            inject_adapters(model, LoRAOptions(**LORA))
            init_adapters(model, seed=0)
            peft_config = peft.LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=DECODER_LAYERS)
        else:
            path = Path(folder) / "model"
            model, processor = random_model(MODEL_CONFIG, shapes.tokenizer(), seed=0)
            save_model(path, model, processor)
        ours = our_side(model, processor, rows, new_tokens)
        timer.watch(ours.trainer.sampler, "sample", "sampling")
        timer.watch(ours.trainer.reference, "logps", "reference")
        timer.watch(ours.trainer, "training_loss", "forward")
        found = {side: [] for side in SIDES}

        class Alternate(transformers.TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                self.side = [*TRL_SIDES][state.global_step % 2]
                trl.trainer.utils._use_triton = lambda *args, **kwargs: TRL_SIDES[self.side]
                timer.restart()

            def on_step_end(self, args, state, control, **kwargs):
                found[self.side].append(timer.seconds())
                if self.side == "TRL":
                    timer.restart()
                    ours.step()
                    found["minivlmrl"].append(timer.seconds())

        theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        options = {"max_steps": 2 * (WARMUP + steps), "logging_steps": 10**6, "output_dir": folder}
        options["generation_kwargs"] = {"min_new_tokens": new_tokens}
        trainer = trl_trainer(theirs, ours.trainer.config, rows, Alternate(), peft_config, **options)
        timer.watch(trainer, "_generate_single_turn", "sampling")
        scoring = "_get_per_token_logps_and_entropies"
        timer.watch(trainer, scoring, lambda: "forward" if torch.is_grad_enabled() else "reference")
        prompt_tokens = assert_same_prompt(processor, trainer, rows[0])
        trainer.train()
    medians = {}
    for side, seconds in found.items():
        timed = seconds[WARMUP:]
        medians[side] = {part: statistics.median(step[part] for step in timed) for part in ("step", *PARTS)}
    return {"prompt_tokens": prompt_tokens, "skipped": ours.skipped, "sides": medians}


def make_rows(size: int, count: int) -> list[Row]:
    """Create rows for a step: shapes in images with size x size pixels."""
    rows = []
    for i in range(count):
        rng = random.Random(i)
        image = shapes.draw_picture(rng.choice(shapes.LABELS), rng).resize((size, size))
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        rows.append(Row([{"role": "user", "content": content}], [image]))
    return rows


def our_side(model: VisionLanguageModel, processor: Processor, rows: list[Row], new_tokens: int) -> Ours:
    size = len(rows)
    run = RunConfig(
        sampling=SamplingOptions(max_new_tokens=new_tokens),
        rewards={f"{__name__}:distinct_characters": 1.0},
        grpo=GRPOOptions(
            prompts_per_step=size, micro_batch_size=size, loss_type="grpo", beta=0.02, learning_rate=3e-4,
            lr_scheduler_type="constant",
        ),
    )  # fmt: skip
    endless = EndlessProcessor(processor.tokenizer, processor.image_processor)
    return Ours(GRPOTrainer(run, model, endless, World()), rows)


def assert_same_prompt(processor: Processor, trainer, row: Row) -> int:
    """Check that both trainers have the same tokens and pixels for a row; return the prompt's length in tokens."""
    prompt = processor(row.messages, row.images)
    content = [{"type": "image", "image": row.images[0]}, {"type": "text", "text": QUESTION}]
    theirs = trainer.processing_class.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, add_generation_prompt=True,
        return_tensors="pt",
    )  # fmt: skip
    assert torch.equal(theirs["input_ids"][0], prompt.input_ids)
    assert torch.equal(theirs["pixel_values"], prompt.pixel_values)
    return len(prompt.input_ids)


if __name__ == "__main__":
    main()
