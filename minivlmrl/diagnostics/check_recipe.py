"""Check a recipe for options that prevent learning: sampling, stages, chat template and tools."""

import inspect
import re
from collections.abc import Iterator

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.rewards.registry import Reward


def check_sampling_options(sampling: SamplingOptions) -> Iterator[str]:
    """Check temperature, top_k and top_p for values that make all completions alike or random."""
    if not 0.2 <= sampling.temperature <= 2:
        yield (
            f"sampling.temperature is {sampling.temperature:g}: "
            "completions are all alike, or noise; take 1.0"
        )
    if sampling.top_k == 1 or sampling.top_p < 0.1:
        yield (
            f"sampling.top_k is {sampling.top_k}, top_p {sampling.top_p:g}: "
            "completions are all alike; take 0 and 1.0"
        )


def check_training(
    config: RunConfig, stage: str, model: Qwen2_5_VL, num_rows: int
) -> Iterator[str]:
    """Check the learning rate, warmup, KL weight and batch size of a stage.

    Args:
        num_rows: number of rows in the dataset of the stage.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters < 10**8 or not config.model.path:
        highest_rate = 1e-2
    elif config.adapter.r:
        highest_rate = 1e-3
    else:
        highest_rate = 1e-4
    options = getattr(config, stage)
    if options.learning_rate > highest_rate:
        yield (
            f"{stage}.learning_rate is {options.learning_rate:g}: "
            f"over {highest_rate:g} such weights are lost in a few steps; lower it"
        )
    if 0 < options.max_steps <= options.warmup_steps:
        yield (
            f"{stage}.warmup_steps is {options.warmup_steps}: "
            f"all {options.max_steps} steps are warmup; lower it"
        )
    if getattr(options, "beta", 0) > 1:
        yield f"{stage}.beta is {options.beta:g}: the policy will not move; take 0.1"
    if options.prompts_per_step >= 4 * num_rows:
        yield f"a step repeats its {num_rows} rows several times: lower {stage}.prompts_per_step"


def check_template(processor: Processor) -> Iterator[str]:
    """Check that the chat template opens no tag at the end of the prompt except <think>.

    The parser of answers knows no other tag that the prompt opens.
    """
    if processor.template:
        *_, last_piece = processor.template.render([{"role": "user", "content": "?"}])
        tag = re.search(r"<(\w+)>\s*$", last_piece)
        if tag and tag[1] != "think":
            yield (
                f"prompts open the answer with <{tag[1]}>, and what reads answers knows <think> "
                "alone: take a chat template that opens <think>, or nothing"
            )


def check_tools(environment_name: str | None) -> Iterator[str]:
    """Check that the tools of an environment have docstrings, which describe them to the model."""
    if environment_name is None:
        return
    from minivlmrl.agents.environment import get_environment, settings_of, tools_of

    environment = get_environment(environment_name)()
    for name, tool in tools_of(environment).items():
        if settings_of(environment).declare_tools and not inspect.getdoc(tool):
            yield f"tool {name} has no docstring, which tells the model what it does: write one"


def check_twice(rewards: list[Reward]) -> Iterator[str]:
    """Check that no reward function is listed twice with the same options under two names."""
    names = {}  # (function, options) -> name of the first reward
    for reward in rewards:
        function = getattr(reward.function, "func", reward.function)
        options = getattr(reward.function, "keywords", {})
        first_name = names.setdefault((function, repr(options)), reward.name)
        if first_name != reward.name:
            yield f"reward {reward.name} is {first_name} again: leave one out"
