"""Before any training: what will go wrong with a recipe, your rows and your rewards.

python -m minivlmrl check RECIPE [--section.name=value ...]

It draws completions for 16 prompts, asks the rewards about them and about texts that are no answer,
and prints what will not work, and what to do: then the exit status is 1. Nothing is written.
"""

import inspect
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.boxes import Box, parse_boxes, says_none
from minivlmrl.data.messages import as_turns, part_kind, parts_of, shown_parts_of, text_of
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.row_summary import without_media
from minivlmrl.data.rows import Completion, Dataset, Row
from minivlmrl.diagnostics.warnings import FORM, LONGER
from minivlmrl.distributed import process_group
from minivlmrl.generation.sampler import Sampler, make_sampler
from minivlmrl.losses.advantages import combine, group_std
from minivlmrl.rewards.registry import Reward, columns_of, recipe_columns, training_rewards
from minivlmrl.rewards.text import ask_rewards, find_answer
from minivlmrl.run.callbacks import default_callbacks
from minivlmrl.run.evaluate import BLIND, draw
from minivlmrl.run.setup import mistakes, prepare
from minivlmrl.trainers.registry import find_class, find_trainers

PROMPTS = 16  # rows that are asked about
MARKUP_OF_ANSWER = 64  # tokens that a template adds to an answer, at most
ROLLOUT = "<think>{}</think><answer>{}</answer>"
# texts that are no answers: a reward that likes one of them will be given it
HACKS = {
    "nothing": "",
    "empty tags": ROLLOUT.format("", ""),
    "tags alone": ROLLOUT.format("", "") * 3,
    "the question": "{question}",
    "a refusal": ROLLOUT.format("hm", "I cannot tell"),
    "the same word again": "answer " * 60,
}
AGAIN = "--stages=[grpo] --model.config=null --model.path=RUN/checkpoint"


@dataclass
class Trial:
    """Rewards, their weights (K,), and n rows that they are asked about."""

    rewards: list[Reward]
    weights: Tensor
    rows: Sequence[Row]
    processor: Processor

    def earned(self, texts: Iterable[str]) -> Tensor:
        """What a text for each row earns, (n, K)."""
        prompts = [row.prompt(self.processor) for row in self.rows]
        groups = []
        for text in texts:
            ids = [*self.processor.tokenizer.encode(text), self.processor.stop_token_ids[0]]
            groups.append([Completion(torch.tensor(ids), torch.zeros(len(ids)), True)])
        return ask_rewards(self.rewards, recipe_columns(self.rows, prompts, groups, self.processor))

    def answered(self, answers: Iterable[str]) -> Tensor:
        """What answers earn where the rewards look for them, (n, K)."""
        return self.earned(as_rollout(answer, self.processor) for answer in answers)


def main(arguments: list[str]) -> int:
    """Print what will go wrong; returns 1 if something will."""
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 0
    sentences = dict.fromkeys(check(load_config(arguments[0], arguments[1:])))  # each once
    lines = [f"- {sentence}" for sentence in sentences]
    print("\n".join(lines) or "nothing found that will go wrong")
    return int(bool(lines))


def check(config) -> Iterator[str]:
    """Sentences about a recipe, each with the cause and what to do."""
    stages = find_trainers(config)
    world = process_group.setup(config.num_threads, config.timeout, config.uses_fsdp)
    for callback in default_callbacks(config):
        callback.on_setup(config, world)
    model, processor, datasets = prepare(config, stages, world)
    online = [stage for stage, trainer in stages.items() if not trainer.answers]
    yield from mistakes(config, datasets)
    if online:
        yield from check_sampling(config.sampling)
    for stage, trainer in stages.items():
        yield from check_training(config, stage, model, len(datasets[stage]))
        yield from check_all_rows(config, datasets[stage], trainer.answers, processor)
    yield from check_template(processor)
    yield from check_tools(config.sampling.environment)
    rows_of = {trainer.needs: datasets[stage] for stage, trainer in reversed(stages.items())}
    if online and "demonstrations" in rows_of:
        yield from check_demonstrations(trial_of(config, rows_of["demonstrations"], processor))
    if "prompts" in rows_of:
        trial = trial_of(config, rows_of["prompts"], processor)
        yield from check_twice(trial.rewards)
        if (trial.weights > 0).any():
            solution_counts = Counter(solutions_of(without_media(rows_of["prompts"])))
            yield from check_rewards(trial, solution_counts)
        is_drawn_first = config.stage_names[0] in online  # else the model is another by then
        if config.model.path and is_drawn_first:
            gather_weights = config.rollout.gather_weights
            sampling = replace(config.sampling, engine="own")
            sample = make_sampler(model, processor, sampling, world, gather_weights)
            yield from check_rollouts(trial, sample, getattr(config, online[0]).num_generations)
        else:
            print(f"no completions were drawn of a model without its form; after that {AGAIN}")
    process_group.shutdown(world)


def trial_of(config, all_rows: Dataset, processor: Processor) -> Trial:
    """Ask the rewards that need no model of their own about some rows."""
    rewards = [reward for reward in training_rewards(config) if reward.name != "reward_model"]
    weights = torch.tensor([config.rewards[reward.name] for reward in rewards])
    rows = [replace(row, key=f"check/{index}") for index, row in enumerate(spread(all_rows))]
    return Trial(rewards, weights, rows, processor)


def check_sampling(sampling: SamplingOptions) -> Iterator[str]:
    """Options with which nothing is tried."""
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


def check_training(config, stage: str, model, num_rows: int) -> Iterator[str]:
    """Numbers with which a stage does not learn."""
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


def check_all_rows(
    config, all_rows: Dataset, names: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Rows of a stage, and their answers of these names."""
    yield from check_conversations(all_rows, config.data.system_prompt)
    rows = spread(all_rows)
    solutions = [str(row.columns.get("solution") or "") for row in rows]
    yield from check_pictures(rows)
    yield from check_prompts(rows, processor)
    yield from check_questions(rows, solutions)
    yield from check_boxes(rows, solutions)
    yield from check_answers(config, names, all_rows, processor)


def check_conversations(all_rows: Dataset, system_prompt: str | None) -> Iterator[str]:
    """Rows with two system messages, or with pictures now before and now after the question."""
    num_two_systems = 0
    image_orders = Counter()  # of rows that begin or end with a picture, and not both
    for row in without_media(all_rows):
        systems = {text_of(turn) for turn in row.messages if turn["role"] == "system"}
        num_two_systems += len({*systems, system_prompt} - {None}) > 1
        kinds = [part_kind(part) for part in parts_of([row.messages[-1]]) if part.get("text") != ""]
        if kinds and "text" in (kinds[0], kinds[-1]) and kinds[0] != kinds[-1]:
            image_orders[kinds[0] == "text"] += 1
    if num_two_systems:
        yield (
            f"{num_two_systems} of {len(all_rows)} rows have two system messages, or one beside "
            "data.system_prompt, which is not used for them: leave one out"
        )
    if min(image_orders[True], image_orders[False]) > 0.2 * image_orders.total():
        yield (
            f"{image_orders[True]} questions have their image at the end, {image_orders[False]} at "
            "the beginning: write all in one way"
        )


def check_template(processor: Processor) -> Iterator[str]:
    """Prompts that open a tag of the answer other than <think>."""
    if processor.template:
        *_, last_piece = processor.template.render([{"role": "user", "content": "?"}])
        tag = re.search(r"<(\w+)>\s*$", last_piece)
        if tag and tag[1] != "think":
            yield (
                f"prompts open the answer with <{tag[1]}>, and what reads answers knows <think> "
                "alone: take a chat template that opens <think>, or nothing"
            )


def check_tools(environment_name: str | None) -> Iterator[str]:
    """Tools of which a prompt says no more than their name."""
    if environment_name is None:
        return
    from minivlmrl.agents.environment import get_environment, settings_of, tools_of

    environment = get_environment(environment_name)()
    for name, tool in tools_of(environment).items():
        if settings_of(environment).declare_tools and not inspect.getdoc(tool):
            yield f"tool {name} has no docstring, which tells the model what it does: write one"


def check_twice(rewards: list[Reward]) -> Iterator[str]:
    """A reward under two names."""
    names = {}  # function and options -> the name of the first
    for reward in rewards:
        function = getattr(reward.function, "func", reward.function)
        options = getattr(reward.function, "keywords", {})
        first_name = names.setdefault((function, repr(options)), reward.name)
        if first_name != reward.name:
            yield f"reward {reward.name} is {first_name} again: leave one out"


def check_pictures(rows: Sequence[Row]) -> Iterator[str]:
    """Pictures that are one and the same, or show nothing."""
    shown_bytes = [tuple(image.tobytes() for image in row.images) for row in rows]
    if len(rows) > 3 and all(shown_bytes) and len(set(shown_bytes)) == 1:
        yield "all rows show one picture: look at what the column image or images names"
    pictures = [image for row in rows for image in row.images]
    num_plain = sum(image.getcolors(1) is not None for image in pictures)
    if 5 * num_plain > len(pictures):
        yield (
            f"{num_plain} of {len(pictures)} images have one colour: "
            "look at the files, they may be damaged, or masks"
        )
    num_stretched = sum(map(is_stretched, pictures))
    if 5 * num_stretched > len(pictures):
        yield (
            f"{num_stretched} of {len(pictures)} images are thumbnails that were stretched "
            "(squares of one colour): take the files that they were made of"
        )


def is_stretched(image) -> bool:
    """Tell whether a picture has many colours, and none of its columns differs from both beside it."""
    if image.getcolors(64) is not None:
        return False
    pixels = np.array(image.convert("RGB"))  # (H, W, 3)
    differs = (pixels[:, 1:] != pixels[:, :-1]).any(
        (0, 2)
    )  # (W - 1,), a column from the one before
    return not (differs[1:] & differs[:-1]).any()


def check_prompts(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Prompts without pictures, or with too many tokens or too few."""
    prompts = [row.prompt(processor) for row in rows]
    longest_prompt = max(len(prompt.input_ids) for prompt in prompts)
    if longest_prompt > 8192:
        yield f"a prompt has {longest_prompt} tokens: lower data.max_pixels or cut the text"
    grids = [grid for prompt in prompts for grid in prompt.image_grid_thw.tolist()]
    if not grids:
        yield "no row has an image or video: name the column image or images"
        return
    num_tokens = max(map(processor.image_processor.num_tokens, grids))
    longer_sides = [max(image.size) for row in rows for image in row.images]
    if num_tokens == 1 and max(longer_sides, default=0) > 28:
        yield "each image is one token, which shows next to nothing: raise data.max_pixels"


def check_questions(rows: Sequence[Row], solutions: Sequence[str]) -> Iterator[str]:
    """Questions that hold their answer; one that names all answers to choose from may."""
    questions = [letters_of(text_of(row.messages[-1])) for row in rows]
    answers = [letters_of(find_answer(text) or text) for text in solutions]
    num_told = 0
    for answer, question in zip(answers, questions, strict=True):
        num_told += answer != "" and answer in question
    others_told = [answer in questions[0] for answer in answers if answer != answers[0]]
    names_few = sum(others_told) < len(others_told) / 3
    if len(rows) > 3 and num_told > 0.8 * len(rows) and names_few:
        yield f"{num_told} of {len(rows)} questions hold their solution: take it out of the prompt"


def letters_of(text: str) -> str:
    """Leave letters and digits: "Green_Square.png" names a green square."""
    return re.sub(r"[\W_]", "", text.lower())


def check_boxes(rows: Sequence[Row], solutions: Sequence[str]) -> Iterator[str]:
    """Solutions with boxes in other units."""
    for row, text in zip(rows, solutions, strict=True):
        corner_lists = parse_boxes(find_answer(text) or text) if row.images else []
        for box in [Box(*corners, row.images[0].size) for corners in corner_lists]:
            if not box.valid or not box.inside() or max(box.x2, box.y2) <= 1:
                yield (
                    f"{row.where}: {text:.80} is outside; "
                    "write x1, y1, x2, y2 in pixels of the file"
                )
                return


def check_answers(config, names, all_rows: Dataset, processor: Processor) -> Iterator[str]:
    """Answers to learn from that do not end, or are longer than what is drawn later."""
    rows = spread(all_rows)
    stop_ids = config.sampling.stop_token_ids or processor.stop_token_ids
    max_new_tokens = config.sampling.max_new_tokens
    draws_later = not all(trainer.answers for trainer in map(find_class, config.stages))
    for name in names:
        answers = [encode_completion(processor, row.messages, getattr(row, name)) for row in rows]
        id_lists = [answer.ids for answer in answers]
        last_ids = {int(answer_ids[-1]) for answer_ids in id_lists} - set(stop_ids)
        if last_ids:
            yield f"a {name} ends with {min(last_ids)}: name it in sampling.stop_token_ids, or none"
        lengths = list(map(len, id_lists))
        lengths += answer_lengths(all_rows, name, processor, max_new_tokens)
        if draws_later and max(lengths) > max_new_tokens:
            yield (
                f"a {name} has {max(lengths)} tokens, "
                f"sampling.max_new_tokens is {max_new_tokens}: raise it"
            )


def answer_lengths(all_rows: Dataset, name: str, processor: Processor, limit: int) -> Iterator[int]:
    """Count the tokens of answers without pictures, but of those that are within a limit for sure."""
    for row in without_media(all_rows):
        answer = getattr(row, name)
        num_bytes = len(repr(answer).encode())  # at most one token a byte
        if num_bytes + MARKUP_OF_ANSWER > limit and not shown_parts_of(as_turns(answer)):
            yield len(encode_completion(processor, row.messages, answer).ids)


def check_demonstrations(trial: Trial) -> Iterator[str]:
    """Demonstrations must earn the rewards that a later stage gives."""
    processor = trial.processor
    texts = [text_of(as_turns(row.completion or "")[-1]) for row in trial.rows]
    has_tags = any("<answer>" in text for text in texts)
    for reward in trial.rewards:
        if not reward.columns <= trial.rows[0].columns.keys():
            continue
        mean = replace(trial, rewards=[reward]).earned(texts).nanmean().item()
        if mean < 0.2:
            advice = "are the labels shuffled, or does the reward ask for another form?"
            if reward.name != "format" and processor.answer == "tags" and not has_tags:
                advice = "set data.answer: whole, or write <answer>...</answer>"
            yield (
                f"demonstrations earn {mean:.2f} of reward {reward.name}: "
                f"sft would teach what is not rewarded; {advice}"
            )
    yield from unread_boxes(trial.rewards, texts, processor)


def unread_boxes(
    rewards: list[Reward], texts: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Answers with boxes in a notation that no reward knows."""
    box_rewards = ("iou", "acc_0_5", "giou", "box_format")
    names = [reward.name for reward in rewards if reward.name in box_rewards]
    unread = []
    for text in texts:
        answer = find_answer(text, processor.answer)
        if answer and not parse_boxes(answer) and not says_none(answer):
            unread.append(answer)
    if names and len(unread) > 0.2 * len(texts):
        yield (
            f"{len(unread)} of {len(texts)} answers, such as {unread[0]!r:.80}, hold nothing that "
            f'{names[0]} reads; ask for {{"bbox_2d": [x1, y1, x2, y2]}}, '
            "or write a reward that reads them"
        )


def check_rewards(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """What the rewards give for texts that need no picture; solution_counts: of all rows."""
    rows = trial.rows
    right_values = trial.answered(solutions_of(rows))
    if any(row.columns.get("solution") is not None for row in rows):
        yield from check_empty(trial, solution_counts)
        yield from check_constant(trial, solution_counts, right_values)
    values = []  # of each text what it earns, (n, K); the right answers come last
    for text in HACKS.values():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        values.append(trial.earned(texts))
    values = torch.stack([*values, right_values])  # (texts, n, K)
    nothing_mean, *_, right_mean = [combine(x, trial.weights).nanmean() for x in values]
    if columns_of(trial.rewards) and right_mean <= nothing_mean:
        yield "a right answer earns no more than nothing: see rewards' weights and what they read"
    columns = values.nanmean(1).T.tolist()  # K of what each text earns
    for reward, weight, means in zip(trial.rewards, trial.weights, columns, strict=True):
        if not reward.columns:
            yield from check_same(reward, means)
        elif weight > 0:
            yield from check_hacks(reward, means)


def check_empty(trial: Trial, solution_counts: Counter) -> Iterator[str]:
    """Solutions that are empty, which a reward of boxes judges and others may not."""
    num_empty = sum(count for solution, count in solution_counts.items() if not solution.strip())
    if not num_empty:
        return
    columns = trial.rows[0].columns | {"solution": "", "row_rewards": None}
    values = replace(trial, rows=[replace(trial.rows[0], columns=columns)]).answered(["none"])[0]
    for reward, is_unjudged in zip(trial.rewards, values.isnan(), strict=True):
        if is_unjudged and "solution" in reward.columns:
            yield (
                f"{num_empty} of {solution_counts.total()} rows have an empty solution, which "
                f"reward {reward.name} does not judge: write one, or leave the rows out"
            )


def check_constant(trial: Trial, solution_counts: Counter, right_values: Tensor) -> Iterator[str]:
    """One right answer that earns nearly what all right answers do, (n, K), over all rows.

    Only rewards that read a column count. How often it is right is counted; the trial's rows say
    what it earns where it is, and where it is not.
    """
    reads_none = torch.tensor([not reward.columns for reward in trial.rewards])

    def totals(values: Tensor) -> Tensor:
        return combine(values.masked_fill(reads_none, torch.nan), trial.weights)

    [(solution, num_equal)] = solution_counts.most_common(1)
    right_mean = totals(right_values).nanmean().item()
    constant = totals(trial.answered([solution] * len(trial.rows)))  # (n,)
    is_equal = torch.tensor([truth == solution for truth in solutions_of(trial.rows)])
    equal_share = num_equal / solution_counts.total()
    constant_mean = equal_share * constant[is_equal].nanmean().nan_to_num(0.0).item()
    constant_mean += (1 - equal_share) * constant[~is_equal].nanmean().nan_to_num(0.0).item()
    # a constant that earns more: the rewards do not read right answers as they are written here
    if num_equal > 1 and 0.8 * right_mean < constant_mean <= 1.25 * right_mean:
        yield (
            f"always writing {as_rollout(solution, trial.processor)!r:.80} earns "
            f"{constant_mean / right_mean:.2f} of what right answers do: the rows hardly need "
            "their pictures; balance them"
        )


def check_same(reward: Reward, means: list[float]) -> Iterator[str]:
    """A reward that is told no truth and gives the same to all texts, of which one is empty."""
    if means[0] != 0 and len(set(means)) == 1:
        yield (
            f"reward {reward.name} says {means[0]:.3g} of every text that was tried, "
            "even of nothing: look at what it reads"
        )


def check_hacks(reward: Reward, means: list[float]) -> Iterator[str]:
    """A reward that is told the truth and likes what is no answer; means: of HACKS, then others."""
    for (name, text), mean in zip(HACKS.items(), means, strict=False):
        if mean > 0.3:
            yield (
                f"reward {reward.name} gives {mean:.2f} to {name} ({text!r:.40}): "
                "a policy finds this; make the reward ask for the answer itself"
            )


def check_rollouts(trial: Trial, sample: Sampler, num_generations: int) -> Iterator[str]:
    """Completions of the model as it is: cut, alike, without an answer, good without a picture."""
    rows = trial.rows
    rewards = trial.rewards
    processor = trial.processor
    values, groups = draw(sample, rows, num_generations, rewards)
    completions = [completion for group in groups for completion in group]
    cut_share = sum(not completion.stopped for completion in completions) / len(completions)
    if cut_share > 0.3:
        yield (
            f"{cut_share:.0%} of {len(completions)} completions are cut at sampling.max_new_tokens "
            f"({sample.sampling.max_new_tokens}); {LONGER}"
        )
    totals = combine(values, trial.weights)
    stds = group_std(totals.double(), num_generations)  # NaN for groups of one
    equal_share = (stds < 1e-8).double().mean().item()
    if equal_share > 0.9:
        yield (
            f"{equal_share:.0%} of {len(rows)} groups earn the same for all {num_generations} "
            "completions and would teach nothing; "
            "take easier or harder prompts, train sft first, or look at what the rewards ask for"
        )
    reward_means = dict(zip([reward.name for reward in rewards], values.nanmean(0), strict=True))
    prompt_text = "".join(text_of(message) for row in rows for message in row.messages)
    if "<answer>" not in prompt_text and reward_means.get("format", 1) < 0.05:
        yield f"reward format asks for tags, no prompt does, and no completion has them; {FORM}"
    texts = [processor.decode_assistant_turn(completion) for completion in completions]
    yield from check_found(texts, processor.answer)
    yield from unread_boxes(rewards, texts, processor)
    if equal_share < 1 and any(row.images for row in rows):
        grey_rows = [replace(row, images=BLIND["grey"](row, rows)) for row in rows]
        grey_values, _ = draw(sample, grey_rows, num_generations, rewards)
        yield from check_grey(totals, combine(grey_values, trial.weights))
    columns = recipe_columns(rows, [row.prompt(processor) for row in rows], groups, processor)
    yield from check_labels(rewards, columns, num_generations)


def check_found(texts: Sequence[str], place: str) -> Iterator[str]:
    """Completions without an answer where data.answer says that it is."""
    answers = [find_answer(text, place) for text in texts]
    unparsed_share = answers.count(None) / len(texts)
    if unparsed_share > 0.5:
        yield (
            f"{unparsed_share:.0%} of the completions have no answer where data.answer "
            f"({place}) looks; set data.answer (tags, whole, last_line), or {FORM}"
        )


def check_grey(totals: Tensor, grey_totals: Tensor) -> Iterator[str]:
    """Completions that earn as much without the pictures, both (n,)."""
    real_mean = totals.nanmean()
    grey_mean = grey_totals.nanmean()
    if real_mean > 0 and grey_mean > 0.95 * real_mean:
        yield (
            f"with grey pictures the completions earn {grey_mean:.2f}, else {real_mean:.2f}: "
            "check that the right images are with the right rows"
        )


def check_labels(
    rewards: list[Reward], columns: dict[str, list], num_generations: int
) -> Iterator[str]:
    """Completions that fit the solutions of other rows as well as their own."""
    for reward in rewards:
        means = []
        for start in range(0, len(columns["completions"]), num_generations):
            shifted = {
                name: columns[name][start:] + columns[name][:start] for name in reward.columns
            }
            means.append(ask_rewards([reward], columns | shifted).nanmean())
        shifted_means = torch.tensor(means[1:])
        mean = shifted_means.mean()
        std = shifted_means.std()
        if std > 0 and means[0] <= mean + std:
            yield (
                f"reward {reward.name} is {means[0]:.2f}, and {mean:.2f} with the "
                "solutions of other rows; were the solutions shuffled? Else train sft first"
            )


def as_rollout(answer: str, processor: Processor) -> str:
    """Write an answer, or what is in the tags of one, where the rewards look for it."""
    answer = find_answer(answer) or answer
    if processor.answer == "tags":
        return ROLLOUT.format("hm", answer)
    return answer if processor.answer == "whole" else f"hm\n{answer}"


def solutions_of(rows: Iterable[Row]) -> list[str]:
    return [str(row.columns.get("solution")) for row in rows]


def spread(rows: Sequence) -> list:
    """Draw at most PROMPTS rows: with a fixed step all could be of one kind, as every second is."""
    row_indices = random.Random(0).sample(range(len(rows)), min(PROMPTS, len(rows)))
    return [rows[index] for index in sorted(row_indices)]
