"""Train a reward model (InstructGPT, step 2), and score completions with it.

The reward model starts as a copy of the policy, and learns to rank answers. Later stages and other runs can use the
trained model as the reward `reward_model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RewardModelOptions, RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import save_value_model
from minivlmrl.distributed.weights import copy_model, is_sharded, reshard
from minivlmrl.errors import UserError
from minivlmrl.generation.environments import samples_trajectories
from minivlmrl.losses.grpo import batch_normalizer
from minivlmrl.losses.preference import reward_loss
from minivlmrl.model.checkpoint import check_same_inputs
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.plain_weights import has_adapters
from minivlmrl.model.value_head import ValueModel, add_saved_head, check_value_model_folder, load_value_model
from minivlmrl.trainers.offline import AnswerBatch, PairTrainer
from minivlmrl.trainers.registry import find_trainer

FOLDER = "reward_model"
BATCH_SIZE = 16  # prompts to score per forward pass


@dataclass(kw_only=True)
class RewardBatch(AnswerBatch):
    margin: Tensor  # (pairs,): by how much the chosen answer should score higher


class RewardTrainer(PairTrainer):
    """Train a reward model on answer pairs, without changing the policy.

    The optional column `margin` says by how much the chosen answer should score higher.
    """

    stage = "reward_model"
    config_type = RewardModelOptions
    options: RewardModelOptions
    trains_policy = False
    trained: ValueModel

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.trained = ValueModel(copy_model(self.policy), self.config.model.freeze)

    @staticmethod
    def columns(options: RewardModelOptions) -> tuple[str, ...]:
        return ("margin",)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path, merge: bool = True):
        save_value_model(folder / FOLDER, self.trained, self.processor, self.world, self.config.model.path, merge)

    def micro_batch(self, rows: Sequence[Row]) -> RewardBatch:
        """Pack answer pairs, with their margins, into a micro-batch."""
        prompts, answers = last_windows(*self.encode(rows))
        group = pack_with_last_token(prompts, answers, self.policy.config, self.world.device)
        margins = [row.columns.get("margin") or 0.0 for row in rows]
        margin = torch.tensor(margins, device=self.world.device)
        mask = group.completion_mask
        return RewardBatch(group, mask, batch_normalizer(mask), margin=margin)

    def rewards(self, batch: RewardBatch) -> tuple[Tensor, Tensor]:
        """Score the chosen and the rejected answers, both (B,)."""
        scores = last_token_scores(self.trained, batch.group)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        return chosen, rejected

    def loss(self, batch: RewardBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.rewards(batch)
        return reward_loss(
            chosen,
            rejected,
            center_rewards_coefficient=self.options.center_rewards_coefficient,
            margin=batch.margin.to(chosen.dtype),
            normalizer=batch.normalizer,
        )

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Compute the score differences, chosen minus rejected, (B,)."""
        chosen, rejected = self.rewards(self.micro_batch(rows))
        return chosen - rejected


def last_windows(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]
) -> tuple[Sequence[Prompt], Sequence[Sequence[Completion]]]:
    """Reduce multi-turn answers to their last turn; earlier turns become part of the prompt."""
    if not any(answer.turns for group in answers for answer in group):
        return prompts, answers
    last_prompts = []
    last_turns = []
    for prompt, group in zip(prompts, answers, strict=True):
        for answer in group:
            turn = answer.turns[-1] if answer.turns else answer
            last_prompts.append(turn.prompt or prompt)
            last_turns.append([turn])
    return last_prompts, last_turns


class RewardModelScores:
    """Score completions with the reward model in reward_model.path, by default the one trained in this run.

    The reward model reads the same token ids and patches as the policy, so both must have the same tokenizer, model
    family and patch size.
    """

    def __init__(self, config: RunConfig, policy: VisionLanguageModel, processor: Processor, world: World):
        path = config.reward_model.path or Path(config.output_dir) / FOLDER
        check_same_inputs(path, policy, processor)
        if config.reward_model.path is None and has_adapters(policy) and not is_sharded(policy):
            # with LoRA, this run saved only the reward model's adapters: load them into a copy of the policy
            from minivlmrl.model.peft import load_adapter

            backbone = copy_model(policy)
            load_adapter(backbone, Path(path) / "adapter")
            model = add_saved_head(backbone, path)
        else:
            model = load_value_model(path, policy.lm_head.weight.dtype, world.device, policy.sharding)
        self.model = model.requires_grad_(False)
        self.world = world

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[float]:
        """Return one score per completion; all ranks must pass the same number of prompts."""
        scores = []
        config = self.model.backbone.config
        for start in range(0, len(prompts), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = pack_with_last_token(prompts[part], completions[part], config, self.world.device)
            scores += last_token_scores(self.model, batch).tolist()
        reshard(self.model)
        return scores


def pack_with_last_token(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    model_config: ModelConfig,
    device: torch.device | str,
) -> GroupBatch:
    """Pack prompts and completions, including each completion's last token.

    `pack` drops the last token of each completion, so each last token is first repeated. Packed tokens for a prompt p
    with the completions a (3 tokens) and b (2 tokens):

        pack:                    p0 p1 p2 | a0 a1    | b0
        pack_with_last_token:    p0 p1 p2 | a0 a1 a2 | b0 b1

    The score of completion a is read at its last token, a2.
    """

    def longer(values: Tensor) -> Tensor:
        return torch.cat([values, values[-1:]])

    groups = []
    for group in completions:
        longer_group = []
        for completion in group:
            ids = longer(completion.ids)
            policy_mask = longer(completion.policy_mask)
            longer_group.append(replace(completion, ids=ids, policy_mask=policy_mask))
        groups.append(longer_group)
    return pack(prompts, groups, model_config, device)


def last_token_scores(model: ValueModel, batch: GroupBatch) -> Tensor:
    """Return scores at the completions' last tokens, (R,), for a batch from pack_with_last_token."""
    of_rows = model(batch).split(batch.layout.row_lengths)
    return torch.stack([values[-1] for values in of_rows])


def reward_model(completions: list[str], reward_model_scores: list[float], **columns) -> list[float]:
    """Reward completions with the reward model's scores, which are not bounded."""
    return reward_model_scores


def check_stage_order(config: RunConfig, stage: str):
    """Raise UserError if no earlier stage trains the reward model, or if the stage samples trajectories."""
    if samples_trajectories(config.sampling):
        raise UserError(
            "the reward reward_model cannot score trajectories, because each turn of a trajectory has its own context "
            "window; remove reward_model from rewards"
        )
    if config.reward_model.path is not None:
        check_value_model_folder(config.reward_model.path)
        return
    earlier = config.stage_names[: config.stage_names.index(stage)]
    if not any(issubclass(find_trainer(name, config), RewardTrainer) for name in earlier):
        raise UserError(
            f"the stage {stage} uses the reward reward_model, but there is no reward model yet; set reward_model.path, "
            "or add the stage reward_model before it"
        )
