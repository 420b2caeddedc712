"""Train a reward model (InstructGPT, step 2), and score completions with it.

The reward model is a copy of the policy that learns to rank answers as human annotators do. Later stages and other runs
can use it as the reward `reward_model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RewardModelOptions, RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import load_scorer, save_value_model
from minivlmrl.distributed.weights import copy_model, reshard
from minivlmrl.losses.grpo import batch_normalizer
from minivlmrl.losses.preference import reward_loss
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.value_head import ValueModel, check_inputs, check_value_model_folder, pack_with_last_token
from minivlmrl.trainers.functions import loss_arguments
from minivlmrl.trainers.offline import AnswerBatch, PairTrainer

# the reward model's folder in the run's folder; the stage and the reward have the same name
FOLDER = "reward_model"
BATCH_SIZE = 16  # prompts in each forward pass that scores completions


@dataclass(kw_only=True)
class RewardBatch(AnswerBatch):
    """A micro-batch of pairs with each answer's last token, which is scored."""

    # (R / 2,) for each pair, by how much the chosen answer's score should be higher
    margin: Tensor


class RewardTrainer(PairTrainer):
    """Trainer for a reward model on answer pairs; the policy is not changed.

    A row's optional column `margin` is the amount by which its chosen answer's score should be higher.
    """

    stage = "reward_model"
    columns = ("margin",)
    config_type = RewardModelOptions
    config: RewardModelOptions
    trains_policy = False
    trained: ValueModel

    def __init__(
        self, run: RunConfig, model: VisionLanguageModel, processor: Processor, world: World, steps_done: int = 0
    ):
        super().__init__(run, model, processor, world, steps_done)
        self.trained = ValueModel(copy_model(self.policy), self.run.model.freeze)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path, merge: bool = True):
        base = self.run.model.path
        save_value_model(folder / FOLDER, self.trained, self.processor, self.world, base, merge)

    def micro_batch(self, rows: Sequence[Row]) -> RewardBatch:
        prompts, answers = last_windows(*self.encode(rows))
        group = pack_with_last_token(prompts, answers, self.policy.config, self.world.device)
        margin = torch.tensor([row.columns.get("margin") or 0.0 for row in rows], device=self.world.device)
        mask = group.completion_mask
        return RewardBatch(group, mask, batch_normalizer(mask), margin=margin)

    def rewards(self, batch: RewardBatch) -> tuple[Tensor, Tensor]:
        """Compute the chosen and the rejected answers' scores, each of shape (B,)."""
        chosen, rejected = self.trained.score_last_token(batch.group).view(-1, 2).unbind(1)
        return chosen, rejected

    def loss(self, batch: RewardBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.rewards(batch)
        margin = batch.margin.to(chosen.dtype)
        options = loss_arguments(self.config, reward_loss)
        return reward_loss(chosen, rejected, **options, margin=margin, normalizer=batch.normalizer)

    def margins(self, rows: Sequence[Row]) -> Tensor:
        chosen, rejected = self.rewards(self.micro_batch(rows))
        return chosen - rejected


def last_windows(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]
) -> tuple[Sequence[Prompt], Sequence[Sequence[Completion]]]:
    """Replace each answer that has several windows by its last turn, whose prompt has all earlier turns."""
    if not any(answer.turns for group in answers for answer in group):
        return prompts, answers
    pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
    turns = [(prompt, answer.turns[-1] if answer.turns else answer) for prompt, answer in pairs]
    return [turn.prompt or prompt for prompt, turn in turns], [[turn] for _, turn in turns]


class RewardModelScores:
    """Callable that scores completions with a reward model.

    The model is loaded from reward_model.path, which defaults to this run's folder. It reads the policy's token ids and
    patches, so its tokenizer, its model family and its patch sizes must be the policy's.
    """

    def __init__(self, run: RunConfig, policy: VisionLanguageModel, processor: Processor, world: World):
        path = run.reward_model.path or Path(run.output_dir) / FOLDER
        model = load_scorer(policy, path, world.device, same_base=run.reward_model.path is None)
        self.model = model.requires_grad_(False)
        self.world = world
        check_inputs(path, model, policy, processor)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[float]:
        """Compute one score for each completion; all ranks must have the same number of prompts."""
        scores = []
        config = self.model.backbone.config
        for start in range(0, len(prompts), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = pack_with_last_token(prompts[part], completions[part], config, self.world.device)
            scores += self.model.score_last_token(batch).tolist()
        reshard(self.model)
        return scores


def reward_model(completions: list[str], reward_model_scores: list[float], **columns) -> list[float]:
    """Return the reward model's scores, which are unbounded, for the reward `reward_model`."""
    return reward_model_scores


def check_stage_order(run: RunConfig, stage: str):
    """Raise ValueError if a recipe's reward model will not exist when a stage starts."""
    if run.reward_model.path is not None:
        check_value_model_folder(run.reward_model.path)
    elif FOLDER not in run.stage_names[: run.stage_names.index(stage)]:
        raise ValueError(
            f"the stage {stage} uses the reward reward_model, but there is no reward model yet; set reward_model.path "
            f"to the folder of a reward model, or add the stage reward_model before {stage}"
        )
