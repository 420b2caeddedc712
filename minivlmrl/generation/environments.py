"""Interface to tools and environments in extras/agents/.

extras/agents/ is imported only if a recipe sets `sampling.environment`.
"""

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.sampler import Sampler, resolve_engine
from minivlmrl.load_extra import load_extra
from minivlmrl.model.decoder import VisionLanguageModel


def agents():
    return load_extra("minivlmrl.extras.agents.hooks", "sampling.environment")


def make_sampler(
    model: VisionLanguageModel,
    processor: Processor,
    sampling: SamplingOptions,
    world: World,
    gather_weights: bool = True,
    keeps_vision: bool = False,
) -> Sampler:
    """Make the sampler for the recipe section `sampling`; see Sampler for arguments.

    If sampling.environment is set, the sampler runs its tools. Otherwise, sampling.engine names the sampler class.
    """
    if sampling.environment is None:
        _, kind = resolve_engine(sampling)
    else:
        kind = agents().find_sampler(sampling.environment, sampling.history)
    return kind(model, processor, sampling, world, gather_weights, keeps_vision)


def check_environment(config: RunConfig):
    """Raise UserError if the tool environment does not fit the options `rewards` and `sampling.history`."""
    if config.sampling.environment is not None or "environment" in config.rewards:
        agents().check_reward(config.sampling.environment, config.rewards)
    # raises UserError if sampling.history and the method `observe` both define prompts for later turns
    samples_trajectories(config.sampling)


def samples_trajectories(sampling: SamplingOptions) -> bool:
    """Return True if every turn has its own prompt, for example if older turns are left out."""
    return sampling.environment is not None and agents().has_windows(sampling.environment, sampling.history)


def packed_length(completion: Completion) -> int:
    """Count a completion's tokens in a packed batch, including the separate prompts of later turns."""
    windows = [turn.prompt for turn in completion.turns[1:] if turn.prompt is not None]
    return len(completion.ids) + sum(len(window.input_ids) for window in windows)
