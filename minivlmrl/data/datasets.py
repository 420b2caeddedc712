"""Which rows each stage and the evaluation get."""

from minivlmrl.config import DataSection
from minivlmrl.data import shapes
from minivlmrl.data.sources import Dataset, JsonLines

FRESH_ROWS = 1_000_000  # an embedded task draws rows on demand: a run does not meet one twice


def load_datasets(
    config: DataSection, stages: list[str], seed: int, reward_columns: list[str] = ()
) -> dict[str, Dataset]:
    """Open the rows of a run.

    Args:
        stages: "sft", "dpo", "reward_model", "grpo", "ppo", each of which gets its rows.
        reward_columns: what the rewards of grpo and ppo ask of every row.
        seed: of an embedded task's training rows; its evaluation rows are the same for every seed.
    Returns:
        a dataset for each stage, and "eval" if there are held-out rows.
    Raises:
        ValueError: neither or both of task and train_file are set, the task is unknown, or a file is not readable.
    """
    if (config.task is None) == (config.train_file is None):
        raise ValueError("data: set either data.task (embedded) or data.train_file (your JSON lines), not both")
    if config.task is None:
        return _files(config, stages, reward_columns)
    if config.task != "shapes":
        raise ValueError(f"data.task is {config.task!r}; the embedded task is 'shapes'")
    wording = {"prompt_template": config.prompt_template, "system_prompt": config.system_prompt}
    rows = {
        "sft": shapes.Shapes(config.demonstrations, f"{seed}/sft", config.wrong_demonstrations, **wording),
        "dpo": shapes.Shapes(config.pairs, f"{seed}/pairs", **wording),
        "reward_model": shapes.Shapes(config.pairs, f"{seed}/pairs", **wording),
        "grpo": shapes.Shapes(FRESH_ROWS, f"{seed}/grpo", **wording),
        "ppo": shapes.Shapes(FRESH_ROWS, f"{seed}/grpo", **wording),
        "eval": shapes.Shapes(config.eval_rows, "eval", **wording),
    }
    return {name: rows[name] for name in (*stages, "eval")}


def _files(config: DataSection, stages: list[str], reward_columns: list[str]) -> dict[str, Dataset]:
    pair = ["chosen", "rejected"]
    needed = {"sft": ["completion"], "dpo": pair, "reward_model": pair, "grpo": reward_columns, "ppo": reward_columns}
    # held-out rows are asked for answers, unless all there is to learn are pairs
    needed["eval"] = pair if stages and set(stages) <= {"dpo", "reward_model"} else ["solution"]
    paths = {stage: config.train_file for stage in stages}
    if config.eval_file:
        paths["eval"] = config.eval_file
    limits = {"eval": config.eval_rows}
    return {
        name: JsonLines(
            path, ("problem", *needed[name]), config.prompt_template, config.system_prompt, limits.get(name)
        )
        for name, path in paths.items()
    }


def chance(config: DataSection) -> float | None:
    """Accuracy of blind guessing, where it is known."""
    return shapes.CHANCE if config.task == "shapes" else None
