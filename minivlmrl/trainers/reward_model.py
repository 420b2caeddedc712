"""Train a reward model (InstructGPT, step 2), and score completions with it.

The reward model is a copy of the policy that learns to rank answers as human annotators do. Later stages and other runs
can use it as the reward `reward_model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import RewardModelOptions, RunConfig
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import load_scorer, save_value_model
from minivlmrl.distributed.weights import copy_model, reshard
from minivlmrl.losses.grpo import batch_normalizer
from minivlmrl.losses.preference import reward_loss
from minivlmrl.model.checkpoint import load_processor
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.value_head import ValueModel, check_value_model_folder, input_form, pack_with_last_token
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

    The model is loaded from reward_model.path, which defaults to this run's folder. If its tokenizer or its model
    family differs from the policy's, it cannot use the policy's token ids. The messages, the images and the
    completion's text are then encoded again with the processor and the chat template of the reward model.
    """

    def __init__(self, run: RunConfig, policy: VisionLanguageModel, processor: Processor, world: World):
        path = run.reward_model.path or Path(run.output_dir) / FOLDER
        model = load_scorer(policy, path, world.device, same_base=run.reward_model.path is None)
        self.model = model.requires_grad_(False)
        self.world = world
        self.policy_processor = processor
        self.processor = load_processor(path)
        self.reads_texts = input_form(model.backbone, self.processor) != input_form(policy, processor)
        if self.reads_texts:  # raises ValueError if the template cannot render any answer
            encode_completion(self.processor, [{"role": "user", "content": "?"}], "!")
        if self.reads_texts and run.sampling.environment:
            raise ValueError(
                f"{path}: this reward model has another tokenizer or model family than the policy, "
                "so it cannot score completions with tool calls; remove sampling.environment, or "
                "use a reward model with the policy's tokenizer and model family"
            )

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[float]:
        """Compute one score for each completion; all ranks must have the same number of prompts."""
        if self.reads_texts:
            prompts, completions = self.encode_texts(prompts, completions)
        scores = []
        config = self.model.backbone.config
        for start in range(0, len(prompts), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = pack_with_last_token(prompts[part], completions[part], config, self.world.device)
            scores += self.model.score_last_token(batch).tolist()
        reshard(self.model)
        return scores

    def encode_texts(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> tuple[list[Prompt], list[list[Completion]]]:
        """Encode the policy's prompts and completions with the reward model's processor."""
        own_prompts = []
        answers = []
        for prompt, group in zip(prompts, completions, strict=True):
            assert prompt.row is not None, "every prompt of a rollout must have the attribute row"
            own_prompts.append(prompt.row.prompt(self.processor))
            answers.append([self.encode(prompt.row, completion) for completion in group])
        return own_prompts, answers

    def encode(self, row: Row, completion: Completion) -> Completion:
        """Encode a policy completion like the answers that the reward model was trained on.

        If the completion is truncated, no end token is added. Control tokens of the structure that the policy sampled
        are encoded as text. If the chat template cannot render the text,
        for example a thought after a prompt without thoughts, the text is encoded as it is.
        """
        text = self.policy_processor.decode_assistant_turn(completion)
        try:
            answer = encode_completion(self.processor, row.messages, text)
        except ValueError:  # the policy can write any text, and no text may end the run
            answer = encode_completion(replace(self.processor, template=None), [], text)
        # at least one token must remain, because the score is computed at the last token
        if completion.stopped or len(answer.ids) == 1:
            return answer
        return Completion(answer.ids[:-1], policy_mask=answer.policy_mask[:-1])


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
