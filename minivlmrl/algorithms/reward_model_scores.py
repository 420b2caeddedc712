"""The reward of a trained reward model, which an earlier stage of the run may have trained."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from minivlmrl.algorithms.value_model import check_value_model_folder, load_beside, pack_to_end
from minivlmrl.rows import Completion, Prompt
from minivlmrl.scale.sharding import reshard

# the name of the stage, of its reward, and of what it leaves in the run's folder
FOLDER = "reward_model"
BATCH_SIZE = 16  # prompts that are scored together


class RewardModelScores:
    """Scores completions with the model of reward_model.path, by default the run's own."""

    def __init__(self, run, policy: nn.Module, world):
        path = run.reward_model.path or Path(run.output_dir) / FOLDER
        model = load_beside(policy, path, world.device, same_base=run.reward_model.path is None)
        if model.backbone.config.vocab_size != policy.config.vocab_size:
            raise ValueError(f"{path}: this model has another vocabulary than the policy")
        self.model, self.world = model.requires_grad_(False), world

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> list[float]:
        """Score completions, in their order; all ranks call this with equally many prompts."""
        scores, config = [], self.model.backbone.config
        for start in range(0, len(prompts), BATCH_SIZE):
            part = slice(start, start + BATCH_SIZE)
            batch = pack_to_end(prompts[part], completions[part], config, self.world.device)
            scores += self.model.at_end(batch).tolist()
        reshard(self.model)
        return scores


def build_reward_model(run, policy: nn.Module, world) -> RewardModelScores | None:
    """Load the reward model of a run; None if no reward asks for one."""
    return RewardModelScores(run, policy, world) if FOLDER in run.rewards else None


def reward_model(
    completions: list[str], reward_model_scores: list[float], **columns
) -> list[float]:
    """The reward `reward_model`: scores without bounds or unit, computed by RewardModelScores."""
    return reward_model_scores


def check_reward_model(run, stage: str):
    """Refuse a recipe with a reward model that is not there when its stage begins (ValueError)."""
    if run.reward_model.path is not None:
        check_value_model_folder(run.reward_model.path)
    elif FOLDER not in run.stages[: run.stages.index(stage)]:
        cure = "set reward_model.path to the folder of one, or put reward_model before it in stages"
        raise ValueError(f"rewards.reward_model: there is no reward model for {stage}; {cure}")
