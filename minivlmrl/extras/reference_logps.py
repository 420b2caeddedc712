"""Compute DPO reference log-probs before the first step, without a second model.

With `dpo.precompute_ref_log_probs`, the policy computes the log-probs while it still equals the reference. A resumed
run reads the log-probs from reference_logps.safetensors in output_dir.
"""

from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.config.options import RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset, Prompt
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import UserError, error_phase
from minivlmrl.files import digest, save_tensors
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import GroupBatch
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.dpo import DPOTrainer
from minivlmrl.trainers.offline import split

FILE = "reference_logps.safetensors"


class StoredReference:
    """DPO reference model that looks up precomputed log-probs.

    Args:
        stored: {key_of(prompt, answer ids): per-token log-probs, chosen answer first}.
    """

    def __init__(self, stored: dict[str, Tensor]):
        self.stored = stored
        self.dtype = next((values.dtype for values in stored.values()), torch.float32)
        self.model = nn.Module()  # empty: training states need not save a reference model

    def logps(self, group: GroupBatch, temperature: float = 1.0) -> Tensor:
        """Look up reference log-probs for a batch, in nats, (answers, tokens)."""
        found = torch.zeros_like(group.completion_mask, dtype=self.dtype)
        for number, (prompt, ids) in enumerate(pairs_of(group)):
            values = self.stored.get(key_of(prompt, ids))
            if values is None:
                raise UserError(
                    f"{prompt.row.name if prompt.row else 'a row'}: the row has changed since its reference "
                    f"log-probabilities were written to {FILE}. Restore the row, or start again with --resume=never"
                )
            lengths = [len(answer) for answer in ids]
            for answer, logps in enumerate(values.split(lengths), 2 * number):
                found[answer, : len(logps)] = logps
        return found


class ReferenceLogps(Callback):
    """Compute reference log-probs when a DPO stage begins."""

    def on_recipe(self, config: RunConfig, trainers: dict[str, type[Trainer]]):
        self.file = Path(config.output_dir, FILE)
        if config.reference.path is not None:
            raise UserError(
                "dpo.precompute_ref_log_probs uses the policy, so reference.path must be null. Set model.path "
                "to this folder, or leave out precompute_ref_log_probs"
            )
        if config.data.skip_unreadable:
            raise UserError(
                "dpo.precompute_ref_log_probs reads all rows before the first step, so data.skip_unreadable must be "
                "false; run `minivlmrl check` to find unreadable rows"
            )

    def on_model(
        self, config: RunConfig, datasets: dict[str, Dataset], model: VisionLanguageModel, processor: Processor,
        world: World,
    ):  # fmt: skip
        self.datasets = datasets

    def on_stage_begin(self, trainer: Trainer, optimizer: Optimizer, state: TrainerState):
        """Use precomputed log-probs instead of a reference model."""
        if not isinstance(trainer, DPOTrainer) or not trainer.options.precompute_ref_log_probs:
            return
        if trainer.options.reference_free:
            return
        if state.step:
            stored = load_file(self.file)
        else:
            stored = {}
            with error_phase("reference"):
                for name in (trainer.stage, "eval"):
                    if name in self.datasets:
                        stored |= compute(trainer, self.datasets[name])
            trainer.world.run_on_rank_zero(lambda: save_tensors(stored, self.file))
        trainer.reference = cast(Any, StoredReference(stored))


@torch.no_grad()
def compute(trainer: DPOTrainer, rows: Dataset) -> dict[str, Tensor]:
    """Compute policy log-probs for all rows: every rank computes a part, and gets all."""
    local = {}
    indices, _ = trainer.shard_rows_with_answers(rows)
    for part in split(indices, trainer.options.micro_batch_size):
        group = trainer.micro_batch([rows[index] for index in part]).group
        logps, _ = per_token_logps(trainer.policy, group)
        answers = logps.cpu().split(group.layout.row_lengths)
        for number, (prompt, ids) in enumerate(pairs_of(group)):
            local[key_of(prompt, ids)] = torch.cat(answers[2 * number : 2 * number + 2])
    reshard(trainer.policy)
    trainer.world.barrier()
    stored = {}
    for values in trainer.world.gather_objects(local):
        stored |= values
    return stored


def pairs_of(group: GroupBatch) -> list[tuple[Prompt, list[Tensor]]]:
    """Return (prompt, [chosen ids, rejected ids]) for all prompts in a batch."""
    answers = group.completion_ids.cpu().split(group.layout.row_lengths)
    if len(answers) != 2 * len(group.prompts):
        raise UserError(
            "dpo.precompute_ref_log_probs cannot read answers of several turns whose chat template gives each turn its "
            "own prompt; leave the option out"
        )
    pairs = []
    for number, prompt in enumerate(group.prompts):
        pair = answers[2 * number : 2 * number + 2]
        pairs.append((prompt, list(pair)))
    return pairs


def key_of(prompt: Prompt, ids: list[Tensor]) -> str:
    """Hash everything that the log-probs depend on, except the model."""
    tensors = [prompt.input_ids, prompt.image_grid_thw, prompt.pixel_values, *ids]
    contents = []
    for tensor in tensors:
        values = tensor.contiguous().flatten().view(torch.uint8)
        contents.append(values.numpy().tobytes())
    return digest(contents)
