"""Memory of a step with videos, the vision tower at once and in pieces (`model.tower_pieces`).

    python benchmarks/tower_pieces.py            # a toy, measured and planned; then real sizes, planned: a minute

The toy's columns are MB of float32: `tower` what a forward and backward of the tower alone holds at most beside its
weights and gradients, its pixels, its output and that one's gradient; `step` the same of a whole step, prompt, image
tokens in the decoder and completions included, and `plan` what run/memory.py says of it.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
from hub_configs import real_config  # noqa: E402

from minivlmrl.batch import pack  # noqa: E402
from minivlmrl.decoder import Qwen2_5_VL  # noqa: E402
from minivlmrl.hub.model_config import ModelConfig  # noqa: E402
from minivlmrl.logprobs import per_token_logps  # noqa: E402
from minivlmrl.rows import Prompt  # noqa: E402
from minivlmrl.run.config import RunConfig, load_config  # noqa: E402
from minivlmrl.run.memory import GB, Costs, LiveBytes, Work, most, plan  # noqa: E402
from minivlmrl.scale.checkpoint import initialize  # noqa: E402
from minivlmrl.scale.sharding import run_in_pieces  # noqa: E402

from tiny import RUN_MODEL  # noqa: E402

FRAME, TEXT, COMPLETION = 16, 20, 8  # tokens
CONFIG = ModelConfig.from_dict(RUN_MODEL | {"image_token_id": 400, "video_token_id": 401})
LORA = ["--adapter.r=16", "--adapter.target=[language, vision, merger]", "--model.dtype=bfloat16"]
LORA += ["--model.compute_dtype=null", "--data.max_pixels=null", "--grpo.micro_batch_size=1"]


def measure(frames: int, tokens: int | None) -> tuple[float, float, float]:
    """MB of the tower, of a step, and of the step by the plan."""
    model = Qwen2_5_VL(CONFIG)
    initialize(model, torch.Generator().manual_seed(0))
    run_in_pieces(model, tokens)
    grids = torch.tensor([[1, 8, 8]] * frames)
    pixels = torch.rand(frames * 64, CONFIG.vision_config.patch_dim)
    ids = torch.cat([torch.full((FRAME * frames,), CONFIG.image_token_id), torch.zeros(TEXT, dtype=torch.long)])
    batch = pack([Prompt(ids, pixels, grids)], [[torch.zeros(COMPLETION, dtype=torch.long)] * 2], CONFIG)
    held = [*model.parameters(), pixels, batch.pixel_values]
    for _ in range(2):  # the second time gradients are there
        per_token_logps(model, batch)[0].sum().backward()
    held += [p.grad for p in model.parameters()]
    with LiveBytes(held) as live:
        seen = model.visual(pixels, grids)
        gradient = torch.ones_like(seen)
        seen.backward(gradient)
    tower = live.most - 2 * seen.nbytes
    with LiveBytes(held) as live:
        per_token_logps(model, batch)[0].sum().backward()
    run = RunConfig()
    run.model.tower_pieces = tokens
    planned = Costs(CONFIG).activations(run, Work(1, 2, TEXT, FRAME * frames, COMPLETION, frames), True)
    return tower / 1e6, (live.most + pixels.nbytes) / 1e6, planned / 1e6


def minute(size: str, tokens: int | None, recompute: bool, of_frame: int) -> float:
    """GB of LoRA on bfloat16 with a video of a minute: 60 steps of two frames each."""
    config = ModelConfig.from_dict(real_config(size))
    options = [*LORA, f"--model.activation_checkpointing={str(recompute).lower()}"]
    run = load_config(ROOT / "recipes" / "own_data.yaml", options)
    run.model.tower_pieces = tokens
    costs, work = Costs(config), Work(1, 8, 200, 60 * of_frame, 256, 60)
    items = plan(run, "grpo", costs, 1, 200, 0)["train"]  # of everything else: rollouts take long to plan
    return most({"train": items | {"forward and backward": costs.activations(run, work, True)}}) / GB


def main():
    print("| frames | tower, at once | in pieces | step, at once | plan | in pieces | plan |\n" + "|---" * 7 + "|")
    for frames in (4, 8, 16, 32, 64):
        (tower, *step), (small, *smaller) = measure(frames, None), measure(frames, 2 * FRAME)
        print(f"| {frames} | " + " | ".join(f"{x:.2f}" for x in (tower, small, *step, *smaller)) + " |", flush=True)
    print("\n| a minute of video | at once | in pieces of 1024 | recomputed blocks | both |\n" + "|---" * 5 + "|")
    for size in ("Qwen2.5-VL-3B", "Qwen2.5-VL-7B"):
        cases = ((None, False), (1024, False), (None, True), (1024, True))
        sizes = [minute(size, tokens, recompute, 128) for tokens, recompute in cases]
        cells = " | ".join(f"{x:.1f}: {', '.join(str(c) for c in (24, 80) if x <= c) or 'none'}" for x in sizes)
        print(f"| {size}, 7,680 tokens | {cells} |", flush=True)


if __name__ == "__main__":
    main()
