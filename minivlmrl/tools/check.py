"""Before any training: what will go wrong with a recipe, your rows and your rewards.

python -m minivlmrl check RECIPE [--section.name=value ...]

It draws completions for 16 prompts, asks the rewards about them and about texts that are no answer,
and prints what will not work, and what to do: then the exit status is 1. Nothing is written.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from minivlmrl.advantages import combine, group_std, nanstd
from minivlmrl.algorithms.table import find_algorithms
from minivlmrl.data.boxes import Box, parse_boxes, says_none
from minivlmrl.data.fetch import open_image
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.turns import as_turns, encode_completion, text_of
from minivlmrl.environments.tool_sampler import build_sampler
from minivlmrl.image import load_image
from minivlmrl.reward_functions.names import Reward, columns_of, recipe_columns
from minivlmrl.rewards import ask_rewards, find_answer
from minivlmrl.rows import Completion, Dataset, Processor, Row
from minivlmrl.run.alarms import FORM, LONGER
from minivlmrl.run.config import load_config
from minivlmrl.run.evaluate import BLIND, draw
from minivlmrl.run.memory import check_memory
from minivlmrl.run.start import mistakes, prepare
from minivlmrl.sampling.sample import RunSampler
from minivlmrl.scale import ranks

PROMPTS = 16  # rows that are asked about
ORIENTATION = 0x0112  # of a photograph, in its EXIF
UNIT = re.compile(r"^(-?[\d.,]+) ?(?!(?:st|nd|rd|th)$)[a-zA-Zµ°%]+$")  # of a number: 3 cm, not 3rd
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


def main(arguments: list[str]) -> int:
    """Print what will go wrong; returns 1 if something will."""
    if not arguments or "--help" in arguments:
        print(__doc__)
        return 0
    found = dict.fromkeys(check(load_config(arguments[0], arguments[1:])))
    print("\n".join(f"- {sentence}" for sentence in found) or "nothing found that will go wrong")
    return int(bool(found))


def check(config) -> Iterator[str]:
    """Sentences about a recipe, each with the cause and what to do."""
    stages = find_algorithms(config)
    world = ranks.setup(config.num_threads, config.timeout, config.uses_fsdp)
    check_memory(config, world)
    model, processor, datasets = prepare(config, stages, world)
    online = [stage for stage, algorithm in stages.items() if not algorithm.answers]
    yield from mistakes(config, datasets)
    yield from check_settings(config, model, datasets, online)
    for stage, algorithm in stages.items():
        yield from check_files(datasets[stage], algorithm.answers)
        yield from check_rows(spread(datasets[stage]), processor)
        yield from check_answers(config, algorithm.answers, spread(datasets[stage]), processor)
    rows_of = {algorithm.needs: datasets[stage] for stage, algorithm in reversed(stages.items())}
    if online and "demonstrations" in rows_of:
        yield from check_demonstrations(config, rows_of["demonstrations"], processor)
    asked = rows_of.get("prompts")
    if asked is not None:
        some = spread(datasets.get("eval", ())), spread(asked)
        held_out, known = ({str(row.columns.get("solution")) for row in one} for one in some)
        if len(some[0]) > 1 and len(held_out) == 1 < len(known):
            cure = "mix the rows of data.eval_file, of which data.eval_rows takes the first"
            yield f"all evaluation rows have the solution {held_out.pop()!r:.80}: {cure}"
        rows = [replace(row, key=f"check/{i}") for i, row in enumerate(spread(asked))]
        yield from check_rewards(config, rows, processor)
        if config.model.path and config.stages[0] in online:  # else the model is another by then
            gather, G = config.rollout.gather_weights, getattr(config, online[0]).num_generations
            sample = build_sampler(model, processor, config.sampling, world, gather)
            yield from check_rollouts(config, sample, rows, G)
        else:
            print(f"no completions were drawn of a model without its form; after that {AGAIN}")
    ranks.shutdown()


def check_settings(config, model, datasets: dict, online: list[str]) -> Iterator[str]:
    """Name numbers that no run learns with."""
    small = sum(parameter.numel() for parameter in model.parameters()) < 10**8
    usual = 1e-2 if small or not config.model.path else 1e-3 if config.adapter.r else 1e-4
    heat, k, p = config.sampling.temperature, config.sampling.top_k, config.sampling.top_p
    if online and not 0.2 <= heat <= 2:
        yield f"sampling.temperature is {heat:g}: completions are all alike, or noise; take 1.0"
    if online and (k == 1 or p < 0.1):
        yield f"sampling.top_k is {k}, top_p {p:g}: completions are all alike; take 0 and 1.0"
    for stage in config.stages:
        o = getattr(config, stage)
        count = len(datasets[stage])
        rate, steps, warmup = o.learning_rate, o.max_steps, o.warmup_steps
        if rate > usual:
            cause = f"over {usual:g} such weights are lost in a few steps"
            yield f"{stage}.learning_rate is {rate:g}: {cause}; lower it"
        if 0 < steps <= warmup:
            yield f"{stage}.warmup_steps is {warmup}: all {steps} steps are warmup; lower it"
        if getattr(o, "beta", 0) > 1:
            yield f"{stage}.beta is {o.beta:g}: the policy will not move; take 0.1"
        if o.prompts_per_step >= 4 * count:
            yield f"a step repeats its {count} rows several times: lower {stage}.prompts_per_step"


def check_files(rows: Dataset, names: Sequence[str]) -> Iterator[str]:
    """Copies, whatever their files are called, and boxes of photographs that EXIF turns."""
    for part in getattr(rows, "parts", [rows]):  # a weight has the rows of a file several times
        if not isinstance(part, FileDataset):
            continue
        often = Counter(part.asked)
        alike = [i for i, asked in enumerate(part.asked) if often[asked] > 1]
        different = len(part) - len(alike) + len({part.content(i, names) for i in alike})
        if different <= len(part) / 2 and len(part) > 3:
            yield f"{different} of {len(part)} rows differ in picture or question: drop copies"
        turned = []  # are boxes inside of the picture as the file has it, and as it is shown?
        for row, media in map(part.read, spread(range(len(part)))):
            boxes = parse_boxes(str(row.columns.get("solution") or ""))
            for one in media if boxes else ():
                with open_image(one.source, part.folder) as image:
                    sizes = image.size, load_image(image).size
                    if image.getexif().get(ORIENTATION, 1) != 1:
                        fits = (all(Box(*x, size).inside() for x in boxes) for size in sizes)
                        turned.append(list(fits))
        if turned and [False, True] not in turned:
            cause = "boxes are read as of what is shown, and none fits that alone"
            yield f"{len(turned)} images are turned by their EXIF, {cause}; save them upright"


def check_rows(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Rows that are alike, pictures that show nothing, questions that hold their answer."""
    texts = [text_of(row.messages[-1]).strip().lower() for row in rows]
    solutions = [str(row.columns.get("solution") or "") for row in rows]
    said = [(find_answer(text) or text).strip().lower() for text in solutions]
    pictures = [image for row in rows for image in row.images]
    several = len(rows) > 3
    shown = [tuple(image.tobytes() for image in row.images) for row in rows]
    prompts = [row.prompt(processor) for row in rows]
    grids = [grid for prompt in prompts for grid in prompt.image_grid_thw.tolist()]
    told = sum(answer != "" and answer in text for answer, text in zip(said, texts, strict=True))
    others = [answer in texts[0] for answer in said if answer != said[0]]
    if several and all(shown) and len(set(shown)) == 1:
        yield "all rows show one picture: look at what the column image or images names"
    if not grids:
        yield "no row has an image or video: name the column image or images"
    if (longest := max(len(prompt.input_ids) for prompt in prompts)) > 8192:
        yield f"a prompt has {longest} tokens: lower data.max_pixels or cut the text"
    if several and told > 0.8 * len(rows) and 0 < len(others) > 3 * sum(others):
        yield f"{told} of {len(rows)} questions hold their solution: take it out of the prompt"
    plain = sum(image.getcolors(1) is not None for image in pictures)
    if 5 * plain > len(pictures):
        cure = "look at the files, they may be damaged, or masks"
        yield f"{plain} of {len(pictures)} images have one colour: {cure}"
    tokens = max(map(processor.image_processor.num_tokens, grids), default=0)
    if tokens == 1 and max(max(image.size) for image in pictures) > 28:
        yield "each image is one token, which shows next to nothing: raise data.max_pixels"
    yield from check_boxes(rows, solutions)


def check_boxes(rows: Sequence[Row], solutions: Sequence[str]) -> Iterator[str]:
    """Solutions with boxes in other units, or of a corner and a size."""
    boxes = []
    for row, text in zip(rows, solutions, strict=True):
        corners = parse_boxes(find_answer(text) or text) if row.images else []
        boxes += (found := [Box(*four, row.images[0].size) for four in corners])
        if not all(box.valid and box.inside() and max(box.x2, box.y2) > 1 for box in found):
            yield f"{row.where}: {text:.80} is outside; write x1, y1, x2, y2 in pixels of the file"
            return
    middles = [(box.x1 + box.x2, box.y1 + box.y2, *box.extent) for box in boxes]
    if len({*boxes}) > 7 and all(x < width and y < height for x, y, width, height in middles):
        what = "all boxes are in the upper left quarter"
        cure = "as x, y, width, height would be; write x1, y1, x2, y2 in pixels of the file"
        yield f"{what}, {cure}"


def check_answers(config, names, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Answers to learn from that are alike, do not end, or are longer than what is drawn later."""
    stops = config.sampling.stop_token_ids or processor.stop_token_ids
    most = config.sampling.max_new_tokens
    for name in names:
        ids = [encode_completion(processor, row.messages, getattr(row, name)).ids for row in rows]
        if last := {int(one[-1]) for one in ids} - set(stops):
            yield f"a {name} ends with {min(last)}: name it in sampling.stop_token_ids, or none"
        if {"grpo", "ppo"} & set(config.stages) and (longest := max(map(len, ids))) > most:
            yield f"a {name} has {longest} tokens, sampling.max_new_tokens is {most}: raise it"
    labels = {row.columns.get("label") for row in rows}
    if names == ("completion",) and len(labels) == 1 and None not in labels:
        yield f"every label is {labels.pop()}: kto needs good and bad answers; or take sft"


def check_demonstrations(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Demonstrations must earn the rewards that a later stage gives."""
    some = spread(rows)
    texts = [text_of(as_turns(row.completion)[-1]) for row in some]
    for reward in online_rewards(config):
        if not reward.columns <= some[0].columns.keys():
            continue
        name = reward.name
        mean = earned([reward], some, texts, processor).nanmean().item()
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
    names = ("iou", "acc_0_5", "giou", "box_format")
    judges = [reward.name for reward in online_rewards(config) if reward.name in names]
    answers = [find_answer(text, processor.answer) for text in texts]
    unread = [said for said in answers if said and not (parse_boxes(said) or says_none(said))]
    if judges and len(unread) > 0.2 * len(texts):
        cure = 'ask for {"bbox_2d": [x1, y1, x2, y2]}, or write a reward that reads them'
        what = f"such as {unread[0]!r:.80}, hold nothing that {judges[0]} reads"
        yield f"{len(unread)} of {len(texts)} answers, {what}; {cure}"


def check_rewards(config, rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """What the rewards give for texts that need no picture."""
    rewards = online_rewards(config)
    weights = torch.tensor([config.rewards[reward.name] for reward in rewards])
    if not rewards or not (weights > 0).any():
        return
    solutions = [str(row.columns.get("solution")) for row in rows]
    form = {"tags": ROLLOUT, "whole": "{1}"}.get(processor.answer, "{}\n{}")
    rollouts = [form.format("hm", find_answer(solution) or solution) for solution in solutions]
    right = earned(rewards, rows, rollouts, processor)
    [(constant, count)] = Counter(rollouts).most_common(1)
    if any(row.columns.get("solution") is not None for row in rows):
        always = earned(rewards, rows, [constant] * len(rows), processor)
        share = combine(always, weights).nanmean() / weights.clamp(min=0).sum()
        if count > 1 and share > 0.8:
            cure = "the rows hardly need their pictures; balance them"
            yield f"always writing {constant!r:.80} earns {share:.2f} of all: {cure}"
    numbers = [UNIT.sub(r"\1", solution) for solution in solutions]
    asked = [text_of(row.messages[-1]) for row in rows]
    units = [text.removeprefix(x).strip() for text, x in zip(solutions, numbers, strict=True)]
    if 2 * sum(unit not in text for unit, text in zip(units, asked, strict=True)) > len(rows):
        alone = earned(rewards, rows, [form.format("hm", x) for x in numbers], processor)
        for k in (alone.nanmean(0) < 0.5 * right.nanmean(0)).nonzero()[:, 0].tolist():
            what = f"takes {solutions[0]!r:.40} and not {numbers[0]!r:.40}"
            cure = "name the unit in the question, or take recipes/answers.py:number"
            yield f"reward {rewards[k].name} {what}: {cure}"
    given = {}  # name of a text: what it earns, (n, K)
    for name, text in HACKS.items():
        texts = [text.replace("{question}", question) for question in asked]
        given[name] = earned(rewards, rows, texts, processor)
    differ = nanstd(torch.cat([right, *given.values()]).double().T) * weights.abs()
    most = differ.max().item()
    others = (differ.nansum() - differ.max()).item()
    if 0 < 100 * others < most:
        what = f"reward {rewards[int(differ.argmax())].name} differs by {most:.2g} between texts"
        yield f"{what}, the others by {others:.2g}: they count for nothing; lower its weight"
    least = combine(given["nothing"], weights).nanmean()
    if columns_of(rewards) and combine(right, weights).nanmean() <= least:
        yield "a right answer earns no more than nothing: see rewards' weights and what they read"
    for k, reward in enumerate(rewards):
        means = {name: values[:, k].nanmean().item() for name, values in given.items()}
        if reward.columns:  # it knows the truth
            for name in (name for name, mean in means.items() if mean > 0.3 and weights[k] > 0):
                what = f"{name} ({HACKS[name]!r:.40})"
                cure = "a policy finds this; make the reward ask for the answer itself"
                yield f"reward {reward.name} gives {means[name]:.2f} to {what}: {cure}"
        elif {*means.values(), right[:, k].nanmean().item()} == {means["nothing"]} != {0.0}:
            what = f"{means['nothing']:.3g} of every text that was tried, even of nothing"
            yield f"reward {reward.name} says {what}: look at what it reads"


def check_rollouts(config, sample: RunSampler, rows: Sequence[Row], G: int) -> Iterator[str]:
    """Completions of the model as it is: cut, alike, without an answer, good without a picture."""
    processor = sample.processor
    rewards = online_rewards(config)
    names = [reward.name for reward in rewards]
    weights = torch.tensor([config.rewards[name] for name in names])
    values, drawn = draw(sample, rows, G, rewards)
    total = combine(values, weights)
    flat = [c for group in drawn for c in group]
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
    if "format" in names and not asked and values[:, names.index("format")].nanmean() < 0.05:
        yield f"reward format asks for tags, no prompt does, and no completion has them; {FORM}"
    texts = [processor.turn(c) for c in flat]
    unparsed = sum(find_answer(text, processor.answer) is None for text in texts) / len(texts)
    if unparsed > 0.5:
        what = f"{unparsed:.0%} of the completions have no answer"
        cure = f"set data.answer (tags, whole, last_line), or {FORM}"
        yield f"{what} where data.answer ({processor.answer}) looks; {cure}"
    yield from unread_boxes(config, texts, processor)
    if any(row.images for row in rows):
        grey = [replace(row, images=BLIND["grey"](row, rows)) for row in rows]
        real = total.nanmean()
        blind = combine(draw(sample, grey, G, rewards)[0], weights).nanmean()
        if real > 0 and blind > 0.95 * real and equal < 1:
            what = f"with grey pictures the completions earn {blind:.2f}, else {real:.2f}"
            yield f"{what}: check that the right images are with the right rows"
    yield from check_labels(config, rows, drawn, processor)


def check_labels(config, rows: Sequence[Row], drawn: list, processor: Processor) -> Iterator[str]:
    """Completions that fit the solutions of other rows as well as their own."""
    prompts = [row.prompt(processor) for row in rows]
    for reward in online_rewards(config):
        truth = reward.columns
        means = []
        for shift in range(len(rows) if truth else 0):  # with what the row so many rows later says
            swapped = []
            for row, other in zip(rows, rows[shift:] + rows[:shift], strict=True):
                columns = {column: other.columns.get(column) for column in truth}
                swapped.append(replace(row, columns=row.columns | columns))
            columns = recipe_columns(swapped, prompts, drawn, processor)
            means.append(ask_rewards([reward], columns).nanmean())
        others = torch.tensor(means[1:])
        if len(others) > 1 and others.std() > 0 and means[0] <= others.mean() + others.std():
            what = f"{means[0]:.2f}, and {others.mean():.2f} with the solutions of other rows"
            cure = "were the solutions shuffled? Else train sft first"
            yield f"reward {reward.name} is {what}; {cure}"


def earned(rewards: list[Reward], rows: Sequence[Row], texts, processor: Processor) -> torch.Tensor:
    """What a text for each row earns, (n, K)."""
    prompts = [row.prompt(processor) for row in rows]
    ids = [[*processor.tokenizer.encode(text), processor.stop_token_ids[0]] for text in texts]
    said = [[Completion(torch.tensor(one), torch.zeros(len(one)), True)] for one in ids]
    return ask_rewards(rewards, recipe_columns(rows, prompts, said, processor))


def spread(rows: Sequence) -> list:
    """Draw at most PROMPTS rows: with a fixed step all could be of one kind, as every second is."""
    numbers = random.Random(0).sample(range(len(rows)), min(PROMPTS, len(rows)))
    return [rows[number] for number in sorted(numbers)]


def online_rewards(config) -> list[Reward]:
    """The rewards that need no model of their own."""
    return [reward for reward in config.training_rewards if reward.name != "reward_model"]
