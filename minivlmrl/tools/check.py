"""Before any training: what will go wrong with a recipe, your rows and your rewards.

python -m minivlmrl check RECIPE [--section.name=value ...]

It draws completions for 16 prompts, asks the rewards about them, about answers that need no picture
and about texts that are no answers, and prints a sentence for each thing that will not work, with
what to do. Nothing is written. The exit status is 1 if something was found.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature

import PIL.Image
import torch

from minivlmrl.advantages import combine, group_std
from minivlmrl.algorithms.table import find_algorithm
from minivlmrl.data.boxes import parse_boxes, says_none
from minivlmrl.data.turns import as_turns, text_of
from minivlmrl.generate import Completion
from minivlmrl.reward_functions.calls import ask_by_name, recipe_columns
from minivlmrl.reward_functions.names import get_reward, required_columns
from minivlmrl.rewards import find_answer
from minivlmrl.rows import Processor, Row
from minivlmrl.run.alarms import FORM, LONGER
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
AGAIN = "--stages=[grpo] --model.config=null --model.path=RUN/checkpoint"


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
            gather, G = config.rollout.gather_weights, getattr(config, online[0]).num_generations
            sample = RunSampler(model, processor, config.sampling, world, gather)
            yield from check_rollouts(config, sample, rows, G)
        else:
            print(f"no completions were drawn of a model without its form; after that {AGAIN}")
    ranks.shutdown()


def check_settings(config, model) -> Iterator[str]:
    """Numbers that no run learns with."""
    small = sum(parameter.numel() for parameter in model.parameters()) < 10**8
    usual = 1e-2 if small or not config.model.path else 1e-3 if config.adapter.r else 1e-4
    for stage in config.stages:
        rate = getattr(config, stage).learning_rate
        if rate > usual:
            cause = f"over {usual:g} such weights are lost in a few steps"
            yield f"{stage}.learning_rate is {rate:g}: {cause}; lower it"


def check_demonstrations(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Demonstrations must earn the rewards that a later stage gives."""
    some = spread(rows)
    texts = [text_of(as_turns(row.completion)[-1]) for row in some]
    for name in online_rewards(config):
        if not set(required_columns([name])) <= set(some[0].columns):
            continue
        mean = earned([name], some, texts, processor)[:, 0].nanmean().item()
        if mean < 0.2:
            cure = "are the labels shuffled, or does the reward ask for another form?"
            tagged = any("<answer>" in text for text in texts)
            if name != "format" and processor.answer == "tags" and not tagged:
                cure = "set data.answer: whole, or write <answer>...</answer>"
            cause = "sft would teach what is not rewarded"
            yield f"demonstrations earn {mean:.2f} of reward {name}: {cause}; {cure}"
    yield from unread_boxes(config, texts, processor)


def unread_boxes(config, texts: Sequence[str], processor: Processor) -> Iterator[str]:
    """Answers with boxes in a notation that no reward knows."""
    functions = {name: signature(get_reward(name)) for name in online_rewards(config)}
    judges = [name for name in functions if "answer_extents" in functions[name].parameters]
    answers = [find_answer(text, processor.answer) for text in texts]
    unread = [said for said in answers if said and not (parse_boxes(said) or says_none(said))]
    if judges and len(unread) > 0.2 * len(texts):
        cure = 'ask for {"bbox_2d": [x1, y1, x2, y2]}, or write a reward that reads them'
        what = f"such as {unread[0]!r:.80}, hold no box that {judges[0]} reads"
        yield f"{len(unread)} of {len(texts)} answers, {what}; {cure}"


def check_prompts(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Prompts that are too long, or have no image."""
    longest = max(len(row.prompt(processor).input_ids) for row in rows)
    if longest > 8192:
        cure = "lower data.max_pixels or cut the text"
        yield f"a prompt has {longest} tokens; attention grows with its square: {cure}"
    if not any(row.images or row.videos for row in rows):
        yield "no row has an image or video: name the column image or images"


def check_rewards(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """What the rewards give for texts that need no picture."""
    names = online_rewards(config)
    weights = torch.tensor([config.rewards[name] for name in names])
    if not names or not (weights > 0).any():
        return
    best = weights.clamp(min=0).sum()
    solutions = [str(row.columns.get("solution")) for row in rows]
    rollouts = [ROLLOUT.format("hm", find_answer(solution) or solution) for solution in solutions]
    right = earned(names, rows, rollouts, processor)
    [(constant, count)] = Counter(rollouts).most_common(1)
    if any(row.columns.get("solution") is not None for row in rows):
        always = earned(names, rows, [constant] * len(rows), processor)
        share = combine(always, weights).nanmean() / best
        if count > 1 and share > 0.8:
            cure = "the rows hardly need their pictures; balance them"
            yield f"always writing {constant!r:.80} earns {share:.2f} of all: {cure}"
    given = {}  # name of a text: what it earns, (n, K)
    for name, text in HACKS.items():
        texts = [text.replace("{question}", text_of(row.messages[-1])) for row in rows]
        given[name] = earned(names, rows, texts, processor)
    for k, reward in enumerate(names):
        means = {name: values[:, k].nanmean().item() for name, values in given.items()}
        if required_columns([reward]):  # it knows the truth
            for name in (name for name, mean in means.items() if mean > 0.3 and weights[k] > 0):
                what = f"{name} ({HACKS[name]!r:.40})"
                cure = "a policy finds this; make the reward ask for the answer itself"
                yield f"reward {reward} gives {means[name]:.2f} to {what}: {cure}"
        elif {*means.values(), right[:, k].nanmean().item()} == {means["nothing"]} != {0.0}:
            what = f"{means['nothing']:.3g} of every text that was tried, even of nothing"
            yield f"reward {reward} says {what}: look at what it reads"


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
        yield f"{cut:.0%} of {len(flat)} completions are cut at {limit}; {LONGER}"
    equal = (group_std(total.double(), G) < 1e-8).double().mean().item() if G > 1 else 0.0
    if equal > 0.9:
        cure = "take easier or harder prompts, train sft first, or look at what the rewards ask for"
        what = f"{equal:.0%} of {len(rows)} groups earn the same for all {G} completions"
        yield f"{what} and would teach nothing; {cure}"
    asked = "<answer>" in "".join(text_of(message) for row in rows for message in row.messages)
    if "format" in names and not asked and rewards[:, names.index("format")].nanmean() < 0.05:
        yield f"reward format asks for tags, no prompt does, and no completion has them; {FORM}"
    texts = [processor.decode(c.ids) for c in flat]
    unparsed = sum(find_answer(text, processor.answer) is None for text in texts) / len(texts)
    if unparsed > 0.5:
        what = f"{unparsed:.0%} of the completions have no answer"
        cure = f"set data.answer (tags, whole, last_line), or {FORM}"
        yield f"{what} where data.answer ({processor.answer}) looks; {cure}"
    yield from unread_boxes(config, texts, processor)
    if any(row.images for row in rows):
        grey = [
            replace(row, images=[PIL.Image.new("RGB", image.size, "grey") for image in row.images])
            for row in rows
        ]
        real, blind = total.nanmean(), combine(draw(sample, grey, G, names)[0], weights).nanmean()
        if real > 0 and blind > 0.95 * real and equal < 1:
            what = f"with grey pictures the completions earn {blind:.2f}, else {real:.2f}"
            yield f"{what}: check that the right images are with the right rows"
    yield from check_labels(config, rows, drawn, processor)


def check_labels(config, rows: Sequence[Row], drawn: list, processor: Processor) -> Iterator[str]:
    """Completions that fit the solutions of other rows as well as their own: shuffled labels, or
    answers at random."""
    prompts = [row.prompt(processor) for row in rows]
    for name in online_rewards(config):
        truth, means = required_columns([name]), []
        for shift in range(len(rows) if truth else 0):  # with what the row so many rows later says
            swapped = []
            for row, other in zip(rows, rows[shift:] + rows[:shift], strict=True):
                columns = {column: other.columns.get(column) for column in truth}
                swapped.append(replace(row, columns=row.columns | columns))
            columns = recipe_columns(swapped, prompts, drawn, processor)
            means.append(ask_by_name([name], columns).nanmean())
        others = torch.tensor(means[1:])
        if len(others) > 1 and others.std() > 0 and means[0] <= others.mean() + others.std():
            what = f"{means[0]:.2f}, and {others.mean():.2f} with the solutions of other rows"
            cure = "were the solutions shuffled? Else train sft first"
            yield f"reward {name} is {what}; {cure}"


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
