"""The reward model (InstructGPT, step 2): a copy of the policy learns to rank answers as people do.

Later stages, and other runs, use the trained model as the reward `reward_model`.
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
from minivlmrl.distributed.value_models import load_scorer, save_value_model
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

FOLDER = "reward_model"  # folder of the model in a run, and name of the stage and of the reward
BATCH_SIZE = 16  # prompts per forward pass in scoring


@dataclass(kw_only=True)
class RewardBatch(AnswerBatch):
    """Pairs of answers for the reward model, packed with the last token, which is scored."""

    margin: Tensor  # (R / 2,) by how much the chosen answer should score higher


class RewardTrainer(PairTrainer):
    """Trainer of a reward model on pairs; the policy stays unchanged.

    The optional column `margin` of a row says by how much its chosen answer should score higher.
    """

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
        """Compute the scores of the chosen and the rejected answers, (B,) each."""
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
    """Callable that scores completions with a reward model.

    The model is loaded from reward_model.path, by default from the folder of this run. A reward
    model with another tokenizer or family than the policy cannot read the policy's token ids. It
    reads texts instead: messages, images and completion are encoded with its own processor and chat
    template.
    """

    def __init__(self, run: RunConfig, policy: Qwen2_5_VL, processor: Processor, world: World):
        path = run.reward_model.path or Path(run.output_dir) / FOLDER
        model = load_scorer(policy, path, world.device, same_base=run.reward_model.path is None)
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
                "cannot score completions with tool calls; remove sampling.environment, or use a "
                "reward model with the policy's tokenizer and family"
            )

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[float]:
        """Compute the scores of completions, in their order.

        All ranks must call this with equally many prompts.
        """
        if self.reads_texts:
            prompts, completions = self.encode_texts(prompts, completions)
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

    def encode_texts(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        """Encode prompts and completions of the policy with the reward model's processor."""
        own_prompts = []
        answers = []
        for prompt, group in zip(prompts, completions, strict=True):
            assert prompt.row is not None, "every prompt of a rollout has its row"
            own_prompts.append(prompt.row.prompt(self.processor))
            answers.append([self.encode(prompt.row, completion) for completion in group])
        return own_prompts, answers

    def encode(self, row: Row, completion: Completion) -> Completion:
        """Encode a completion of the policy like the answers that the reward model was trained on.

        A truncated completion gets no end token. Texts that look like control tokens are removed,
        because the chat template of the reward model would read them as tokens.
        """
        text = self.policy_processor.decode_assistant_turn(completion)
        template = self.processor.template
        if template is not None:
            text = template.control.sub("", text)
        answer = encode_completion(self.processor, row.messages, text)
        if completion.stopped or len(answer.ids) == 1:  # at least one token is needed for a score
            return answer
        return Completion(answer.ids[:-1], policy_mask=answer.policy_mask[:-1])


def reward_model(
    completions: list[str], reward_model_scores: list[float], **columns
) -> list[float]:
    """Return the scores of the reward model, which have neither bounds nor a unit.

    This is the reward function `reward_model`; RewardModelScores computes its argument.
    """
    return reward_model_scores


def check_stage_order(run: RunConfig, stage: str):
    """Raise ValueError if the reward model of a recipe does not exist when a stage starts.

    Args:
        stage: name of a stage that uses the reward `reward_model`.
    """
    if run.reward_model.path is not None:
        check_value_model_folder(run.reward_model.path)
    elif FOLDER not in run.stage_names[: run.stage_names.index(stage)]:
        raise ValueError(
            f"rewards.reward_model: there is no reward model for {stage}; set reward_model.path to "
            f"the folder of a reward model, or add the stage reward_model before {stage}"
        )
