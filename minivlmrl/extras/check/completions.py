"""Check the untrained model's completions and their rewards.

The checks find truncated completions, groups whose rewards are all equal, completions without an answer, and solutions
that belong to other rows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from minivlmrl.data.messages import text_of
from minivlmrl.diagnostics.warnings import FORMAT_ADVICE, RAISE_LIMIT_ADVICE
from minivlmrl.extras.check.rewards import Trial, unparsed_boxes
from minivlmrl.generation.sampler import Sampler
from minivlmrl.losses.advantages import combine, group_std
from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import Reward, recipe_columns
from minivlmrl.rewards.text import find_answer, normalize
from minivlmrl.run.evaluate import generate_and_score

ROUNDING = 1e-5  # means of float32 rewards of equal size differ by less


def check_completions(trial: Trial, sample: Sampler, num_generations: int) -> Iterator[str]:
    """Sample the untrained model's completions, and check the completions and their rewards.

    Args:
        trial: rewards to check, and rows from which the completions are sampled.
        sample: the model's sampler.
        num_generations: completions per prompt.

    Yields:
        A message for each problem: truncated completions, groups with equal rewards, completions without an answer,
        boxes that cannot be parsed, and solutions that belong to other rows.
    """
    rows = trial.rows
    rewards = trial.rewards
    processor = trial.processor
    values, groups = generate_and_score(sample, rows, num_generations, rewards)
    completions = [completion for group in groups for completion in group]
    truncated_share = sum(not completion.stopped for completion in completions) / len(completions)
    if truncated_share > 0.3:
        yield (
            f"{truncated_share:.0%} of {len(completions)} completions are truncated at "
            f"sampling.max_new_tokens ({sample.sampling.max_new_tokens}). {RAISE_LIMIT_ADVICE}"
        )
    totals = combine(values, trial.weights)
    stds = group_std(totals.double(), num_generations)  # NaN for a group with one completion
    equal_groups = (stds < 1e-8).double().mean().item()
    if equal_groups > 0.9:
        yield (
            f"{equal_groups:.0%} of {len(rows)} groups have the same reward for all "
            f"{num_generations} completions, so they give no training signal. Use easier or harder "
            "prompts, train the stage sft first, or check whether the rewards fit the completions."
        )
    reward_means = dict(zip([reward.name for reward in rewards], values.nanmean(0), strict=True))
    prompt_text = "".join(text_of(message) for row in rows for message in row.messages)
    if "<answer>" not in prompt_text and reward_means.get("format", 1) < 0.05:
        yield (
            "Reward format expects <answer> tags, but no prompt mentions them and no completion "
            f"has them. {FORMAT_ADVICE}"
        )
    texts = [processor.decode_assistant_turn(completion) for completion in completions]
    yield from check_answers_found(texts, processor.answer_format)
    yield from unparsed_boxes(rewards, texts, processor)
    columns = recipe_columns(rows, [row.prompt(processor) for row in rows], groups, processor)
    yield from check_labels(rewards, columns, num_generations)
    yield from check_agreement(rewards, columns, num_generations)


def check_answers_found(texts: Sequence[str], answer_format: str) -> Iterator[str]:
    """Check that at least half the completions have an answer in the format data.answer_format.

    Args:
        texts: decoded completions.
        answer_format: data.answer_format, which is tags, whole or last_line.
    """
    answers = [find_answer(text, answer_format) for text in texts]
    unparsed_share = answers.count(None) / len(texts)
    if unparsed_share > 0.5:
        yield (
            f"{unparsed_share:.0%} of the completions have no answer that data.answer_format ({answer_format}) can "
            f"find. Set data.answer_format to tags, whole or last_line. {FORMAT_ADVICE}"
        )


def check_labels(rewards: list[Reward], columns: dict[str, list], num_generations: int) -> Iterator[str]:
    """Check that completions score higher with the solution of their own row than with solutions of other rows.

    Args:
        rewards: rewards to check.
        columns: {column name: one value per completion}, the reward arguments.
        num_generations: completions per prompt. The columns are rotated by multiples of
            this number, so that each completion is scored with another row's solution.
    """
    for reward in rewards:
        if "solution" not in reward.columns:
            continue
        means = []
        for start in range(0, len(columns["completions"]), num_generations):
            shifted = {name: columns[name][start:] + columns[name][:start] for name in reward.columns}
            means.append(call_rewards([reward], columns | shifted).nanmean())
        shifted_means = torch.tensor(means[1:])
        mean = shifted_means.mean()
        std = shifted_means.std()
        if std > ROUNDING and means[0] <= mean + std:
            yield (
                f"The mean of reward {reward.name} is {means[0]:.2f} with the solution of the "
                f"same row, and {mean:.2f} with solutions of other rows. Check that the solutions "
                "are not shuffled. If each solution belongs to its row, train the stage sft first."
            )


def check_agreement(rewards: list[Reward], columns: dict[str, list], num_generations: int) -> Iterator[str]:
    """Check for rows whose completions agree on a wrong answer, if the model answers most rows rightly.

    At least three quarters of such a row's completions have the same answer, and all of these completions score less
    than half the highest reward. The solution of such a row may be wrong.

    Args:
        columns: {column name: one value per completion}, the reward arguments.
    """
    answers = [None if text is None else normalize(text) for text in columns["answer_texts"]]
    for reward in rewards if num_generations > 1 else ():
        if "solution" not in reward.columns:
            continue
        groups = call_rewards([reward], columns).view(-1, num_generations)
        half = groups.nan_to_num(0.0).max() / 2
        faults = []
        for start, values in zip(range(0, len(answers), num_generations), groups, strict=True):
            own = answers[start : start + num_generations]
            [(answer, count)] = Counter(own).most_common(1)
            is_same = answer is not None and 4 * count >= 3 * num_generations
            if is_same and bool((values < half).all()):
                faults.append((columns["row_names"][start], columns["solution"][start], answer))
        is_right_mostly = groups.nanmean(1).nanmedian() > 1.5 * half
        if half > 0 and is_right_mostly and len(faults) > max(1, 0.1 * len(groups)):
            where, solution, answer = faults[0]
            yield (
                f"The completions of {len(faults)} of {len(groups)} rows agree on an answer that "
                f"reward {reward.name} does not accept, although most rows are answered rightly. "
                f"For example, the solution of {where} is {solution!r:.60}, and the completions say "
                f"{answer!r:.60}. Compare the solutions of these rows with their images."
            )
