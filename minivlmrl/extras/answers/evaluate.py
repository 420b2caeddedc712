"""Answer the rows in a data file, and write one line per row and a summary. `evaluate` also scores the answers.

minivlmrl evaluate --model RUN/checkpoint --data eval.jsonl  # one greedy answer per row
minivlmrl evaluate --model FOLDER --data eval.jsonl --recipe RECIPE --num_generations 8
minivlmrl generate --model FOLDER --data rows.jsonl --out answers.jsonl  # without rewards
torchrun --no-python --nproc-per-node 8 minivlmrl evaluate ...  # on several GPUs

The recipe sets prompt template, image size, stopping rules, data.answer_format and evaluation rewards. The
default recipe is config.yaml of the training run, else minivlmrl.yaml beside the weights, else own_data.yaml with the
prompt template {problem}. Sampling ignores top_k, top_p, min_p and repetition_penalty, as in evaluations during
training.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain
from math import comb, isnan
from pathlib import Path

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import as_overrides, changed_prompts, flat, load_config, read_yaml, trained_quantization
from minivlmrl.config.options import RunConfig
from minivlmrl.config.types import Plain
from minivlmrl.data.download import find_folder
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.distributed import process_group
from minivlmrl.errors import UserError
from minivlmrl.files import INFERENCE_CONFIG, RUN_CONFIG, file_to_write
from minivlmrl.generation.environments import make_sampler
from minivlmrl.json_files import json_text, write_json
from minivlmrl.model.peft import adapter_options, base_model, find_adapter, is_adapter_folder
from minivlmrl.rewards.registry import held_out_rewards, required_columns
from minivlmrl.rewards.text import find_answer
from minivlmrl.run.datasets import load_datasets
from minivlmrl.run.evaluate import UNFILTERED, evaluation_sampling, generate_for_rows
from minivlmrl.run.lock import drafted
from minivlmrl.run.metrics import METRICS
from minivlmrl.run.recipe_changes import check_same, file_hashes
from minivlmrl.run.setup import build_model


def build_parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"minivlmrl {name}",
        description=str(__doc__).partition("\n\n")[0],
        epilog="--section.name=value sets an option of the recipe, as in --data.max_pixels=401408",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--recipe", help="recipe; defaults to config.yaml of the model's run, or to own_data.yaml")
    add("--model", required=True, help="folder of the model, or its repository id on the Hub")
    add("--data", required=True, help="file of rows, in the form that docs/data.md describes")
    add("--out", help=f"results file; defaults to {name}_DATA.jsonl beside the model")
    add("--num_generations", type=int, default=1, help="number of answers per row; defaults to 1")
    add(
        "--temperature",
        type=float,
        help="sampling temperature; defaults to 0 for one answer per row, and to 1 for several",
    )
    add("--by", metavar="COLUMN", help="also give the mean rewards for each value of this column")
    add("--rows", type=int, default=10**9, help="number of rows to answer; defaults to all")
    return parser


def answer_file(tool: str, arguments: list[str]):
    """Answer all rows in a file; `evaluate` also scores them."""
    options, overrides = build_parser(tool).parse_known_args(arguments)
    out = results_file(tool, options)
    if options.num_generations < 1 or options.rows < 1:
        raise UserError(
            f"--num_generations is {options.num_generations} and --rows is {options.rows}, but both must be at least 1"
        )
    if options.temperature is None:
        options.temperature = 0.0 if options.num_generations == 1 else 1.0
    with_rewards = tool == "evaluate"
    config = evaluation_config(options, overrides, with_rewards)
    rewards = held_out_rewards(config) if with_rewards else []
    names = [reward.name for reward in rewards]
    world = process_group.setup(config.num_threads, config.timeout, config.uses_fsdp)
    rows = load_datasets(config, {}, (), required_columns(rewards), world)["eval"]
    check_same(flat(asdict(config)) | file_hashes(config, {"evaluate": rows}), world)
    check_column(options.by, rows)
    if world.is_main:
        print(f"recipe: {config.recipe}", flush=True)
        note_changes(options, config)
        file_to_write(out)
    lines = []
    with ExitStack() as closing:
        busy = f"another process is writing {out}; wait until it ends, or choose another --out"
        file = world.run_on_rank_zero(lambda: closing.enter_context(drafted(out, busy)))
        model, processor = build_model(config, world)
        sample = make_sampler(model, processor, evaluation_sampling(config.sampling), world)
        key = f"{config.seed}/evaluate"
        describe = partial(result_line, processor, names, options.by)
        for part in generate_for_rows(sample, rows, options.num_generations, rewards, key, describe):
            if file is not None:
                file.writelines(f"{json_text(line)}\n".encode() for line in part)
                file.flush()  # if the command stops, the partial file has the answers so far
            lines += part
    if world.is_main:
        summary = {"rows": len(rows), **summarize(lines, names), **by_value(lines, names, options.by)}
        write_summary(summary, out)
    process_group.shutdown(world)


def check_column(name: str | None, rows: Dataset):
    """Raise UserError if the option --by names an unknown column."""
    known = rows[0].columns
    if name not in (None, *known):
        raise UserError(f"--by is {name}, but the rows have no such column; their columns are {', '.join(known)}")


def results_file(tool: str, options: argparse.Namespace) -> Path:
    """Return the results file: --out, or a file beside the model such as evaluate_DATA.jsonl."""
    model_folder = Path(options.model)
    out_folder = model_folder.resolve().parent if model_folder.is_dir() else Path()
    out = Path(options.out or out_folder / f"{tool}_{Path(options.data).stem}.jsonl")
    written = (out.resolve(), Path(f"{out}.partial").resolve())
    if Path(options.data).resolve() in written:
        raise UserError(f"--data is {options.data}, where the answers would be written; choose another name with --out")
    return out


main = partial(answer_file, "evaluate")
generate_main = partial(answer_file, "generate")


def evaluation_config(options: argparse.Namespace, overrides: list[str], with_rewards: bool) -> RunConfig:
    """Load the recipe, with model, data file and other options from the command line."""
    is_adapter = is_adapter_folder(options.model)
    found_recipe = find_recipe(find_adapter(options.model) if is_adapter else options.model)
    # without a recipe, do not add a prompt template to the questions in the rows
    if not (found_recipe or options.recipe):
        overrides = ["--data.prompt_template={problem}", *overrides]
    recipe = options.recipe or found_recipe or recipes_folder() / "own_data.yaml"
    fields = {
        "model.path": base_model(options.model) if is_adapter else options.model,
        "data.train_file": options.data,
        "data.eval_file": options.data,
        "data.eval_rows": options.rows,
        "model.config": None,
        "data.task": None,
        "data.train": [],
        "stages": [],
        "sampling.temperature": options.temperature,
    }
    if not with_rewards:
        fields["data.eval_rewards"] = ["accuracy", "format"]
    for override in overrides:
        if override.removeprefix("--").partition("=")[0] in fields:
            raise UserError(f"{override} has no effect; use --model, --data, --rows or --temperature instead")
    unfiltered = as_overrides({f"sampling.{name}": value for name, value in UNFILTERED.items()})
    overridden = ["--adapter={}", *unfiltered, *overrides, *as_overrides(fields)]
    is_found = options.recipe is None
    # load training rewards, which may run code, only if the recipe has no data.eval_rewards
    config = load_config(recipe, ["--rewards={}", *overridden], is_found)
    if config.rewards:
        config.data.eval_rewards = list(config.rewards)
    elif config.data.eval_rewards is None:
        config = load_config(recipe, overridden, is_found)
    if is_adapter:
        config.adapter = adapter_options(options.model, trained_quantization(found_recipe))
    return config


def note_changes(options: argparse.Namespace, config: RunConfig):
    """Print which prompt options differ from the training run."""
    trained = find_recipe(options.model) if options.recipe else None
    changed = changed_prompts(trained, config)
    if changed:
        print(
            f"{trained}, with which the model was trained, sets other values for {', '.join(changed)}", file=sys.stderr
        )


def find_recipe(model: str | Path) -> Path | None:
    """Find the recipe that trained a model, else the model's minivlmrl.yaml, else None."""
    own = find_folder(model) / INFERENCE_CONFIG
    own_options = read_yaml(own) if own.is_file() else {}
    for folder in Path(model).absolute().parents[:3]:  # a model may be in RUN/checkpoint or RUN/best/checkpoint
        recipe = folder / RUN_CONFIG
        is_run = recipe.is_file() and (folder / METRICS).is_file()
        if is_run and contains(read_yaml(recipe), own_options):
            return recipe
    return own if own.is_file() else None


def contains(recipe: Plain, options: Plain) -> bool:
    """Return whether a recipe sets all options to the given values."""
    if not isinstance(options, dict):
        return recipe == options
    if not isinstance(recipe, dict):
        return False
    return all(contains(recipe.get(name), value) for name, value in options.items())


def result_line(
    processor: Processor, names: Sequence[str], by: str | None, row: Row, completions: list, rewards_of_row: list
) -> dict:
    """Build the results line for one row: its answers and their rewards."""
    answers = []
    for completion, values in zip(completions, rewards_of_row, strict=True):
        text = processor.decode_assistant_turn(completion)
        scored = [None if isnan(value) else value for value in values]  # NaN means no score; JSON has no NaN
        answers.append(
            {
                "text": text,
                "answer": find_answer(text, processor.answer_format),
                "tokens": len(completion.ids),
                "stopped": completion.stopped,
                "rewards": dict(zip(names, scored, strict=True)),
            }
        )
    line = {"row": row.index, "where": row.where, "solution": row.columns.get("solution"), "answers": answers}
    return line if by is None else {by: row.columns[by], **line}


def summarize(lines: list[dict], names: Sequence[str]) -> dict:
    """Compute mean rewards, the fraction of truncated answers, and pass@k.

    Means leave out rows without a score. pass@k is the probability that at least one of k answers is right,
    computed for rewards of 0 or 1 and several answers per row. The unbiased estimate, for c right answers out of n, is
    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374).
    """
    cut_flags = [not answer["stopped"] for line in lines for answer in line["answers"]]
    summary: dict[str, float | None] = {"cut": sum(cut_flags) / len(cut_flags)}
    for name in names:
        scored = []  # rewards of rows with at least one score
        for line in lines:
            values = [answer["rewards"][name] for answer in line["answers"]]
            values = [value for value in values if value is not None]
            if values:
                scored.append(values)
        means = [sum(values) / len(values) for values in scored]
        summary[name] = sum(means) / len(means) if means else None
        if {*chain(*scored)} <= {0.0, 1.0}:
            num_answers = min(map(len, scored), default=0)
            for k in [2**i for i in range(1, num_answers.bit_length())]:
                passes = []
                for values in scored:
                    num_wrong = values.count(0.0)
                    passes.append(1 - comb(num_wrong, k) / comb(len(values), k))
                summary[f"{name} pass@{k}"] = sum(passes) / len(passes)
    return summary


def by_value(lines: list[dict], names: Sequence[str], column: str | None) -> dict[str, float | int | None]:
    """Compute mean rewards per value of a column: {"kind=count rows": 20, "kind=count accuracy": 0.7, ...}."""
    groups = defaultdict(list)
    for line in lines if column else ():
        groups[f"{column}={line[column]}"].append(line)
    means = {}
    for value, group in sorted(groups.items()):
        means[f"{value} rows"] = len(group)
        for name, mean in summarize(group, names).items():
            if name != "cut":
                means[f"{value} {name}"] = mean
    return means


def summary_file(out: Path) -> Path:
    return out.with_name(f"{out.name.removesuffix('.jsonl')}.summary.json")


def write_summary(summary: dict, out: Path):
    """Write the summary to a JSON file beside the results, and print it."""
    path = summary_file(out)
    write_json(path, summary)
    for name, value in summary.items():
        print(f"{name:<27} {f'{value:.3f}' if isinstance(value, float) else value}")
    print(f"wrote {out} and {path}")
