"""Forge a step of a run in every way we know, and ask `python -m minivlmrl verify` about it, and about honest runs.

python benchmarks/forgeries.py --forged 100 --honest 50      # exit status 1 if a forgery passes or a run is accused

The forger writes hashes of what was really trained, so that the chain is whole; some forgeries are made afterwards, in
the files. verify gets a seed that draws the forged step alone. Of honest runs every second one is killed somewhere and
resumed.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from minivlmrl import generate, grpo, train  # noqa: E402
from minivlmrl.reward_functions.names import REWARDS  # noqa: E402
from minivlmrl.rows import Processor  # noqa: E402
from minivlmrl.run.batches import Batches  # noqa: E402
from minivlmrl.run.hash_chain import text_hash  # noqa: E402
from minivlmrl.run.resume import _checksum  # noqa: E402
from minivlmrl.tools import verify  # noqa: E402

import tiny  # noqa: E402

STEPS = 6
STAGE = {"max_steps": STEPS, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 3e-3}
RECIPE = tiny.recipe(
    STAGE,
    stages=["grpo"],
    data={"eval_rows": 1, "demonstrations": 8},
    rewards={"letters": 1.0},
    log_completions=1,
    rollout={"max_logp_mismatch": 1e9},  # a forger turns the alarm off
)
CASES = {
    "a state after every step": ["--state_steps=1", "--keep_states=99"],
    "after every second": ["--state_steps=2", "--keep_states=99"],
    "LoRA": ["--state_steps=2", "--keep_states=99", "--adapter.r=2"],
    "rollouts of two steps": ["--state_steps=1", "--keep_states=99", "--grpo.steps_per_generation=2"],
    "a last state alone": ["--state_steps=99"],
    "sft, then grpo": ["--state_steps=1", "--keep_states=99", "--stages=[sft,grpo]", "--sft.max_steps=2"],
}


# forgeries while a run trains: (step) -> a patch


def of_call(owner, name: str, change, number: int):
    """Patch a function: `change(result)` is what its number-th call returns."""
    original, calls = getattr(owner, name), []

    def call(*arguments, **options):
        result = original(*arguments, **options)
        calls.append(1)
        return change(result) if len(calls) == number + 1 else result

    return mock.patch.object(owner, name, call)


def of_rows(change):
    return lambda step: of_call(Batches, "__next__", change, step)


def of_update(change):
    """Change the algorithm or the optimizer right after an update, before anything is written of it."""

    def patch(step):
        original = train.optimizer_step

        def call(algorithm, given, optimizer, number):
            metrics = original(algorithm, given, optimizer, number)
            if number == step:
                with torch.no_grad():
                    change(algorithm, optimizer)
            return metrics

        return mock.patch.object(train, "optimizer_step", call)

    return patch


def averaged(algorithm, _):
    for parameter in algorithm.trained.parameters():
        if parameter.requires_grad:
            parameter.mul_(0.9)


def cooled(_, optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def left_out(step):
    """The gradients are thrown away: the optimizer's step does nothing."""
    original, calls = torch.optim.AdamW.step, []

    def call(self, *arguments):
        calls.append(1)
        return None if len(calls) == step + 1 else original(self, *arguments)

    return mock.patch.object(torch.optim.AdamW, "step", call)


def jump(step):
    """Draws of rows are skipped until those come that the forger likes."""
    original = Batches.__next__

    def call(self):
        rows = original(self)
        return original(self) if self.draws == step + 1 else rows

    return mock.patch.object(Batches, "__next__", call)


def changed_picture(rows):
    pixels = rows[0].made.pixel_values
    return [replace(rows[0], made=replace(rows[0].made, pixel_values=-pixels)), *rows[1:]]


def exchanged(rollout):
    """Two prompts have one another's answers."""
    first, second, *others = rollout.completions
    return replace(rollout, completions=[second, first, *others])


LIVE = {
    "a reward raised": lambda step: of_call(
        grpo, "ask_rewards", lambda r: r.index_fill(0, torch.tensor([0]), 5.0), step
    ),
    "advantages turned": lambda step: of_call(grpo, "group_advantages", lambda a: -a, step),
    "a row dropped": of_rows(lambda rows: [*rows[1:], replace(rows[1], key="0/grpo/9/9")]),
    "a row repeated": of_rows(lambda rows: [rows[0], replace(rows[0], key=rows[1].key), *rows[2:]]),
    "a picture changed": of_rows(changed_picture),
    "another seed": of_rows(lambda rows: [replace(row, key=f"7{row.key}") for row in rows]),
    "rows skipped": jump,
    "answers exchanged": lambda step: of_call(grpo.GRPO, "roll_out", exchanged, step),
    "weights averaged in": of_update(averaged),
    "moments changed": of_update(cooled),
    "a step left out": left_out,
    "another learning rate": lambda step: of_call(train, "learning_rate", lambda rate: 10 * rate, step),
}


# forgeries afterwards: (folder, step) changes files


def rehash(path: Path, change):
    """Change the lines of a chain and make it whole again."""
    lines, last = [json.loads(line) for line in path.read_text().splitlines()], ""
    change(lines)
    for line in lines:
        line["previous"] = last
        last = text_hash(json.dumps(line))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_log(name: str, change):
    def edit(folder, step):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        change(next(line for line in lines if line["stage"] == "grpo" and line["step"] == step))
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return edit


def scale_weights(file: Path):
    save_file({name: 1.001 * x if x.is_floating_point() else x for name, x in load_file(file).items()}, file)


def exchange_checkpoint(folder, step):
    [file] = (folder / "checkpoint").glob("*.safetensors")
    scale_weights(file)


def exchange_state(folder, step):
    """The next state has other weights, and its checksums are right."""
    state = min(p for p in (folder / "states").iterdir() if int(p.name) > step)
    [file] = state.glob("*.safetensors")
    scale_weights(file)
    sums = json.loads((state / "complete.json").read_text())
    (state / "complete.json").write_text(json.dumps(sums | {file.name: _checksum(file)}))


def edit_recipe(folder, step):
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("temperature: 1.0", "temperature: 0.9"))


AFTER = {
    "metrics edited": edit_log("metrics.jsonl", lambda line: line.update(reward=1.0)),
    "completions edited": edit_log("completions.jsonl", lambda line: line["completions"][0].update(text="<answer>")),
    "a hash edited": edit_log("hashes.jsonl", lambda line: line.update(rewards="0" * 32)),
    "a hash edited, the chain made whole": lambda folder, step: rehash(
        folder / "hashes.jsonl", lambda lines: lines[step - STEPS].update(draws="0" * 32)
    ),
    "a step cut out of the chain": lambda folder, step: rehash(
        folder / "hashes.jsonl", lambda lines: lines.pop(step - STEPS)
    ),
    "the checkpoint exchanged": exchange_checkpoint,
    "a state exchanged": exchange_state,
    "the recipe edited": edit_recipe,
}


def honest(recipe: Path, folder: Path, options: list[str]):
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train.main([str(recipe), f"--output_dir={folder}", *options])


def ask(folder: Path, index: int | None = None, steps: int = 1) -> int:
    """The exit status of verify; with an index it draws the step of that line of the chain alone."""
    seed, count = 0, len((folder / "hashes.jsonl").read_text().splitlines())
    while index is not None and random.Random(seed).sample(range(count), 1) != [index % count]:
        seed += 1
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        return verify.main([str(folder), f"--steps={steps}", f"--seed={seed}"])


def forge(name: str, recipe: Path, folder: Path, options: list[str], step: int) -> int:
    """Train a run whose step is forged; what verify says of that step."""
    if name in LIVE:
        rollouts = "--grpo.steps_per_generation=2" in options and name not in ("weights averaged in", "moments changed")
        with LIVE[name](step // 2 if rollouts and "step" not in name and "rate" not in name else step):
            honest(recipe, folder, options)
    else:
        honest(recipe, folder, options)
        AFTER[name](folder, step)
    return ask(folder, step - STEPS)


class Killed(BaseException):
    pass


@contextlib.contextmanager
def lively():
    """Let an untrained model earn different rewards at different lengths."""
    stop = property(lambda self: tuple(range(7, len(self.tokenizer), 8)))
    with mock.patch.dict(REWARDS, letters="on_ranks:letters"), mock.patch.object(Processor, "stop_token_ids", stop):
        yield


def kill_and_resume(recipe: Path, folder: Path, options: list[str], draw: random.Random):
    """A run that dies in the middle of a random step, and goes on from its newest state."""
    number = draw.randrange(STEPS)
    place = draw.choice([(torch.optim.AdamW, "step"), (generate, "inverse_cdf"), (torch.Tensor, "backward")])

    def die(_):
        raise Killed

    with of_call(*place, die, number), contextlib.suppress(Killed):
        honest(recipe, folder, options)
    honest(recipe, folder, [*options, "--resume=auto"])


def main():
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--forged", type=int, default=100)
    p.add_argument("--honest", type=int, default=50)
    p.add_argument("--first", type=int, default=0, help="go on with this forgery")
    options, caught, passed, accused = p.parse_args(), 0, [], []
    torch.set_num_threads(1)
    draw, names, cases = random.Random(0), [*LIVE, *AFTER], list(CASES)
    with tempfile.TemporaryDirectory() as folder, lively():
        home = Path(folder)
        (home / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
        (home / "recipe.yaml").write_text(json.dumps(RECIPE))
        for number in range(options.first, options.forged):
            name, case = names[number % len(names)], cases[number // len(names) % 3]
            step = random.Random(number).randrange(STEPS)
            status = forge(name, home / "recipe.yaml", home / "run", CASES[case], step)
            caught += status == 1
            if status != 1:
                passed.append(f"{name}, {case}, step {step}: {status}")
            print(f"{number + 1 - options.first} forged, {caught} caught", *passed[-1:], flush=True)
            shutil.rmtree(home / "run")
        for number in range(options.honest):
            case = cases[number // 2 % len(cases)]
            if number % 2:
                kill_and_resume(home / "recipe.yaml", home / "run", CASES[case], draw)
            else:
                honest(home / "recipe.yaml", home / "run", CASES[case])
            if ask(home / "run", steps=3):
                accused.append(f"{case}, {number}")
            print(f"{number + 1} honest, {len(accused)} accused", *accused[-1:], flush=True)
            shutil.rmtree(home / "run")
    return int(bool(passed or accused))


if __name__ == "__main__":
    sys.exit(main())
