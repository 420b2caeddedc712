"""Which rows each stage and the evaluation get."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from minivlmrl.rows import Dataset, JsonLines
from minivlmrl.run.config import DataSection
from minivlmrl.tasks import localisation, shapes

# what an algorithm may ask of its rows, besides a prompt, and the columns of a file that hold it
NEEDS = {"demonstrations": ("completion",), "pairs": ("chosen", "rejected"), "prompts": ()}
FRESH_ROWS = 1_000_000  # an embedded task draws rows on demand: a run does not meet one twice


def load_datasets(
    config: DataSection,
    stages: dict[str, str],
    seed: int,
    reward_columns: Sequence[str] = (),
    eval_columns: Sequence[str] = ("solution",),
) -> dict[str, Dataset]:
    """Open the rows of a run.

    Args:
        stages: for each stage what its rows must have, one of NEEDS.
        reward_columns: what the rewards ask of every row that is answered in training ...
        eval_columns: ... and those of data.eval_rewards of held-out ones.
        seed: of an embedded task's training rows; its evaluation rows are the same for every seed.
    Returns:
        a dataset for each stage, and "eval" if there are held-out rows.
    Raises:
        ValueError: neither or both of task and train_file are set, the task is unknown, or a file is not readable.
    """
    if (config.task is None) == (config.train_file is None):
        raise ValueError("data: set either data.task (embedded) or data.train_file (your JSON lines), not both")
    if config.task is None:
        return _files(config, stages, reward_columns, eval_columns)
    if config.task not in TASKS:
        raise ValueError(f"data.task is {config.task!r}; embedded tasks are {', '.join(TASKS)}")
    training, held_out = TASKS[config.task](config, seed)
    for stage, needs in stages.items():
        if needs not in training:
            raise ValueError(f"stages: {stage} needs {needs}, which data.task {config.task} does not have")
    return {**{stage: training[needs] for stage, needs in stages.items()}, "eval": held_out}


def _shapes(config: DataSection, seed: int) -> tuple[dict[str, Dataset], Dataset]:
    wording = {"prompt_template": config.prompt_template, "system_prompt": config.system_prompt}
    training = {
        "demonstrations": shapes.Shapes(config.demonstrations, f"{seed}/sft", config.wrong_demonstrations, **wording),
        "pairs": shapes.Shapes(config.pairs, f"{seed}/pairs", **wording),
        "prompts": shapes.Shapes(FRESH_ROWS, f"{seed}/grpo", **wording),
    }
    return training, shapes.Shapes(config.eval_rows, "eval", **wording)


def _localisation(config: DataSection, seed: int) -> tuple[dict[str, Dataset], Dataset]:
    same = {
        "objects": tuple(config.objects), "thinking": config.thinking, "prompt_template": config.prompt_template,
        "system_prompt": config.system_prompt,
    }  # fmt: skip
    noise = {"jitter": config.jitter, "wrong_boxes": config.wrong_demonstrations}
    training = {
        "demonstrations": localisation.Localisation(config.demonstrations, f"{seed}/sft", **noise, **same),
        "prompts": localisation.Localisation(FRESH_ROWS, f"{seed}/grpo", **same),
    }
    return training, localisation.Localisation(config.eval_rows, "test", **same)


TASKS = {"shapes": _shapes, "localisation": _localisation}
CHANCE_NAMES = {"shapes": "chance", "localisation": "constant box"}
TOKENIZERS = {"shapes": shapes.tokenizer, "localisation": localisation.tokenizer}


def _files(
    config: DataSection, stages: dict[str, str], reward_columns: Sequence[str], eval_columns: Sequence[str]
) -> dict[str, Dataset]:
    columns = {needs: NEEDS[needs] for needs in NEEDS} | {"prompts": tuple(reward_columns)}
    datasets = {stage: _rows(config, config.train_file, columns[needs]) for stage, needs in stages.items()}
    if config.eval_file:
        # held-out rows are asked for answers, unless all there is to learn are pairs
        only_pairs = stages and set(stages.values()) == {"pairs"}
        needed = NEEDS["pairs"] if only_pairs else eval_columns
        datasets["eval"] = _rows(config, config.eval_file, needed, config.eval_rows)
    return datasets


def _rows(config: DataSection, path: str, columns: Sequence[str], limit: int | None = None) -> JsonLines:
    return JsonLines(
        path, ("problem", *columns), limit,
        prompt_template=config.prompt_template, system_prompt=config.system_prompt,
        constants={"box_space": config.box_space},
        video_options={name: value for name, value in asdict(config.video).items() if value is not None},
        allow_urls=config.allow_urls,
    )  # fmt: skip


def chance(config: DataSection, held_out: Dataset | None) -> float | None:
    """What blind guessing earns, where it is known: a random label's accuracy, or the best constant box's mean IoU."""
    if config.task == "shapes":
        return shapes.CHANCE
    return localisation.constant_box(held_out)[1] if config.task == "localisation" else None


def shuffled(size: int, per_step: int, seed: int, skip: int = 0) -> Iterator[list[int]]:
    """Endless lists of per_step row numbers: every pass visits all rows once, in a new order.

    Args:
        skip: leave out so many numbers at the beginning.
    """
    if size == 0:
        raise ValueError("there are no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < per_step:
            waiting += torch.randperm(size, generator=generator).tolist()
            dropped = min(skip, len(waiting))
            waiting, skip = waiting[dropped:], skip - dropped
        yield waiting[:per_step]
        waiting = waiting[per_step:]
