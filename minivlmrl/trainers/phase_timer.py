"""Time phases within an optimizer step, such as sampling."""

import time
from itertools import pairwise

import torch


class PhaseTimer:
    """Timer for phases; it uses CUDA events on a GPU, where work runs later than its Python code."""

    def __init__(self, device: torch.device):
        self.is_gpu = device.type == "cuda"
        self.marks = []  # (phase, start time) since the last call to `take`

    def start(self, phase: str):
        if self.is_gpu:
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
        else:
            begin = time.perf_counter()
        self.marks.append((phase, begin))

    def take(self) -> dict[str, float]:
        """Wait for the GPU, and return {phase: seconds} since the last call."""
        self.start("end")
        if self.is_gpu:
            self.marks[-1][1].synchronize()
        seconds = {}
        for (phase, begin), (_, end) in pairwise(self.marks):
            duration = begin.elapsed_time(end) / 1000 if self.is_gpu else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + duration
        self.marks.clear()
        return seconds
