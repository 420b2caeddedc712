"""Check a recipe for options that prevent learning: sampling, stages, chat template and tools."""

import inspect
import re
from collections.abc import Iterator

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.rewards.registry import Reward

# With a lower learning rate, adapters hardly change within a few hundred steps.
LOWEST_ADAPTER_RATE = 5e-6


def check_sampling_options(sampling: SamplingOptions) -> Iterator[str]:
    """Check temperature, top_k and top_p for values that make all completions alike or random."""
    if not 0.2 <= sampling.temperature <= 2:
        yield (
            f"sampling.temperature is {sampling.temperature:g}. Below 0.2 all completions of a "
            "prompt are alike, and above 2 they are random text. Set it to 1.0."
        )
    if sampling.top_k == 1 or sampling.top_p < 0.1:
        yield (
            f"sampling.top_k is {sampling.top_k} and sampling.top_p is {sampling.top_p:g}, so all "
            "completions of a prompt are alike. Set sampling.top_k to 0 and sampling.top_p to 1.0, "
            "which disables both filters."
        )


def check_training(config: RunConfig, stage: str, model: VisionLanguageModel, num_rows: int) -> Iterator[str]:
    """Check a stage's learning rate, warmup, KL weight and batch size.

    Args:
        num_rows: number of rows in the stage's dataset.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    keeps_language = {"language", "embeddings"} <= {*config.model.freeze}
    if num_parameters < 10**8 or not config.model.path:
        highest_rate = 1e-2
    elif config.adapter.r or keeps_language:  # keeps_language: a new vision tower or merger
        highest_rate = 1e-3
    else:
        highest_rate = 1e-4
    options = getattr(config, stage)
    if config.adapter.r and options.learning_rate < LOWEST_ADAPTER_RATE:
        yield (
            f"{stage}.learning_rate is {options.learning_rate:g}, at which adapters (adapter.r is "
            f"{config.adapter.r}) hardly change, because they start at 0. Set it to a value from "
            "1e-5 to 1e-4."
        )
    if options.learning_rate > highest_rate:
        yield (
            f"{stage}.learning_rate is {options.learning_rate:g}, but a rate above "
            f"{highest_rate:g} ruins the weights of this model within a few steps. Lower it."
        )
    if 0 < options.max_steps <= options.warmup_steps:
        yield (
            f"{stage}.warmup_steps is {options.warmup_steps}, so all {options.max_steps} steps of "
            "the stage are warmup steps. Lower it."
        )
    if getattr(options, "beta", 0) > 1:
        yield (
            f"{stage}.beta is {options.beta:g}, a KL weight so high that the policy will hardly change. Set it to 0.1."
        )
    if options.prompts_per_step >= 4 * num_rows:
        yield (
            f"{stage}.prompts_per_step is {options.prompts_per_step}, but the dataset has only "
            f"{num_rows} rows, so each step repeats every row several times. Lower it."
        )


def check_template(processor: Processor) -> Iterator[str]:
    """Check that the chat template ends the prompt with <think> or without an opening tag.

    Answers cannot be parsed if the prompt opens another tag, such as <reasoning>.
    """
    if processor.template:
        *_, last_piece = processor.template.render([{"role": "user", "content": "?"}])
        tag = re.search(r"<(\w+)>\s*$", last_piece)
        if tag and tag[1] != "think":
            yield (
                f"The chat template ends the prompt with the opening tag <{tag[1]}>, but answers "
                "can be parsed only after <think> or after no tag. Use a chat template that ends "
                "with <think> or without a tag."
            )


def check_tools(environment_name: str | None) -> Iterator[str]:
    """Check that an environment's tools have docstrings, which describe them to the model."""
    if environment_name is None:
        return
    from minivlmrl.extras.agents.environment import get_environment, settings_of, tools_of

    environment = get_environment(environment_name)()
    for name, tool in tools_of(environment).items():
        if settings_of(environment).declare_tools and not inspect.getdoc(tool):
            yield (
                f"The tool {name} has no docstring. Write one, because the docstring tells the "
                "model what the tool does."
            )


def check_duplicates(rewards: list[Reward]) -> Iterator[str]:
    """Check that the recipe does not list a reward function twice with the same options."""
    names = {}  # (function, options) -> the first reward's name
    for reward in rewards:
        function = getattr(reward.function, "func", reward.function)
        options = getattr(reward.function, "keywords", {})
        first_name = names.setdefault((function, repr(options)), reward.name)
        if first_name != reward.name:
            yield (
                f"The rewards {first_name} and {reward.name} are the same function with the same "
                "options. Remove one of them."
            )
