"""DPO on a vision-language model in one file, with the same steps as recipes/shapes_dpo.yaml.

    python minimal_dpo.py              # 40 SFT steps, then 150 DPO steps; 30 s on 2 cores
    python minimal_dpo.py --seed=1     # other initial weights and images
    python minimal_dpo.py --device=cpu # without the GPU, which is used by default if there is one

A randomly initialised model learns to name the shape in a small image. First, SFT on 96
demonstrations, half of them mislabelled, teaches the answer format and a rough idea of the task.
Then DPO trains on 1024 images, each with a correct and a worse answer, and moves probability from
the worse answers to the correct ones. DPO does not sample completions and needs no rewards. On a
CPU, the final weights equal those of `python train.py recipes/shapes_dpo.yaml`, bit for bit.
minimal.py is the corresponding script for GRPO.

Run it in a clone of the repository, because it reads the model config recipes/shapes_model.json.
"""

import argparse
import copy
import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Row
from minivlmrl.losses.preference import dpo_loss
from minivlmrl.losses.sft import sft_loss
from minivlmrl.model.build import random_model
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.tasks.shapes import Shapes, tokenizer

ROWS_PER_STEP = 32


def shuffled(rows: Shapes, seed: int) -> Iterator[list[Row]]:
    """Yield the rows for each step, reshuffled in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(rows), ROWS_PER_STEP):
            yield [rows[number] for number in order[first : first + ROWS_PER_STEP]]


def encode(model: VisionLanguageModel, processor: Processor, rows: list[Row], names: list[str]) -> GroupBatch:
    """Pack prompts and their answers into one sequence, in which each prompt occurs once.

    Args:
        names: answer columns, for example "chosen" and "rejected".
    """
    prompts = [row.prompt(processor) for row in rows]  # image -> patches, messages -> tokens
    answers = [[encode_completion(processor, row.messages, getattr(row, name)) for name in names] for row in rows]
    return pack(prompts, answers, model.config, model.lm_head.weight.device)


def answer_logps(model: VisionLanguageModel, batch: GroupBatch) -> Tensor:
    """Compute the log-probability of each token in the R answers, (R, T) in nats."""
    logps, _ = per_token_logps(model, batch)  # (M,), for all answer tokens
    return batch.pad(logps)


def by_pair(rows: Tensor) -> Tensor:
    """Reshape (2B, T) to (B, 2, T): for each pair the chosen answer, then the rejected one."""
    return rows.unflatten(0, (-1, 2))


def adamw(model: VisionLanguageModel, beta2: float) -> torch.optim.AdamW:
    """Create an AdamW optimizer for all parameters."""
    return torch.optim.AdamW(list(model.parameters()), betas=(0.9, beta2), weight_decay=0, fused=True)


def learning_rate(
    step: int, maximum: float, max_steps: int, warmup_steps: int, min_ratio: float, cosine=False
) -> float:
    """Compute the learning rate for a step: linear warmup, then decay to min_ratio times maximum."""
    if step < warmup_steps:
        return maximum * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1 - progress
    return maximum * (min_ratio + (1 - min_ratio) * remaining)


def update(model: VisionLanguageModel, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float):
    """Backpropagate the loss, clip the gradient norm to 1, and update the weights."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def sft(model: VisionLanguageModel, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Run supervised fine-tuning, which raises the demonstrations' log-probability."""
    optimizer = adamw(model, beta2=0.95)
    for step, batch in zip(range(max_steps), shuffled(rows, seed), strict=False):
        group = encode(model, processor, batch, ["completion"])
        loss = sft_loss(answer_logps(model, group), group.completion_mask)
        rate = learning_rate(step, 3e-3, max_steps, warmup_steps=10, min_ratio=0.3, cosine=True)
        update(model, optimizer, loss, rate)


def dpo(model: VisionLanguageModel, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Run direct preference optimization (DPO; arXiv 2305.18290)."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model, beta2=0.99)
    for step, batch in zip(range(max_steps), shuffled(rows, seed), strict=False):
        # 1. Pack B prompts, each with its chosen and its rejected answer, into a single sequence.
        group = encode(model, processor, batch, ["chosen", "rejected"])
        # 2. Compute log-probabilities (2B, T) under the frozen reference and under the policy.
        with torch.no_grad():
            ref_logps = answer_logps(reference, group)
        logps = answer_logps(model, group)
        # 3. Compute the loss -log sigmoid(beta (u - v)) from tensors (B, 2, T). u is the log-ratio
        #    between policy and reference for the chosen answer, summed over its tokens; v is the
        #    log-ratio for the rejected answer.
        loss, metrics = dpo_loss(
            by_pair(logps),
            by_pair(group.completion_mask),
            loss_type="sigmoid",
            beta=1.0,
            ref_per_token_logps=by_pair(ref_logps),
        )
        # 4. Update the weights.
        rate = learning_rate(step, 3e-4, max_steps, warmup_steps=5, min_ratio=0.1)
        update(model, optimizer, loss, rate)
        if step % 10 == 0 or step == max_steps - 1:
            margin, accuracy = metrics["rewards/margins"], metrics["rewards/accuracies"]
            print(f"step {step:3}  margin {margin:6.3f} nats  accuracy {accuracy:.3f}", flush=True)


def main(
    seed: int = 0, sft_steps: int = 40, dpo_steps: int = 150, device: str = "cpu"
) -> tuple[VisionLanguageModel, Processor]:
    """Run SFT and DPO; return the model and its processor."""
    model, processor = random_model("recipes/shapes_model.json", tokenizer(), seed)
    model.to(device)
    sft(model, processor, Shapes(96, f"{seed}/sft", wrong_labels=0.5), seed, sft_steps)
    dpo(model, processor, Shapes(1024, f"{seed}/pairs"), seed, dpo_steps)
    return model, processor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    num_threads = os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    parser.add_argument("--num_threads", type=int, default=num_threads)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output_dir", default="runs/minimal_dpo")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    trained_model, trained_processor = main(arguments.seed, device=arguments.device)
    from minivlmrl.model.checkpoint import save_model  # writes a folder that transformers can load

    save_model(f"{arguments.output_dir}/checkpoint", trained_model, trained_processor)
    print(f"saved {arguments.output_dir}/checkpoint")
