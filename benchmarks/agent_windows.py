"""Measure the cost of agent rounds by context window: tokens, decode steps and seconds; see docs/agents.md.

python benchmarks/agent_windows.py    # takes a minute

The model of recipes/zoom_model.json has random weights. A screen has 16 tokens, and a turn of the
agent has 8 tokens. Every turn counts as a tool call.
"""

import time
from pathlib import Path

import PIL.Image
import torch

from minivlmrl.agents import tool_sampler
from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import Row
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.environments import make_sampler, packed_length
from minivlmrl.generation.generate import Decode
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes

ROUNDS = (2, 4, 8, 16, 32)
TURN = 8  # number of tokens of a turn
GENERATIONS = 8
WAYS = {  # label -> class of the environment, sampling.history
    "the newest screen alone": ("Newest", None),
    "history: 2": ("Pages", 2),
    "history: all": ("Pages", 99),
    "one completion": ("Pages", None),
}
decode_steps = []


class Pages:
    """Environment that returns a screen for every call, until the given number of rounds is reached."""

    max_tool_calls = 99

    def __init__(self, rounds=2):
        self.rounds = rounds
        self.done = False

    def reset(self, **columns):
        self.calls = 0

    def click(self) -> PIL.Image.Image:
        self.calls += 1
        self.done = self.calls == self.rounds
        return PIL.Image.new("RGB", (64, 64), (self.calls, 99, 99))


class Newest(Pages):
    """Environment whose observation contains only the newest screen."""

    def observe(self, rounds):
        _, parts = rounds[-1]
        return [{"role": "user", "content": parts}]


def ends_turn(episode: tool_sampler.ToolEpisode, searched_from: int) -> bool:
    """Return whether a turn is complete. The tokens of a completion include those of earlier turns."""
    earlier = 0 if hasattr(episode, "turns") else TURN * episode.num_calls
    return sum(episode.policy_mask) == TURN + earlier


def counted_step(*arguments, step=Decode.__call__):
    """Count a decode step, then run it."""
    decode_steps.append(1)
    return step(*arguments)


def measure(model, processor, rounds: int, environment: str, history: int | None) -> tuple[int, int, float]:
    """Sample one group. Return the number of tokens, the number of decode steps, and the time in seconds."""
    sampling = SamplingOptions(
        environment=f"{__file__}:{environment}(rounds={rounds})",
        history=history,
        max_new_tokens=64 * rounds if (environment, history) == ("Pages", None) else TURN,
        stop_token_ids=[],
    )
    part = {"type": "image"}
    row = Row([{"role": "user", "content": [part]}], [PIL.Image.new("RGB", (64, 64))])
    prompt = row.prompt(processor)
    sampler = make_sampler(model, processor, sampling, World())
    decode_steps.clear()
    start = time.perf_counter()
    [group] = sampler([prompt], GENERATIONS, ["key"])
    seconds = time.perf_counter() - start
    num_tokens = len(prompt.input_ids) + sum(map(packed_length, group))
    return num_tokens, len(decode_steps), seconds


def main():
    torch.set_num_threads(1)
    tool_sampler.find_calls = lambda *_: [("click", "")]
    tool_sampler.ToolEpisode.closes_a_call = ends_turn
    Decode.__call__ = counted_step
    config = Path(__file__).parents[1] / "recipes" / "zoom_model.json"
    model, processor = random_model(config, shapes.tokenizer(), 0)
    print("| rounds |", " | ".join(WAYS), "|")
    for rounds in ROUNDS:
        cells = []
        for way in WAYS.values():
            num_tokens, steps, seconds = measure(model, processor, rounds, *way)
            cells.append(f"{num_tokens:,}, {steps}, {seconds:.1f}")
        print(f"| {rounds} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
