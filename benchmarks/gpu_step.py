"""Compare scoring and a Qwen2.5-VL-3B training step on a GPU with transformers.

python benchmarks/gpu_step.py          # a table
python benchmarks/gpu_step.py --toy    # tests the script: toy size in float32, also on a CPU

The weights are random, in bfloat16. There is one prompt with 1,000 image tokens and 100 text tokens, and 8 completions
with exactly 256 tokens each.

    scoring     compute log-probabilities, no gradient
    step        forward, GRPO loss, backward, AdamW

There are two peers, one with minivlmrl's model and one with transformers' model. Both compute one row for each
completion, with a copy of the prompt and its image.

Both models share their parameters. In a step, the peers process PEER_ROWS rows at a time and sum the gradients, because
4 rows need more than 80 GB. Before timing, the three implementations' log-probabilities and gradients are compared: in
float32 with two decoder layers and two vision blocks, where they must agree, then in bfloat16 with the whole model,
where the differences are printed. The implementations are called in turn, and times are medians with minimum and
maximum. Memory is a call's peak minus the memory that model and optimizer already hold.
"""

import argparse
import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from common import CARD, about, peak_gib, read_options, seconds_of
from sizes import config_of
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.model import config_json
from minivlmrl.model.build import initialize
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack

PEER_ROWS = 2  # rows that a peer processes at once in a step
TOLERANCE = 1e-3  # largest difference in float32, in nats and relative to the gradient's norm


@dataclasses.dataclass
class Case:
    """Inputs for a measurement, which are the same for all implementations."""

    config: ModelConfig
    prompt: Prompt
    completions: list[Tensor]  # G completions with C tokens each
    advantages: Tensor  # (G,)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the prompt as transformers' model inputs with one row."""
        ids = self.prompt.input_ids[None].to(CARD)
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == self.config.image_token_id).long(),
            "pixel_values": self.prompt.pixel_values.to(CARD), "image_grid_thw": self.prompt.image_grid_thw.to(CARD),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each way")
    options = read_options(parser)
    print(json.dumps(about()))
    compare_and_measure(options.toy, options.repeats)


def compare_and_measure(toy: bool, repeats: int) -> dict:
    """Compare the implementations, time them, and print the results.

    Returns:
        "rows": see measure; "shallow_differences" and "differences" (whole model): see compare.
    """
    # otherwise transformers' Conv3d would compute with ten bits in the float32 comparison
    torch.backends.cudnn.allow_tf32 = False
    case = make_case(toy)
    shallow_case = dataclasses.replace(case, config=shallow(case.config))
    model = build(shallow_case.config, torch.float32)
    shallow_differences = compare("float32, two layers", model, twin(model), shallow_case)
    for way, (logps, gradients) in shallow_differences.items():
        assert max(logps, gradients) <= TOLERANCE, f"{way}: {logps:.1e} nats, gradients {gradients:.1e}"
    dtype = torch.float32 if toy else torch.bfloat16
    model = build(case.config, dtype)
    theirs = twin(model)
    differences = compare(str(dtype), model, theirs, case)
    rows = measure(model, theirs, case, repeats)
    return {"rows": rows, "differences": differences, "shallow_differences": shallow_differences}


def make_case(toy: bool) -> Case:
    """Create a case: a random prompt (an image between text), and random completions without image tokens."""
    config = config_of("toy" if toy else "3b")
    height, width, text, G, C = (10, 12, 8, 2, 6) if toy else (50, 80, 100, 8, 256)
    generator = torch.Generator().manual_seed(0)
    merged = height * width // config.vision_config.spatial_merge_size**2
    image = [config.vision_start_token_id, *[config.image_token_id] * merged, config.vision_end_token_id]
    before, after = torch.randint(300, (text,), generator=generator).chunk(2)  # ids below 300 are text in both
    pixels = torch.randn(height * width, config.vision_config.patch_dim, generator=generator)
    ids = torch.cat([before, torch.tensor(image), after])
    prompt = Prompt(ids, pixels, torch.tensor([[1, height, width]]))
    completions = list(torch.randint(300, (G, C), generator=generator).to(CARD))
    advantages = torch.randn(G, generator=generator).to(CARD)
    return Case(config, prompt, completions, advantages)


def shallow(config: ModelConfig) -> ModelConfig:
    """Return the config with two decoder layers and two vision blocks; one block has windows."""
    vision = dataclasses.replace(config.vision_config, depth=2, fullatt_block_indexes=(1,))
    return dataclasses.replace(config, num_hidden_layers=2, vision_config=vision)


def build(config: ModelConfig, dtype: torch.dtype):
    """Create minivlmrl's model with random weights, which are sampled on the GPU."""
    with torch.device("meta"):
        ours = VisionLanguageModel(config).to(dtype)
    ours.to_empty(device=CARD)
    if config.tie_word_embeddings:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    initialize(ours, torch.Generator(CARD).manual_seed(0))
    return ours


def twin(ours: VisionLanguageModel):
    """Create transformers' model with shared parameters; return None if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed and is left out")
        return None
    import transformers

    hub_config = transformers.Qwen2_5_VLConfig.from_dict(config_json.to_dict(ours.config))
    with CARD:
        theirs = transformers.Qwen2_5_VLForConditionalGeneration._from_config(hub_config, attn_implementation="sdpa")
    shared = {their_name(name): parameter for name, parameter in ours.state_dict(keep_vars=True).items()}
    theirs.load_state_dict(shared, assign=True)
    assert {id(p) for p in theirs.parameters()} == {id(p) for p in ours.parameters()}
    return theirs


def their_name(name: str) -> str:
    """Convert a parameter's name in minivlmrl's model to its name in transformers' model."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name


# ---- implementations: each returns log-probabilities (G, C) --------------------------------------------------------


def grouped(model: VisionLanguageModel, case: Case, rows: range) -> Tensor:
    """Compute all completions' log-probabilities with one shared prompt, as in training."""
    batch = pack([case.prompt], [[Completion(case.completions[i].cpu()) for i in rows]], case.config, CARD)
    return batch.pad(per_token_logps(model, batch)[0])


def separate(model: VisionLanguageModel, case: Case, rows: range) -> Tensor:
    """Compute log-probabilities with minivlmrl's model and a copy of the prompt per completion."""
    batch = pack([case.prompt] * len(rows), [[Completion(case.completions[i].cpu())] for i in rows], case.config, CARD)
    return batch.pad(per_token_logps(model, batch)[0])


def of_transformers(model: torch.nn.Module, case: Case, rows: range) -> Tensor:
    """Compute log-probabilities with transformers' model, with one row per completion.

    As in TRL, logits are computed only for completion tokens.
    """
    completions = torch.stack([case.completions[i] for i in rows])  # (rows, C)
    G, C = completions.shape
    prompt = {name: x.repeat(G, 1) for name, x in case.inputs.items()}
    logits = model(
        pixel_values=prompt["pixel_values"],
        image_grid_thw=prompt["image_grid_thw"],
        input_ids=torch.cat([prompt["input_ids"], completions], dim=1),
        attention_mask=torch.cat([prompt["attention_mask"], torch.ones_like(completions)], dim=1),
        mm_token_type_ids=torch.cat([prompt["mm_token_type_ids"], torch.zeros_like(completions)], dim=1),
        use_cache=False,
        logits_to_keep=C + 1,
    ).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), completions.flatten(), reduction="none")
    return -losses.view(G, C)


def backward(way: Callable, model: torch.nn.Module, case: Case, at_once: int) -> Tensor:
    """Compute the GRPO loss's gradients, `at_once` completions at a time; return all log-probabilities."""
    G = len(case.completions)
    C = len(case.completions[0])
    logps = []
    for start in range(0, G, at_once):
        rows = range(start, min(start + at_once, G))
        logps.append(way(model, case, rows))
        advantages = case.advantages[rows.start : rows.stop]
        mask = torch.ones(len(rows), C, device=CARD)
        grpo_loss(logps[-1], advantages, mask, normalizer=LossNormalizer(G, G * C))[0].backward()
    return torch.cat(logps).detach()


def compare(label: str, ours: VisionLanguageModel, theirs: torch.nn.Module | None, case: Case) -> dict[str, tuple]:
    """Compare each peer's log-probabilities and gradients with those from `grouped`.

    Returns:
        peer -> (largest log-probability difference in nats, norm of the gradients' difference relative to their norm).
    """
    parameters = list(ours.parameters())
    logps, gradients = logps_and_gradients(grouped, ours, parameters, case, len(case.completions))
    norm = sum(g.float().square().sum() for g in gradients).sqrt()
    peers = {"separate": (separate, ours)}
    if theirs:
        peers["hf"] = (of_transformers, theirs)
    differences = {}
    for name, (way, model) in peers.items():
        their_logps, their_gradients = logps_and_gradients(way, model, parameters, case, PEER_ROWS)
        squares = sum((a - b).float().square().sum() for a, b in zip(gradients, their_gradients, strict=True))
        of_logps = (logps - their_logps).abs().max().item()
        of_gradients = (squares.sqrt() / norm).item()
        differences[name] = (of_logps, of_gradients)
        print(f"{label}, {name}: log-probabilities differ by {of_logps:.1e} nats, gradients by {of_gradients:.1e}")
    return differences


def logps_and_gradients(way: Callable, model: torch.nn.Module, parameters: list, case: Case, at_once: int):
    """Compute all completions' log-probabilities and gradients, and clear the parameters' gradients."""
    logps = backward(way, model, case, at_once)
    gradients = [p.grad for p in parameters]
    model.zero_grad()  # sets them to None
    return logps, gradients


def measure(ours: VisionLanguageModel, theirs: torch.nn.Module | None, case: Case, repeats: int) -> list[dict]:
    """Time every phase and implementation, and print the table."""
    rows = []
    print("| phase | way | seconds | shortest | longest | times ours | peak GiB |\n|---|---|---|---|---|---|---|")
    for phase, ways in phases(ours, theirs, case).items():
        if not theirs:
            del ways["transformers"]
        results = take_turns(ways, repeats)
        our_seconds = results["ours"].get("seconds")
        for way, numbers in results.items():
            rows.append({"phase": phase, "way": way, **numbers})
            print(f"| {phase} | {way} | {line(numbers, our_seconds)} |", flush=True)
    return rows


def phases(ours: VisionLanguageModel, theirs: torch.nn.Module | None, case: Case) -> dict[str, dict[str, Callable]]:
    """Return the calls to time, by phase and implementation."""
    G = len(case.completions)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-6, fused=True)

    @torch.no_grad()
    def score(way, model):
        way(model, case, range(G))

    def step(way, model, at_once):
        backward(way, model, case, at_once)
        optimizer.step()
        optimizer.zero_grad()

    return {
        "scoring": {
            "ours": partial(score, grouped, ours),
            "ours, separate rows": partial(score, separate, ours),
            "transformers": partial(score, of_transformers, theirs),
        },
        "step": {
            "ours": partial(step, grouped, ours, G),
            "ours, separate rows": partial(step, separate, ours, PEER_ROWS),
            "transformers": partial(step, of_transformers, theirs, PEER_ROWS),
        },
    }


def take_turns(ways: dict[str, Callable], repeats: int) -> dict[str, dict]:
    """Time implementations in alternating calls.

    Each implementation first runs twice, for warm-up and to measure its peak memory. An
    implementation that runs out of memory is skipped.
    """
    results = {}
    seconds = {}
    for way, call in ways.items():
        try:
            call()
            results[way] = {"peak_gib": peak_gib(call)}
            seconds[way] = []
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            results[way] = {"skipped": "out of memory"}
    for _ in range(repeats):
        for way, spent in seconds.items():
            spent.append(seconds_of(ways[way]))
    for way, spent in seconds.items():
        results[way].update(seconds=statistics.median(spent), shortest=min(spent), longest=max(spent))
    return results


def line(numbers: dict, base: float | None) -> str:
    """Format a table row's cells; base: minivlmrl's seconds."""
    if "skipped" in numbers:
        return f"{numbers['skipped']} | | | |"
    times = f"{numbers['seconds'] / base:.2f}" if base else ""
    spent = f"{numbers['seconds']:.3f} | {numbers['shortest']:.3f} | {numbers['longest']:.3f}"
    return f"{spent} | {times} | {numbers['peak_gib']:.1f}"


if __name__ == "__main__":
    main()
