"""Compare the time of forward and backward with transformers, for several lengths of prompts and completions.

python benchmarks/lengths.py                # the whole table
python benchmarks/lengths.py --quick        # four short cases with one timed call each
python benchmarks/lengths.py --json FILE    # also write the numbers

The model is the one of the default recipe, with random weights that both sides share, in float32. A case is one prompt,
which contains an image of 16 tokens, with a group of completions. minivlmrl packs the group, so that the prompt is
computed once. transformers computes one row for each completion, with a copy of the prompt and its image, as in TRL.
All completions of a case have the same length, so that no row needs padding; with unequal lengths, transformers would
also compute the padding. Both sides compute the GRPO loss and its gradients for the whole group at once.

Before timing, the log-probabilities of both sides must agree. The calls of both sides alternate. The table contains the
median time of transformers divided by the median time of minivlmrl, because single times depend on the machine.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from gpu_step import CARD, TOLERANCE, Case, backward, grouped, of_transformers, seconds_of, twin, write_numbers
from grpo_step import MODEL_CONFIG

from minivlmrl.data.rows import Prompt
from minivlmrl.model.build import random_model
from minivlmrl.model.config import ModelConfig
from minivlmrl.tasks import shapes

PROMPTS = (40, 300, 1200)  # number of tokens of a prompt, including its image
COMPLETIONS = (16, 64, 256, 1024)  # number of tokens of a completion
GROUPS = (8, 32)  # number of completions of the prompt
QUICK = {"prompts": (40, 300), "completions": (16, 256), "groups": (8,)}
IMAGE_SIDE = 8  # patches on each side of the image


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four short cases with one timed call each")
    parser.add_argument("--repeats", type=int, help="timed calls of each side, by default 5, or 1 with --quick")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats = options.repeats or (1 if options.quick else 5)
    sizes = QUICK if options.quick else {"prompts": PROMPTS, "completions": COMPLETIONS, "groups": GROUPS}
    rows = []
    for row in measure(**sizes, repeats=repeats):
        rows.append(row)
        *case_sizes, ratio = row.values()
        print(f"| {' | '.join(map(str, case_sizes))} | {ratio:.3g} |", flush=True)
    write_numbers(options.json, {"rows": rows, "threads": options.threads})


def measure(
    prompts: Iterable[int], completions: Iterable[int], groups: Iterable[int], repeats: int
) -> Iterable[dict[str, float]]:
    """Yield a row of the table for each combination of lengths and group sizes.

    Args:
        repeats: number of timed calls of each side.
    """
    ours, _ = random_model(MODEL_CONFIG, shapes.tokenizer(), seed=0)
    ours.to(CARD)
    theirs = twin(ours)
    if theirs is None:
        raise SystemExit("This benchmark compares minivlmrl with transformers; run pip install transformers")
    print("| prompt tokens | completion tokens | group | times ours |\n|---|---|---|---|")
    for P, C, G in itertools.product(prompts, completions, groups):
        case = make_case(ours.config, P, C, G)
        sides = {
            "ours": partial(backward, grouped, ours, case, G),
            "transformers": partial(backward, of_transformers, theirs, case, G),
        }
        # also the warm-up of each side
        difference = (sides["ours"]() - sides["transformers"]()).abs().max().item()
        assert difference <= TOLERANCE, f"log-probabilities differ by {difference:.1e}, more than {TOLERANCE}"
        seconds = {side: [] for side in sides}
        for _, (side, call) in itertools.product(range(repeats), sides.items()):
            ours.zero_grad()  # the parameters of both sides
            seconds[side].append(seconds_of(call))
        ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["ours"])
        yield {"prompt_tokens": P, "completion_tokens": C, "group": G, "ratio": ratio}


def make_case(config: ModelConfig, prompt_tokens: int, completion_tokens: int, group: int) -> Case:
    """Create a prompt of random text after a random image, and random completions of text tokens."""
    generator = torch.Generator().manual_seed(0)
    image_tokens = IMAGE_SIDE**2 // config.vision_config.spatial_merge_size**2
    image = [config.vision_start_token_id, *[config.image_token_id] * image_tokens, config.vision_end_token_id]
    # ids below 256 are bytes, so no control tokens
    text = torch.randint(256, (prompt_tokens - len(image),), generator=generator)
    pixels = torch.randn(IMAGE_SIDE**2, config.vision_config.patch_dim, generator=generator)
    prompt = Prompt(torch.cat([torch.tensor(image), text]), pixels, torch.tensor([[1, IMAGE_SIDE, IMAGE_SIDE]]))
    completions = list(torch.randint(256, (group, completion_tokens), generator=generator).to(CARD))
    return Case(config, prompt, completions, torch.randn(group, generator=generator).to(CARD))


if __name__ == "__main__":
    main()
