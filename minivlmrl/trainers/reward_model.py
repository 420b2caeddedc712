"""The reward model (InstructGPT, step 2): a copy of the policy learns to rank answers as people.

It is also the reward `reward_model` of later stages, and of other runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RewardModelOptions, RunConfig
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import load_beside, save_value_model
from minivlmrl.distributed.weights import copy_model, reshard
from minivlmrl.losses.preference import reward_loss
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.value_head import (
    ValueModel,
    check_value_model_folder,
    input_form,
    pack_with_last_token,
)
from minivlmrl.trainers.offline import AnswerBatch, PairTrainer

FOLDER = "reward_model"  # also the name of the stage and of its reward
BATCH_SIZE = 16  # prompts that are scored together


@dataclass(kw_only=True)
class RewardBatch(AnswerBatch):
    """Pairs, the last token of each answer included."""

    margin: Tensor  # (R / 2,)


class RewardTrainer(PairTrainer):
    """The policy stays as it is. Rows may say by how much the chosen answer is better: `margin`."""

    stage = "reward_model"
    config_type = RewardModelOptions
    config: RewardModelOptions
    trains_policy = False
    trained: ValueModel

    def __init__(
        self,
        run: RunConfig,
        model: Qwen2_5_VL,
        processor: Processor,
        world: World,
        steps_done: int = 0,
    ):
        super().__init__(run, model, processor, world, steps_done)
        self.trained = ValueModel(copy_model(self.policy), self.run.model.freeze)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"trained": self.trained}

    def save(self, folder: Path):
        base = self.run.model.path
        save_value_model(folder / FOLDER, self.trained, self.processor, self.world, base)

    def micro_batch(self, rows: Sequence[Row]) -> RewardBatch:
        prompts, answers = self.encode(rows)
        group = pack_with_last_token(prompts, answers, self.policy.config, self.world.device)
        margin = torch.tensor([row.columns.get("margin") or 0.0 for row in rows])
        margin = margin.to(self.world.device)
        return RewardBatch(group, group.completion_mask, margin=margin)

    def rewards(self, batch: RewardBatch) -> tuple[Tensor, Tensor]:
        """Score the chosen answers, (B,), and the rejected ones, (B,)."""
        chosen, rejected = self.trained.score_last_token(batch.group).view(-1, 2).unbind(1)
        return chosen, rejected

    def loss(self, batch: RewardBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self.rewards(batch)
        margin = batch.margin.to(chosen.dtype)
        return reward_loss(
            chosen, rejected, self.config, margin=margin, normalizer=batch.normalizer
        )

    def margins(self, rows: Sequence[Row]) -> Tensor:
        chosen, rejected = self.rewards(self.micro_batch(rows))
        return chosen - rejected


class RewardModelScores:
    """Scores completions with the model of reward_model.path, by default the run's own.

    A model of another tokenizer or family than the policy's reads texts, not the policy's ids: the
    row's messages and images, and what the completion says, by its own processor and template.
    """

    def __init__(self, run: RunConfig, policy: Qwen2_5_VL, processor: Processor, world: World):
        path = run.reward_model.path or Path(run.output_dir) / FOLDER
        model = load_beside(policy, path, world.device, same_base=run.reward_model.path is None)
        self.model = model.requires_grad_(False)
        self.world = world
        self.policy_processor = processor
        self.processor = load_processor(path)
        self.reads_texts = input_form(model.backbone, self.processor) != input_form(
            policy, processor
        )
        if self.reads_texts and run.sampling.environment:
            raise ValueError(
                f"{path}: this reward model has another tokenizer or family than the policy, so it "
                "reads answers of one turn: leave out sampling.environment, or take another model"
            )

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[float]:
        """Score completions, in their order; all ranks call this with equally many prompts."""
        if self.reads_texts:
            prompts, completions = self.read_texts(prompts, completions)
        scores = []
        config = self.model.backbone.config
        for start in range(0, len(prompts), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = pack_with_last_token(
                prompts[part], completions[part], config, self.world.device
            )
            scores += self.model.score_last_token(batch).tolist()
        reshard(self.model)
        return scores

    def read_texts(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        """Encode what the policy's prompts and completions say as this model's own."""
        own_prompts = []
        answers = []
        for prompt, group in zip(prompts, completions, strict=True):
            assert prompt.row is not None, "the prompts of a rollout are made of rows"
            own_prompts.append(prompt.row.prompt(self.processor))
            answers.append([self.encode(prompt.row, completion) for completion in group])
        return own_prompts, answers

    def encode(self, row: Row, completion: Completion) -> Completion:
        """Encode a completion as the answers that a reward model is trained on.

        One that was cut has no end; names of control tokens that a Jinja template would take for
        the tokens are left out.
        """
        text = self.policy_processor.decode_assistant_turn(completion)
        template = self.processor.template
        if template is not None:
            text = template.control.sub("", text)
        answer = encode_completion(self.processor, row.messages, text)
        if completion.stopped or len(answer.ids) == 1:  # there must be a token to read
            return answer
        return Completion(answer.ids[:-1], policy_mask=answer.policy_mask[:-1])


def reward_model(
    completions: list[str], reward_model_scores: list[float], **columns
) -> list[float]:
    """Return the scores of RewardModelScores, without bounds or unit: the reward of this name."""
    return reward_model_scores


def check_stage_order(run: RunConfig, stage: str):
    """Refuse a recipe with a reward model that is not there when its stage begins (ValueError)."""
    if run.reward_model.path is not None:
        check_value_model_folder(run.reward_model.path)
    elif FOLDER not in run.stage_names[: run.stage_names.index(stage)]:
        raise ValueError(
            f"rewards.reward_model: there is no reward model for {stage}; set reward_model.path to "
            "the folder of one, or put reward_model before it in stages"
        )
