"""DPO on a vision-language model, all of it on one page: recipes/shapes_dpo.yaml, written out.

    python minimal_dpo.py              # 40 steps of SFT, then 150 of DPO; half a minute on two cores
    python minimal_dpo.py --seed=1     # other weights and pictures

A model with random weights learns to name the shape in a small picture. SFT on 96 demonstrations,
half of them with a wrong label, teaches the format and a vague idea of the task. DPO then reads
1024 pictures with a right and a worse answer each, and moves probability from the worse answers to
the right ones; nothing is sampled, and there are no rewards. The weights at the end are those of
`python train.py recipes/shapes_dpo.yaml`, bit for bit. minimal.py is GRPO in the same form.

It runs in a clone of the repository: it reads recipes/shapes_model.json, the sizes of the model.
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
from minivlmrl.losses.preference import DPOLossOptions, dpo_loss
from minivlmrl.losses.sft import sft_loss
from minivlmrl.model.build import random_model
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.tasks.shapes import Shapes, tokenizer

ROWS_PER_STEP = 32
LOSS = DPOLossOptions(loss_type=["sigmoid"], beta=1.0)


def shuffled(rows: Shapes, seed: int) -> Iterator[list[Row]]:
    """Yield the rows of each step, every pass in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for first in range(0, len(rows), ROWS_PER_STEP):
            yield [rows[number] for number in order[first : first + ROWS_PER_STEP]]


def encode(model: Qwen2_5_VL, processor: Processor, rows: list[Row], names: list[str]) -> GroupBatch:
    """Lay prompts and their named answers end to end; a prompt is computed once for its answers."""
    prompts = [row.prompt(processor) for row in rows]  # image -> patches, messages -> tokens
    answers = [[encode_completion(processor, row.messages, getattr(row, name)) for name in names] for row in rows]
    return pack(prompts, answers, model.config)


def answer_logps(model: Qwen2_5_VL, batch: GroupBatch) -> Tensor:
    """Compute the log-probability of each token of the R answers, (R, T) in nats."""
    logps, _ = per_token_logps(model, batch)  # (M,) of all answer tokens
    return batch.pad(logps)


def by_pair(rows: Tensor) -> Tensor:
    """(2B, T) -> (B, 2, T): of each pair the chosen answer, then the rejected one."""
    return rows.unflatten(0, (-1, 2))


def adamw(model: Qwen2_5_VL, beta2: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(model.parameters()), betas=(0.9, beta2), weight_decay=0, fused=True)


def learning_rate(
    step: int, maximum: float, max_steps: int, warmup_steps: int, min_ratio: float, cosine=False
) -> float:
    """Rise over warmup_steps, then fall to a share of the maximum."""
    if step < warmup_steps:
        return maximum * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1 - progress
    return maximum * (min_ratio + (1 - min_ratio) * remaining)


def update(model: Qwen2_5_VL, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def sft(model: Qwen2_5_VL, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Supervised fine-tuning: raise the log-probability of demonstrations."""
    optimizer = adamw(model, beta2=0.95)
    for step, batch in zip(range(max_steps), shuffled(rows, seed), strict=False):
        group = encode(model, processor, batch, ["completion"])
        loss = sft_loss(answer_logps(model, group), group.completion_mask)
        rate = learning_rate(step, 3e-3, max_steps, warmup_steps=10, min_ratio=0.3, cosine=True)
        update(model, optimizer, loss, rate)


def dpo(model: Qwen2_5_VL, processor: Processor, rows: Shapes, seed: int, max_steps: int):
    """Direct preference optimization (arXiv 2305.18290)."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model, beta2=0.99)
    for step, batch in zip(range(max_steps), shuffled(rows, seed), strict=False):
        # 1. One packed sequence of B prompts, each with its chosen and its rejected answer.
        group = encode(model, processor, batch, ["chosen", "rejected"])
        # 2. Log-probabilities of the answers by the frozen reference and by the policy, (2B, T).
        with torch.no_grad():
            ref_logps = answer_logps(reference, group)
        logps = answer_logps(model, group)
        # 3. The loss of pairs, (B, 2, T): -log sigmoid(beta (u - v)). u is the log-probability of
        #    the chosen answer, a sum over its tokens, minus that of the reference; v that of the
        #    rejected answer.
        loss, metrics = dpo_loss(
            by_pair(logps), by_pair(group.completion_mask), LOSS, ref_per_token_logps=by_pair(ref_logps)
        )
        # 4. The update.
        rate = learning_rate(step, 3e-4, max_steps, warmup_steps=5, min_ratio=0.1)
        update(model, optimizer, loss, rate)
        if step % 10 == 0 or step == max_steps - 1:
            margin, accuracy = metrics["rewards/margins"], metrics["rewards/accuracies"]
            print(f"step {step:3}  margin {margin:6.3f} nats  accuracy {accuracy:.3f}", flush=True)


def main(seed: int = 0, sft_steps: int = 40, dpo_steps: int = 150) -> tuple[Qwen2_5_VL, Processor]:
    """Train, and return the model with the processor that makes its prompts."""
    model, processor = random_model("recipes/shapes_model.json", tokenizer(), seed)
    sft(model, processor, Shapes(96, f"{seed}/sft", wrong_labels=0.5), seed, sft_steps)
    dpo(model, processor, Shapes(1024, f"{seed}/pairs"), seed, dpo_steps)
    return model, processor


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output_dir", default="runs/minimal_dpo")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    trained, its_processor = main(arguments.seed)
    from minivlmrl.model.checkpoint import save_model  # a folder that transformers loads

    save_model(f"{arguments.output_dir}/checkpoint", trained, its_processor)
    print(f"saved {arguments.output_dir}/checkpoint")
