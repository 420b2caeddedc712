"""Which kernels a rollout, scoring and a training step of Qwen2.5-VL-3B spend their time on, by torch's profiler.

python benchmarks/gpu_profile.py         # a table of the most expensive kernels of each phase, beside roofline.py's
python benchmarks/gpu_profile.py --toy   # at toy size in float32, on a CPU too: that it runs

Read first: embedding_dense_backward or index_put in training; cudaFree, cudaMalloc and cumsum in a rollout.
"""

import sys
from functools import partial

import torch
from gpu_step import CARD, backward, build, grouped, make_case
from torch.profiler import ProfilerActivity, profile

from minivlmrl.generate import SamplingConfig, draw_by, generate, make_choose
from minivlmrl.sampling.captured import CapturedDecode


def main():
    toy = "--toy" in sys.argv
    case = make_case(toy, peer_rows=1)
    ours = build(case.config, torch.float32 if toy else torch.bfloat16)
    rows = len(case.completions)
    tokens = len(case.completions[0])

    def rollout(prompts: int):
        draw = draw_by(torch.rand(prompts * rows, tokens, dtype=torch.float64), CARD)
        choose = make_choose(SamplingConfig(), (), draw, device=CARD)
        generate(ours, [case.prompt] * prompts, rows, tokens, choose, CapturedDecode())

    phases = {
        "scoring": torch.no_grad()(partial(grouped, ours, case, range(rows))),
        "training": partial(backward, grouped, ours, case, rows),
        "rollout of 1 prompt": partial(rollout, 1),
        "rollout of 8": partial(rollout, 8),
    }
    on_card = CARD.type == "cuda"
    activities = [ProfilerActivity.CPU]
    column = "self_cpu_time_total"
    if on_card:
        activities.append(ProfilerActivity.CUDA)
        column = "self_device_time_total"
    for name, call in phases.items():
        for _ in range(2 if on_card else 1):
            call()
        with profile(activities=activities) as profiler:
            call()
        table = profiler.key_averages().table(sort_by=column, row_limit=20, max_name_column_width=60)
        print(f"\n{name}\n{table}", flush=True)


if __name__ == "__main__":
    main()
