"""`python -m minivlmrl verify RUN`: train steps of a run again that you draw, and compare bytes.

docs/verify.md says what that proves. All steps from the state before a drawn one to the state after
it are trained. The first step of the run and the last, whose weights are in checkpoint/, are always
among them.
"""

import argparse
import filecmp
import random
import secrets
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from minivlmrl import train
from minivlmrl.hub.folder import json_text, read_json, read_lines
from minivlmrl.run.completions import Logged
from minivlmrl.run.hash_chain import HASHES, process_hashes, step_hashes, text_hash
from minivlmrl.run.results import SUMMARY
from minivlmrl.run.resume import RUN, tensors
from minivlmrl.run.state_files import find_pieces, local_rows, read_rows, write_tensors
from minivlmrl.scale import ranks
from minivlmrl.tools.replay import compare, run_config, steps_to

# on another machine: how far weights may be from a state, of what the learning rates add up to
TOLERANCE = 0.05


def main(arguments: list[str]) -> int:
    """Print what was checked and what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(
        "python -m minivlmrl verify", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--recipe", help="default: config.yaml of the run, if it names no code")
    parser.add_argument("--steps", type=int, default=5, help="how many are drawn")
    parser.add_argument("--seed", type=int, help="of the draw; default: nobody knows it before")
    options, overrides = parser.parse_known_args(arguments)
    folder = Path(options.run)
    config = run_config(folder, options.recipe, overrides)
    chain, last, faults = read_chain(folder, config)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    drawn = sorted(random.Random(seed).sample(range(len(chain)), min(options.steps, len(chain))))
    states = [int(p.name) for p in (folder / "states").glob("[0-9]*") if p.name.isdigit()]
    ends = {
        min([s for s in states if s > i], default=len(chain)) for i in (0, *drawn, len(chain) - 1)
    }
    names = [f"{chain[i]['stage']} {chain[i]['step']}" for i in drawn]
    print(f"{len(chain)} steps, the last hash is {last}; seed {seed} draws {', '.join(names)}")
    for end in sorted(ends) if not faults else ():
        with redirect_stdout(sys.stderr):  # what a run says of itself
            found = train_again(config, folder, chain[:end], end == len(chain))
            ranks.shutdown()
        faults += found
    print("\n".join(f"DIFFERS: {fault}" for fault in faults) or "nothing differs")
    odds = ", ".join(f"f = {f}: {1 - (1 - f) ** len(drawn):.3f}" for f in (0.01, 0.1, 0.5))
    print(f"with a share f of forged steps a run is caught by 1 - (1 - f)^{len(drawn)}; {odds}")
    return int(bool(faults))


def read_chain(folder: Path, config) -> tuple[list[dict], str, list[str]]:
    """The lines of a run's chain, the hash of the last, and what is wrong with them."""
    chain, faults, last = read_lines(folder / HASHES, Logged), [], ""
    if not chain:
        raise ValueError(f"{folder / HASHES}: there is no step in it")
    steps = [(stage, n) for stage in config.stages for n in range(getattr(config, stage).max_steps)]
    wanted = steps if (folder / SUMMARY).exists() else steps[: len(chain)]
    if [(line["stage"], line["step"]) for line in chain] != wanted:
        faults.append(f"{HASHES} does not have the steps of the recipe, one after the other")
    for line in chain:
        if line.get("previous") != last:
            faults.append(f"{HASHES}: the line before {line['stage']} {line['step']} was changed")
        last = text_hash(json_text(line))
    return chain, last, faults


def train_again(config, folder: Path, chain: list[dict], ends: bool) -> list[str]:
    """Train up to the last line of a part of a chain; returns what differs from the run.

    Args:
        ends: whether that is the last step of the run.
    """
    index = {(line["stage"], line["step"]): i for i, line in enumerate(chain)}
    faults, way = [], 0.0
    for algorithm, optimizer, step, number, batches in steps_to(config, *list(index)[-1]):
        at, name = index[algorithm.stage, number], f"{algorithm.stage} {number}"
        if number and not way:
            found = step_hashes(algorithm, optimizer)
            wrong = [kind for kind in found if found[kind] != chain[at - 1].get(kind)]
            faults += [f"{name}: {kind} of the state before it" for kind in wrong]
        metrics = train.optimizer_step(algorithm, step, optimizer, number)
        found = process_hashes(config, algorithm.world) | step_hashes(algorithm, optimizer, step)
        wrong = {kind for kind in found if found[kind] != chain[at].get(kind)} - {"code"}
        if exact := "machine" not in wrong:
            same = compare(folder, algorithm, step, number, metrics)
            wrong |= {file for file in same if not same[file]}
        faults += [f"{name}: {kind}" for kind in wrong if exact or kind in ("rows", "recipe")]
        way, draws = way + metrics["learning_rate"], batches.draws
    state, own = folder / "states" / f"{len(chain):06d}", tensors(algorithm, optimizer)
    if state.is_dir() and read_json(state / RUN)["draws"] != draws:
        faults.append(f"{name}: draws of rows so far, {state.name}")
    if state.is_dir() and not exact and (far := distance(state, own) / way) > TOLERANCE:
        faults.append(f"{name}: weights by {far:.1e} of their way, over {TOLERANCE}")
    with TemporaryDirectory() as again:
        if state.is_dir() and exact:
            (written := Path(again, "states", state.name)).mkdir(parents=True)
            write_tensors(written, own, algorithm.world)
        if ends and exact and (folder / SUMMARY).exists():
            algorithm.save(Path(again))
        files = [path.relative_to(again) for path in Path(again).rglob("*") if path.is_file()]
        _, changed, missing = filecmp.cmpfiles(again, folder, files, shallow=False)
    return faults + [f"{name}: {file}" for file in (*changed, *missing)]


def distance(state: Path, own: dict) -> float:
    """Root of the mean squared difference between the policy's weights and those of a state."""
    kept = find_pieces(state)
    names = [name for name in own if name.startswith("policy.")]
    gaps = (local_rows(own[name])[0].cpu() - read_rows(name, kept[name]) for name in names)
    return torch.cat([gap.double().flatten() for gap in gaps]).square().mean().sqrt().item()
