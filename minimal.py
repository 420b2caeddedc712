"""GRPO on a vision-language model in one file, with the same steps as the default run of train.py.

    python minimal.py                # 40 SFT steps, then 160 GRPO steps; a minute on 2 cores
    python minimal.py --seed=1       # other initial weights, images and samples
    python minimal.py --device=cpu   # without the GPU, which is used by default if there is one

A randomly initialised model learns to name the shape in a small image. First, SFT on 96
demonstrations, half of them mislabelled, teaches the answer format and a rough idea of the task.
Then GRPO rewards answers that are well formed and correct, and the reward rises. On a CPU, the
final weights equal those of `python train.py`, bit for bit. The script calls the library's
functions, and only the optimizer has state. For your own data, several GPUs, checkpoints and logs,
use train.py.

Three parts of other GRPO scripts are missing here, because they are not needed:
- clipping, because the ratio is 1 with a single update per rollout (`grpo_loss` can clip)
- padding in the model, because all prompts and completions are packed into one sequence
- the state of a random generator, because each row's key seeds its samples

Run it in a clone of the repository, because it reads the model config recipes/shapes_model.json.
"""

import argparse
import copy
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Completion, Prompt, Row, uniform_numbers
from minivlmrl.generation.generate import generate, make_token_sampler, sample_by_uniforms
from minivlmrl.losses.advantages import combine, group_advantages
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.losses.sft import sft_loss
from minivlmrl.model.build import random_model
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack
from minivlmrl.rewards.columns import call_rewards, reward_columns
from minivlmrl.rewards.text import accuracy, tag_format
from minivlmrl.tasks.registry import FRESH_ROWS
from minivlmrl.tasks.shapes import Shapes, tokenizer

GROUP = 8  # G, completions per prompt
TEMPERATURE = 1.0
MAX_NEW_TOKENS = 20
REWARDS = {tag_format: 0.5, accuracy: 1.0}  # reward function -> weight


@dataclass
class Schedule:
    """Learning-rate schedule: linear warmup, then decay to min_lr_ratio times the maximum."""

    learning_rate: float
    warmup_steps: int
    max_steps: int
    min_lr_ratio: float
    cosine: bool = False

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        remaining = 0.5 * (1 + math.cos(math.pi * progress)) if self.cosine else 1 - progress
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)


def shuffled(rows: Shapes, per_step: int, seed: int, stage: str) -> Iterator[list[Row]]:
    """Yield the rows for each step, reshuffled in every epoch.

    Each row gets a key that seeds its samples. The samples do not depend on a random generator's
    state, so that they are the same on any number of GPUs and after a restart.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = []
    step = 0
    while True:
        while len(numbers) < per_step:
            numbers += torch.randperm(len(rows), generator=generator).tolist()
        chosen, numbers = numbers[:per_step], numbers[per_step:]
        yield [replace(rows[n], key=f"{seed}/{stage}/{step}/{i}") for i, n in enumerate(chosen)]
        step += 1


def sample(
    model: VisionLanguageModel, processor: Processor, prompts: list[Prompt], keys: list[str]
) -> list[list[Completion]]:
    """Sample G completions per prompt. Each prompt is processed once for all its completions."""
    device = model.lm_head.weight.device
    draw = sample_by_uniforms(uniform_numbers(keys, GROUP, MAX_NEW_TOKENS), device)
    sample_token = make_token_sampler(TEMPERATURE, processor.stop_token_ids, draw, device=device)
    return generate(model, prompts, GROUP, MAX_NEW_TOKENS, sample_token)


def adamw(model: VisionLanguageModel, learning_rate: float, beta2: float) -> torch.optim.AdamW:
    """Create an AdamW optimizer for all parameters."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(parameters, learning_rate, (0.9, beta2), weight_decay=0, fused=True)


def update(model: VisionLanguageModel, optimizer: torch.optim.Optimizer, loss: Tensor, learning_rate: float):
    """Backpropagate the loss, clip the gradient norm to 1, and update the weights."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def sft(model: VisionLanguageModel, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Run supervised fine-tuning, which raises the demonstrations' log-probability."""
    schedule = Schedule(3e-3, 10, max_steps, min_lr_ratio=0.3, cosine=True)
    optimizer = adamw(model, schedule.learning_rate, beta2=0.95)
    batches = shuffled(rows, 32, seed, "sft")
    device = model.lm_head.weight.device
    for step in range(max_steps):
        batch = next(batches)
        # All prompts and answers are concatenated to one packed sequence without padding.
        answers = [[encode_completion(processor, r.messages, r.completion)] for r in batch]
        group = pack([row.prompt(processor) for row in batch], answers, model.config, device)
        logps, _ = per_token_logps(model, group)  # (M,), for all answer tokens
        mask = group.completion_mask  # (R, T)
        normalizer = LossNormalizer(len(mask), mask.sum().item())
        loss = sft_loss(group.pad(logps), mask, normalizer=normalizer)
        update(model, optimizer, loss, schedule.at(step))


def grpo(model: VisionLanguageModel, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Run group relative policy optimization (GRPO; DeepSeekMath, arXiv 2402.03300)."""
    reference = copy.deepcopy(model).requires_grad_(False)
    schedule = Schedule(3e-4, 5, max_steps, min_lr_ratio=0.1)
    optimizer = adamw(model, schedule.learning_rate, beta2=0.99)
    batches = shuffled(rows, 16, seed, "grpo")
    device = model.lm_head.weight.device
    for step in range(max_steps):
        batch = next(batches)
        # 1. Convert images to patches and messages to tokens, and sample G completions per prompt.
        prompts = [row.prompt(processor) for row in batch]
        completions = sample(model, processor, prompts, [row.key for row in batch])
        # 2. Compute K rewards for all n completions, (n, K), and their weighted sums, (n,).
        columns = reward_columns(batch, completions, processor)
        rewards = combine(call_rewards(list(REWARDS), columns), torch.tensor([*REWARDS.values()]))
        # 3. Compute advantages (n,): compare each completion with the rest of its group.
        advantages = group_advantages(rewards, GROUP).to(device)
        # 4. Pack everything into one sequence, in which each prompt occurs once for its whole group.
        #    The gradients are exactly as if every completion were processed separately.
        group = pack(prompts, completions, model.config, device)
        # 5. Compute log-probabilities (n, T) in nats under reference and policy, without storing all
        #    logits.
        with torch.no_grad():
            ref_logps = group.pad(per_token_logps(reference, group)[0])
        logps = group.pad(per_token_logps(model, group)[0])
        # 6. Compute the loss. The ratio to the policy that sampled is 1, because each rollout is
        #    used for only one update.
        mask = group.completion_mask
        normalizer = LossNormalizer(len(mask), int(mask.sum()), MAX_NEW_TOKENS)
        loss, _ = grpo_loss(
            logps, advantages, mask, loss_type="grpo", beta=0.02, ref_per_token_logps=ref_logps, normalizer=normalizer
        )
        # 7. Update the weights.
        update(model, optimizer, loss, schedule.at(step))
        if step % 10 == 0 or step == max_steps - 1:
            print(f"step {step:3}  reward {rewards.mean():.3f}  of 1.5", flush=True)


def main(
    seed: int = 0, sft_steps: int = 40, grpo_steps: int = 160, device: str = "cpu"
) -> tuple[VisionLanguageModel, Processor]:
    """Run SFT and GRPO; return the model and its processor."""
    model, processor = random_model("recipes/shapes_model.json", tokenizer(), seed)
    model.to(device)
    sft(model, processor, Shapes(96, f"{seed}/sft", wrong_labels=0.5), seed, sft_steps)
    grpo(model, processor, Shapes(FRESH_ROWS, f"{seed}/grpo"), seed, grpo_steps)
    return model, processor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    num_threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    parser.add_argument("--num_threads", type=int, default=num_threads)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output_dir", default="runs/minimal")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    trained_model, trained_processor = main(arguments.seed, device=arguments.device)
    from minivlmrl.model.checkpoint import save_model  # writes a folder that transformers can load

    save_model(f"{arguments.output_dir}/checkpoint", trained_model, trained_processor)
    print(f"saved {arguments.output_dir}/checkpoint")
