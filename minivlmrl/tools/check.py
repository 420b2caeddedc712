"""Before any training: what will go wrong with a recipe, your rows and your rewards.

python -m minivlmrl check RECIPE [--section.name=value ...]

It draws completions for 16 prompts, asks the rewards about them, about answers that need no picture
and about texts that are no answers, and prints a sentence for each thing that will not work, with
what to do. Nothing is written. The exit status is 1 if something was found.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import PIL.Image
import torch

from minivlmrl.advantages import combine, group_std
from minivlmrl.algorithms.table import find_algorithm
from minivlmrl.data.turns import as_turns, text_of
from minivlmrl.generate import Completion
from minivlmrl.reward_functions.calls import ask_by_name, recipe_columns
from minivlmrl.reward_functions.names import required_columns
from minivlmrl.rewards import find_answer
from minivlmrl.rows import Processor, Row
from minivlmrl.run.config import load_config
from minivlmrl.run.evaluate import draw
from minivlmrl.run.start import prepare
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.scale import ranks

PROMPTS = 16  # rows that are asked about
ROLLOUT = "<think>{}</think><answer>{}</answer>"
# texts that are no answers: a reward that likes one of them will be given it
HACKS = {
    "nothing": "",
    "empty tags": ROLLOUT.format("", ""),
    "tags alone": "<think></think><answer></answer>" * 3,
}
HACKS |= {"the question": "{question}", "a refusal": ROLLOUT.format("hm", "I cannot tell")}
HACKS |= {"the same word again": "answer " * 60}


def main(arguments: list[str]) -> int:
    """Print what will go wrong; returns 1 if something will."""
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 0
    found = list(check(load_config(arguments[0], arguments[1:])))
    print("\n".join(f"- {sentence}" for sentence in found) or "nothing found that will go wrong")
    return int(bool(found))


def check(config) -> Iterator[str]:
    """Sentences about a recipe, each with the cause and what to do."""
    stages = {stage: find_algorithm(stage, config) for stage in config.stages}
    for algorithm in stages.values():
        algorithm.check(config)
    world = ranks.setup(config.num_threads, config.timeout, config.uses_fsdp)
    model, processor, datasets = prepare(config, stages, world)  # refuses what does not fit the GPU
    yield from check_settings(config, model)
    online = [stage for stage, algorithm in stages.items() if not algorithm.answers]
    if online and config.sampling.temperature < 0.2:
        cure = "all completions of a group will be alike; take 1.0"
        yield f"sampling.temperature is {config.sampling.temperature:g}: {cure}"
    rows_of = {algorithm.needs: datasets[stage] for stage, algorithm in reversed(stages.items())}
    if online and "demonstrations" in rows_of:
        yield from check_demonstrations(config, rows_of["demonstrations"], processor)
    asked = rows_of.get("prompts")
    if asked is not None:
        rows = [replace(row, key=f"check/{i}") for i, row in enumerate(spread(asked))]
        yield from check_prompts(rows, processor)
        yield from check_rewards(config, rows, processor)
        if config.model.path and config.stages[0] in online:  # else the model is another by then
            sample = RunSampler(
                model, processor, config.sampling, world, config.rollout.gather_weights
            )
            yield from check_rollouts(
                config, sample, rows, getattr(config, online[0]).num_generations
            )
        else:
            cure = (
                "check again with --stages=[grpo] --model.config=null --model.path=RUN/checkpoint"
            )
            print(
                "no completions were drawn, as the model has to learn their form first; after "
                f"that {cure}"
            )
    ranks.shutdown()


def check_settings(config, model) -> Iterator[str]:
    """Numbers that no run learns with."""
    small = sum(parameter.numel() for parameter in model.parameters()) < 10**8
    usual = 1e-2 if small or not config.model.path else 1e-3 if config.adapter.r else 1e-4
    for stage in config.stages:
        rate = getattr(config, stage).learning_rate
        if rate > usual:
            yield (
                f"{stage}.learning_rate is {rate:g}: over {usual:g} such weights are lost in a "
                "few steps; lower it"
            )


def check_demonstrations(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Demonstrations must earn the rewards that a later stage gives."""
    some = spread(rows)
    texts = [text_of(as_turns(row.completion)[-1]) for row in some]
    for name in online_rewards(config):
        if not set(required_columns([name])) <= set(some[0].columns):
            continue
        mean = earned([name], some, texts, processor)[:, 0].nanmean().item()
        if mean < 0.2:
            cure = (
                "are the labels shuffled, or does the reward ask for another form? Look at a "
                "row and its reward"
            )
            if (
                name != "format"
                and not any("<answer>" in text for text in texts)
                and processor.answer == "tags"
            ):
                cure = (
                    "their answers are in no tags: set data.answer: whole, or write "
                    "<answer>...</answer>"
                )
            yield (
                f"demonstrations earn {mean:.2f} of reward {name}: sft would teach what is not "
                f"rewarded; {cure}"
            )


def check_prompts(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Prompts that are too long, or have no image."""
    longest = max(len(row.prompt(processor).input_ids) for row in rows)
    if longest > 8192:
        yield (
            f"a prompt has {longest} tokens; attention grows with its square: lower "
            "data.max_pixels or cut the text"
        )
    seen = sum(bool(row.images or row.videos) for row in rows)
    if seen == 0:
        yield (
            "no row has an image or video: the model trains on text alone; name the column image "
            "or images"
        )


def check_rewards(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """What the rewards give for texts that need no picture."""
    names = online_rewards(config)
    weights = torch.tensor([config.rewards[name] for name in names])
    if not names or not (weights > 0).any():
        return
    best = weights.clamp(min=0).sum()
    solutions = [str(row.columns.get("solution")) for row in rows]
    rollouts = [ROLLOUT.format("hm", find_answer(solution) or solution) for solution in solutions]
    right, [(constant, count)] = (
        earned(names, rows, rollouts, processor),
        Counter(rollouts).most_common(1),
    )
    if any(row.columns.get("solution") is not None for row in rows):
        share = (
            combine(earned(names, rows, [constant] * len(rows), processor), weights).nanmean()
            / best
        )
        if count > 1 and share > 0.8:
            cure = "the rows hardly need their pictures; balance them"
            yield (
                f"always writing {constant!r:.80} earns {share:.2f} of all that can be earned: "
                f"{cure}"
            )
    given = {}  # name of a text: what it earns, (n, K)
    for name, text in HACKS.items():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        given[name] = earned(names, rows, texts, processor)
    for k, reward in enumerate(names):
        means = {name: values[:, k].nanmean().item() for name, values in given.items()}
        if required_columns([reward]):  # it knows the truth
            for name in (name for name, mean in means.items() if mean > 0.3 and weights[k] > 0):
                cure = "a policy finds this; make the reward ask for the answer itself"
                yield (
                    f"reward {reward} gives {means[name]:.2f} to {name} ({HACKS[name]!r:.40}): "
                    f"{cure}"
                )
        elif {*means.values(), right[:, k].nanmean().item()} == {means["nothing"]} != {0.0}:
            cure = "look at what it reads"
            yield (
                f"reward {reward} says {means['nothing']:.3g} of every text that was tried, even "
                f"of nothing: {cure}"
            )


def check_rollouts(config, sample: RunSampler, rows: Sequence[Row], G: int) -> Iterator[str]:
    """Completions of the model as it is: cut, alike, without an answer, or as good without the
    picture."""
    processor, names = sample.processor, online_rewards(config)
    weights = torch.tensor([config.rewards[name] for name in names])
    rewards, drawn = draw(sample, rows, G, names)
    total, flat = combine(rewards, weights), [c for group in drawn for c in group]
    cut = sum(not c.stopped for c in flat) / len(flat)
    if cut > 0.3:
        limit = f"sampling.max_new_tokens ({config.sampling.max_new_tokens})"
        yield (
            f"{cut:.0%} of {len(flat)} completions are cut at {limit}; raise it, or ask for "
            "shorter answers"
        )
    equal = (group_std(total.double(), G) < 1e-8).double().mean().item() if G > 1 else 0.0
    if equal > 0.9:
        cure = "take easier or harder prompts, train sft first, or look at what the rewards ask for"
        yield (
            f"{equal:.0%} of {len(rows)} groups earn the same for all {G} completions and would "
            f"teach nothing; {cure}"
        )
    asked = "<answer>" in "".join(text_of(message) for row in rows for message in row.messages)
    if "format" in names and not asked and rewards[:, names.index("format")].nanmean() < 0.05:
        cure = (
            "say it in data.prompt_template, as recipes/own_data.yaml does, train sft first, or "
            "drop the reward"
        )
        yield (
            "reward format asks for <think> and <answer>, no prompt does, and no completion has "
            f"it; {cure}"
        )
    texts = [processor.decode(c.ids) for c in flat]
    unparsed = sum(find_answer(text, processor.answer) is None for text in texts) / len(texts)
    if unparsed > 0.5:
        cure = (
            "ask for the form in data.prompt_template, set data.answer (tags, whole, "
            "last_line), or train sft first"
        )
        yield (
            f"{unparsed:.0%} of the completions have no answer where data.answer "
            f"({processor.answer}) looks; {cure}"
        )
    if any(row.images for row in rows):
        grey = [
            replace(row, images=[PIL.Image.new("RGB", image.size, "grey") for image in row.images])
            for row in rows
        ]
        blind = combine(draw(sample, grey, G, names)[0], weights).nanmean()
        if total.nanmean() > 0 and blind > 0.95 * total.nanmean() and equal < 1:
            cure = (
                "the model does not look, or need not: check that the right images are with the "
                "right rows"
            )
            real = f"with the real ones {total.nanmean():.2f}"
            yield f"with grey pictures the completions earn {blind:.2f}, {real}: {cure}"
    yield from check_labels(config, rows, drawn, processor)


def check_labels(config, rows: Sequence[Row], drawn: list, processor: Processor) -> Iterator[str]:
    """Completions that fit the solutions of other rows as well as their own: shuffled labels, or
    answers at random."""
    prompts = [row.prompt(processor) for row in rows]
    for name in online_rewards(config):
        truth, means = required_columns([name]), []
        for shift in range(len(rows) if truth else 0):  # with what the row so many rows later says
            others = [
                {column: row.columns.get(column) for column in truth}
                for row in rows[shift:] + rows[:shift]
            ]
            swapped = [
                replace(row, columns=row.columns | other)
                for row, other in zip(rows, others, strict=True)
            ]
            columns = recipe_columns(swapped, prompts, drawn, processor)
            means.append(ask_by_name([name], columns).nanmean())
        others = torch.tensor(means[1:])
        if len(others) > 1 and others.std() > 0 and means[0] <= others.mean() + others.std():
            cure = (
                "were the solutions shuffled? Else the model knows nothing of the task yet: "
                "train sft first"
            )
            yield (
                f"reward {name} is {means[0]:.2f}, and {others.mean():.2f} with the solutions of "
                f"other rows; {cure}"
            )


def earned(
    names: list[str], rows: Sequence[Row], texts: Sequence[str], processor: Processor
) -> torch.Tensor:
    """What a text for each row earns, (n, K)."""
    prompts = [row.prompt(processor) for row in rows]
    ids = [[*processor.tokenizer.encode(text), processor.stop_token_ids[0]] for text in texts]
    said = [[Completion(torch.tensor(one), torch.zeros(len(one)), True)] for one in ids]
    return ask_by_name(names, recipe_columns(rows, prompts, said, processor))


def spread(rows: Sequence[Row]) -> list[Row]:
    """At most PROMPTS rows, from all over the file."""
    count = min(PROMPTS, len(rows))
    return [rows[len(rows) * i // count] for i in range(count)]


def online_rewards(config) -> list[str]:
    """The rewards that need no model of their own."""
    return [name for name in config.rewards if name != "reward_model"]
