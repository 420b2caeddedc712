"""Answer the rows of a file, score the answers, and write a line for each, and a summary.

python -m minivlmrl evaluate --model RUN/checkpoint --data eval.jsonl      # greedy, one answer a row
python -m minivlmrl evaluate --model FOLDER --data eval.jsonl --recipe RECIPE --num_generations 8
python -m minivlmrl generate --model FOLDER --data rows.jsonl --out answers.jsonl  # without rewards
torchrun --nproc-per-node 8 -m minivlmrl evaluate ...                  # on many GPUs

The recipe (default: config.yaml of the run that the model is of, else minivlmrl.yaml beside its
weights, else recipes/own_data.yaml with a plain {problem}) gives the prompt template, the size of
images, where completions end, data.answer and data.eval_rewards; --section.name=value changes any.
Its adapter is not used: checkpoint/ of a run has it in its weights.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from minivlmrl.environments.tool_sampler import build_sampler
from minivlmrl.hub.folder import ASKED, find_folder, json_text, write_json
from minivlmrl.reward_functions.names import columns_of
from minivlmrl.rewards import find_answer, normalize
from minivlmrl.rows import Row
from minivlmrl.run.batches import load_datasets
from minivlmrl.run.config import check_found, load_config, recipes_folder
from minivlmrl.run.evaluate import answer_rows
from minivlmrl.run.model import build_model
from minivlmrl.scale import ranks

RIGHT = 0.5  # an answer is right if its first reward is at least this: accuracy 1, or an IoU of 0.5


def parser(name: str) -> argparse.ArgumentParser:
    """The command line; what it does not know are fields of the recipe."""
    epilog = "--section.name=value changes the recipe: --data.max_pixels=401408"
    about = {"description": __doc__.partition("\n\n")[0], "epilog": epilog}
    p = argparse.ArgumentParser(f"python -m minivlmrl {name}", **about, allow_abbrev=False)
    p.add_argument("--recipe", help="default: config.yaml of the model's run, else own_data.yaml")
    p.add_argument("--model", required=True, help="a folder, or an id on the hub")
    p.add_argument("--data", required=True, help="a file of rows, in any form of docs/data.md")
    p.add_argument("--out", help=f"the results file; default: {name}.jsonl beside the model")
    p.add_argument("--num_generations", type=int, default=1, help="answers to each row")
    p.add_argument("--temperature", type=float, help="default: 0, with several answers 1")
    p.add_argument("--rows", type=int, default=10**9, help="take so many; default: all")
    return p


def run(tool: str, arguments: list[str]):
    """Write the results file and its summary, and print the summary; generate judges nothing."""
    options, overrides = parser(tool).parse_known_args(arguments)
    if options.num_generations < 1 or options.rows < 1:
        raise ValueError("--num_generations and --rows must be 1 or more")
    judges = tool == "evaluate"
    fixed = {"model.path": options.model, "data.train_file": options.data}
    fixed |= {"data.eval_file": options.data, "data.eval_rows": options.rows}
    # nothing is trained
    fixed |= {"model.config": None, "data.task": None, "data.train": []}
    fixed |= {"reference": {}} | ({} if judges else {"data.eval_rewards": ["accuracy", "format"]})
    # of RUN/best/checkpoint
    near = [folder / "config.yaml" for folder in Path(options.model).absolute().parents[:3]]
    near = list(filter(Path.is_file, [*near, find_folder(options.model) / ASKED]))
    if not (near or options.recipe):  # what our recipe says was not said to another's model
        overrides = ["--data.prompt_template={problem}", *overrides]
    recipe = options.recipe or [*near, recipes_folder() / "own_data.yaml"][0]
    fixed = [f"--{key}={json_text(value)}" for key, value in fixed.items()]
    config = load_config(recipe, ["--adapter={}", "--rewards={}", *overrides, *fixed])
    config.data.eval_rewards = list(config.rewards) or config.data.eval_rewards
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.num_generations == 1 else 1.0
    sampling = replace(config.sampling, temperature=temperature)
    if not options.recipe:
        check_found(recipe, config, overrides)
    rewards = config.held_out_rewards if judges else []
    names = [reward.name for reward in rewards]
    rows = load_datasets(config, {}, (), columns_of(rewards))["eval"]
    world = ranks.setup(config.num_threads, config.timeout, config.uses_fsdp)
    if world.is_main:
        print(f"recipe: {recipe}", flush=True)
    model, processor = build_model(config, world)
    lines = []
    sample = build_sampler(model, processor, sampling, world)
    home = Path(options.model).resolve().parent if Path(options.model).is_dir() else Path()
    out = Path(options.out or home / f"{tool}.jsonl")
    key = f"{config.seed}/evaluate"
    describe = partial(line, processor, names)
    for part in answer_rows(sample, rows, options.num_generations, rewards, key, describe):
        if world.is_main:
            with out.open("ab" if lines else "wb") as file:
                file.writelines(f"{json_text(one)}\n".encode() for one in part)
        lines += part
    if world.is_main:
        summary = {"rows": len(rows)} | summarise(lines, names)
        write_json(out.with_suffix(".summary.json"), summary)
        for name, value in summary.items():
            shown = f"{value:.3f}" if isinstance(value, float) else value
            print(f"{name.replace('_', ' '):<28}{shown}")
        print(f"wrote {out} and {out.with_suffix('.summary.json')}")
    ranks.shutdown()


main = partial(run, "evaluate")
generate = partial(run, "generate")


def line(processor, names: Sequence[str], row: Row, completions: list, earned: list) -> dict:
    """Make a row's line of the results file."""
    answers = []
    for completion, worth in zip(completions, earned, strict=True):
        text = processor.turn(completion)
        found = {"text": text, "answer": find_answer(text, processor.answer)}
        found |= {"tokens": len(completion.ids), "stopped": completion.stopped}
        judged = (None if math.isnan(value) else value for value in worth)  # as JSON has no NaN
        found["rewards"] = dict(zip(names, judged, strict=True))
        answers.append(found)
    about = {"row": row.index, "where": row.where, "solution": row.columns.get("solution")}
    return about | {"answers": answers}


def summarise(lines: list[dict], names: Sequence[str]) -> dict:
    """Mean of each reward over rows that it could judge; of the first one pass@k and majority.

    pass@k: the probability that one of k answers is right, k answers drawn without replacement out
    of all of a row: 1 - C(n - c, k) / C(n, k) with c right ones out of n (Chen et al. 2021, arXiv
    2107.03374). majority: whether the answer that was given most often is right; of two the first.
    """
    answers = [line["answers"] for line in lines]
    cut = [not one["stopped"] for said in answers for one in said]
    found = {"cut": sum(cut) / len(cut)}
    for name in names:
        rows = [[one["rewards"][name] for one in said] for said in answers]
        rows = [[value for value in row if value is not None] for row in rows]
        means = [sum(values) / len(values) for values in rows if values]
        found[name] = sum(means) / len(means) if means else None
    if not names or found[names[0]] is None:
        return found
    judged = [[(one, one["rewards"][names[0]]) for one in said] for said in answers]
    judged = [said for said in judged if all(value is not None for _, value in said)]
    n = len(judged[0])
    right = [sum(value >= RIGHT for _, value in said) for said in judged]
    for k in (2**i for i in range(n.bit_length()) if n > 1):
        passed = [1 - math.comb(n - c, k) / math.comb(n, k) for c in right]
        found[f"pass@{k}"] = sum(passed) / len(passed)
    if n > 1:
        majority = []
        for said in judged:
            given = [normalize(one["answer"] or "") for one, _ in said]
            [(vote, _)] = Counter(given).most_common(1)
            majority.append(said[given.index(vote)][1] >= RIGHT)
        found["majority"] = sum(majority) / len(majority)
    return found
