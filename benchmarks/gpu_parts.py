"""Measure GRPO steps, decoding and this repository's programs on a GPU. first_gpu_hour.py runs all parts.

python benchmarks/gpu_parts.py step          # a GRPO step with Qwen2.5-VL-3B
python benchmarks/gpu_parts.py step --toy    # tests the part: toy size in float32, also on a CPU

Weights are random, in bfloat16, with the real size. A part that needs a package imports it in its own function, so that
the other parts run without this package.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

if os.environ.get("MINIVLMRL_KERNELS") == "triton" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, which the imports below do
from common import CARD, part, report, report_skipped, run_part, seconds_of, synchronize
from gpu_step import build, compare_and_measure, twin
from grpo_step import Ours, make_rows, trl_clock, trl_side
from sizes import HUB, small_model

from minivlmrl.config.loading import load_config
from minivlmrl.data.row_summary import RowSize
from minivlmrl.diagnostics.memory import RESERVE, MemoryEstimator, estimate_phases, peak_bytes
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import recompute_blocks
from minivlmrl.generation import generate, sampler
from minivlmrl.generation.cuda_graphs import CapturedDecode
from minivlmrl.model import config_json
from minivlmrl.model.checkpoint import DTYPES, save_model
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.model.trainable import select_trained
from minivlmrl.run import loop
from minivlmrl.trainers.grpo import GRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status if it ran no test


# ---- the repository's programs --------------------------------------------------------------------------------------


@part
def self_test(toy: bool):
    """Compare each Triton kernel with float64, in its own process; on a CPU in Triton's interpreter."""
    from minivlmrl.kernels.self_test import CHECKS
    from minivlmrl.kernels.verdicts import TOLERANCE, check_kernels

    if CARD.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    kernels = ["nf4_unpack", "selective_log_softmax"] if toy else list(CHECKS)
    begin = time.perf_counter()
    wrong = []
    for kernel, result in check_kernels(CARD.type, kernels).items():
        if isinstance(result, str):
            report_skipped(kernel, result)
        else:
            report(f"{kernel}: relative error", result, "")
        if isinstance(result, str) or not result <= TOLERANCE:
            wrong.append(kernel)
    report("all kernels", time.perf_counter() - begin, "s")
    assert not wrong, f"wrong kernels: {', '.join(wrong)}"


@part
def tests(toy: bool):
    """Run the tests that need a GPU. `pytest -m gpu` runs each file in its own process."""
    run_tests("gpu")


@part
def vllm_tests(toy: bool):
    """Run the tests for vLLM, which see the GPU because of MINIVLMRL_TEST_GPU."""
    os.environ["MINIVLMRL_TEST_GPU"] = "1"
    run_tests("slow", "-n", "0", "tests/generation/test_vllm.py")


def run_tests(marker: str, *arguments: str):
    """Run the tests with a marker, and report how many pass and fail.

    Raises:
        subprocess.CalledProcessError: if a test fails.
    """
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "-m", marker, *arguments, check=False)
    if done.returncode == NO_TESTS and CARD.type == "cpu":
        return report_skipped("tests", "this part needs a GPU")
    for state in ("passed", "failed", "skipped", "error"):
        report(f"tests: {state}", sum(map(int, re.findall(rf"(\d+) {state}", done.stdout))), "")
    done.check_returncode()


@part
def train(toy: bool, *options: str):
    """Train the default recipe with train.py, and report accuracies, seconds and the largest logp_mismatch."""
    short = ("--sft.max_steps=1", "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--data.eval_rows=2")
    with tempfile.TemporaryDirectory() as folder:
        run_python("train.py", "--resume=never", f"--output_dir={folder}", *options, *(short if toy else ()))
        summary = json.loads((Path(folder) / "summary.json").read_text())
        steps = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    for stage, seconds in summary["seconds"].items():
        report(f"{stage}, training", seconds, "s")
        for name in ("sampled", "greedy"):
            report(f"{stage}, {name} accuracy afterwards", summary[f"after_{stage}"][f"eval/accuracy_{name}"], "")
    report("largest logp_mismatch", max(step.get("rollout/logp_mismatch", 0.0) for step in steps), "nats")


@part
def vllm_speed(toy: bool):
    """Time rollouts with the native sampler and with vLLM."""
    for line in run_python("benchmarks/vllm_speed.py").stdout.splitlines():
        if found := re.fullmatch(r"(native|vllm) (\[.*\])", line):
            report(f"rollout, {found[1]}, median of 5", statistics.median(json.loads(found[2])), "s")


@part
def transformers(toy: bool):
    """Compare log-probabilities, gradients and seconds with transformers, see gpu_step.py."""
    found = compare_and_measure(toy, repeats=1)
    for label, differences in (("two layers, float32", "shallow_differences"), ("whole model", "differences")):
        for peer, (logps, gradients) in found[differences].items():
            report(f"{label}, {peer}: difference of log-probabilities", logps, "nats")
            report(f"{label}, {peer}: difference of gradients / their norm", gradients, "")
    for row in found["rows"]:
        name = f"{row['phase']}, {row['way']}"
        if "skipped" in row:
            report_skipped(name, row["skipped"])
        else:
            report(name, row["seconds"], "s")
            report(f"{name}: memory", row["peak_gib"], "GiB")


def run_python(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository, and print its output as soon as it comes.

    Args:
        check: whether to raise subprocess.CalledProcessError if the exit status is not 0.
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, **streams)
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    done = subprocess.CompletedProcess(arguments, process.wait(), "".join(lines))
    if check:
        done.check_returncode()
    return done


# ---- GRPO steps ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A GRPO step: model size, side of the square images in pixels, recipe, and recipe options."""

    size: str
    pixels: int
    recipe: str
    options: tuple[str, ...] = ()


# 8 prompts with 1,024 image tokens and 8 completions with 256 tokens each; everything is bfloat16, also AdamW
STEP = Case(
    "3b", 896, "own_data.yaml",
    (
        "--model.dtype=bfloat16", "--model.compute_dtype=null", "--model.activation_checkpointing=false",
        "--grpo.prompts_per_step=8", "--grpo.loss_type=grpo", "--grpo.warmup_steps=0",
    ),
)  # fmt: skip
# two recipes for a 24 GB card; an image has 484 tokens, and the recipes allow 512
LORA = Case("3b", 616, "own_data_one_card.yaml")
NF4 = Case("7b", 616, "lora_7b.yaml")
# completions with full length, and rewards that differ although the weights are random
COMMON = ("--sampling.stop_token_ids=[]", "--rewards={grpo_step:distinct_characters: 1}")
TOY = (
    "--model.dtype=float32", "--model.compute_dtype=null", "--sampling.max_new_tokens=4", "--grpo.prompts_per_step=2",
)  # fmt: skip

# Changes whose gain was only predicted when they were made, each with a name in the code and a value that undoes the
# change. An entry can be deleted after a GPU has measured it.
CHANGES = {
    "padded MLP of the tower": ("minivlmrl.model.vision.ALIGNED", 1),
    "Triton kernel of windows": ("minivlmrl.kernels.window_attention.MAX_HEAD_DIM", 0),  # varlen_attn replaces it
    "wide tiles of logits": ("minivlmrl.kernels.linear_log_softmax.tile_width", lambda rows, vocab: min(2048, vocab)),
    "16-bit copies of adapters": ("minivlmrl.distributed.weights.sampling_copies", lambda model: nullcontext([])),
    "TF32 products of adapters": ("minivlmrl.model.lora.LoRALinear.can_use_tf32", lambda layer, base_result: False),
}


class GRPOStep(Ours):
    """A case, built on the GPU. Each call of `step` is one optimizer step.

    Attributes:
        mismatch: largest logp_mismatch in the steps so far, in nats.
    """

    def __init__(self, case: Case, toy: bool):
        run = load_config(ROOT / "recipes" / case.recipe, [*case.options, *COMMON, *(TOY if toy else ())])
        rows = make_rows(56 if toy else case.pixels, run.grpo.prompts_per_step)
        with tempfile.TemporaryDirectory() as folder:
            _, processor, token_ids = small_model(Path(folder))
        model = build(config_json.from_dict(HUB["toy" if toy else case.size] | token_ids), DTYPES[run.model.dtype])
        inject_adapters(model, run.adapter)
        init_adapters(model, seed=0)
        select_trained(model, run.model.freeze)
        if run.model.activation_checkpointing:
            recompute_blocks(model)
        super().__init__(GRPOTrainer(run, model, processor, World(device=CARD)), rows)
        self.prompts = [row.prompt(processor) for row in rows]
        self.rows = rows
        self.model = model
        self.mismatch = 0.0
        if CARD.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step(self) -> dict[str, float]:
        metrics = super().step()
        self.mismatch = max(self.mismatch, metrics["rollout/logp_mismatch"])
        return metrics

    def sample(self, count: int, num_generations: int, new_tokens: int):
        """Sample completions for the first `count` prompts."""
        self.trainer.run.sampling.max_new_tokens = new_tokens
        self.trainer.sampler(self.prompts[:count], num_generations, [str(i) for i in range(count)])

    def planned_gb(self) -> float:
        """Return the `memory` command's estimate for this step in GB, without the reserve."""
        config = self.model.config
        image_tokens = int((self.prompts[0].input_ids == config.image_token_id).sum())
        text_tokens = len(self.prompts[0].input_ids) - image_tokens
        with mock.patch.dict(os.environ, {"MINIVLMRL_KERNELS": "auto"}):  # the estimate runs on the meta device
            rows = [RowSize(text_tokens, image_tokens)]
            phases = estimate_phases(self.trainer.run, "grpo", MemoryEstimator(config), 1, rows, held_out=())
        return (peak_bytes(phases) - RESERVE) / 1e9


@part
def step(toy: bool):
    """Measure a GRPO step with a 3B model in bfloat16, and its phases."""
    built = measure(STEP, toy, steps=3)
    with timed_phases(built) as seconds:
        report("step with clocks", seconds_of(built.step), "s")
    for label, spent in seconds().items():
        report(f"phase: {label}", spent, "s")


@part
def lora(toy: bool):
    """Measure a GRPO step with a 3B model and LoRA on bfloat16."""
    measure(LORA, toy, steps=2)


@part
def nf4(toy: bool):
    """Measure a GRPO step with a 7B model and LoRA on NF4."""
    measure(NF4, toy, steps=1)


def measure(case: Case, toy: bool, steps: int) -> GRPOStep:
    """Report the seconds, the peak memory beside its estimate, and the largest logp_mismatch in GRPO steps.

    Args:
        steps: number of steps after the first step, which compiles kernels.
    """
    built = GRPOStep(case, toy)
    for number in range(1 + steps):
        report(f"step {number + 1}", seconds_of(built.step), "s")
    if CARD.type == "cuda":
        report("peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    report("peak memory by the command `memory`", built.planned_gb(), "GB")
    report("largest logp_mismatch", built.mismatch, "nats")
    return built


@part
def changes(toy: bool):
    """Measure the 3B step in bfloat16 without some changes."""
    undo(GRPOStep(STEP, toy), "padded MLP of the tower", "wide tiles of logits", "Triton kernel of windows")


@part
def lora_changes(toy: bool):
    """Measure the 3B step with LoRA without some changes."""
    undo(GRPOStep(LORA, toy), "TF32 products of adapters", "16-bit copies of adapters")


def undo(built: GRPOStep, *names: str):
    """Report a step's seconds with all changes, and without each named change."""
    built.step()  # warm-up
    report("step with all changes", seconds_of(built.step), "s")
    for name in names:
        target, value = CHANGES[name]
        patch = mock.patch(target, value)
        try:
            patch.start()
        except AttributeError:
            report_skipped(f"step without: {name}", f"there is no {target}")
            continue
        built.step()  # warm-up
        report(f"step without: {name}", seconds_of(built.step), "s")
        patch.stop()


@contextmanager
def timed_phases(built: GRPOStep) -> Iterator[Callable[[], dict[str, float]]]:
    """Time a step's phases with the GPU's clock, without waiting for the GPU.

    Yields:
        A function that returns the seconds of each phase. Call it after the `with` block.
    """
    targets = {
        "rollout": (sampler, "generate"),
        "prefill, in the rollout": (generate, "prefill"),
        "decode steps, in the rollout": (CapturedDecode, "__call__"),
        "forward": (type(built.trainer), "training_loss"),
        "backward": (Tensor, "backward"),
        "forward of the tower, in prefill and forward": (built.model.visual, "forward"),
        "clipping": (loop, "finish_gradients"),
        "AdamW": (built.optimizer, "step"),
    }
    marks = defaultdict(list)  # for each phase: times (before, after) its calls

    def seconds() -> dict[str, float]:
        synchronize()
        return {label: sum(seconds_between(*pair) for pair in pairs) for label, pairs in marks.items()}

    with ExitStack() as stack:
        for label, (owner, name) in targets.items():
            stack.enter_context(mock.patch.object(owner, name, marked(getattr(owner, name), marks[label])))
        yield seconds


def marked(function: Callable, marks: list) -> Callable:
    """Return the function, extended to append the times before and after each call to a list."""

    @wraps(function)
    def call(*args, **kwargs):
        before = now()
        result = function(*args, **kwargs)
        marks.append((before, now()))
        return result

    return call


def now() -> "torch.cuda.Event | float":
    """Return an event that records when the GPU gets here, or on a CPU the time in seconds."""
    if CARD.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: "torch.cuda.Event | float", after: "torch.cuda.Event | float") -> float:
    return after - before if CARD.type == "cpu" else before.elapsed_time(after) / 1e3


# ---- decoding and profiles -----------------------------------------------------------------------------------------


@part
def decode(toy: bool):
    """Measure the milliseconds of a 3B decode step with 1 to 256 rows.

    The time for a rollout with few tokens is subtracted from the time for a rollout with many tokens, so that the
    prefill and the graph capture do not count.
    """
    built = GRPOStep(STEP, toy)
    few, many = (2, 4) if toy else (32, 160)
    for prompts, generations in ((1, 1), (2, 2)) if toy else ((1, 1), (1, 8), (8, 8), (8, 16), (8, 32)):
        built.sample(prompts, generations, few)  # warm-up
        seconds = {n: fastest(partial(built.sample, prompts, generations, n)) for n in (few, many)}
        spent = 1e3 * (seconds[many] - seconds[few]) / (many - few)
        report(f"{prompts * generations} rows of {prompts} prompts", spent, "ms a token")


def fastest(call: Callable) -> float:
    """Call twice, and return the shorter time in seconds."""
    return min(seconds_of(call) for _ in range(2))


@part
def kernel_times(toy: bool):
    """Report how many kernels a decode step and a micro-batch call, and the kernels that take longest."""
    built = GRPOStep(STEP, toy)
    prompts, generations = (2, 2) if toy else (8, 8)
    few, many = (2, 4) if toy else (8, 24)
    built.sample(prompts, generations, few)  # warm-up
    short, long = (profiled(partial(built.sample, prompts, generations, n)) for n in (few, many))
    report_kernels("decode step", {k: (x - short.get(k, 0)) / (many - few) for k, x in long.items()})
    batches = list(next(built.steps).micro_batches)
    losses = []

    def forward():
        losses.append(built.trainer.training_loss(batches[len(losses)])[0])

    forward()
    losses[0].backward()  # warm-up
    report_kernels("forward of a micro-batch", profiled(forward))
    report_kernels("backward of a micro-batch", profiled(losses[1].backward))


def profiled(call: Callable) -> "dict[str, Tensor]":
    """Return each kernel's number of calls and milliseconds; on a CPU, each operation's."""
    on_gpu = CARD.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as found:
        call()
        synchronize()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return {x.key: torch.tensor([x.count, getattr(x, time_of) / 1e3]) for x in found.key_averages()}


def report_kernels(label: str, kernels: "dict[str, Tensor]", most: int = 12):
    total = sum(kernels.values())
    report(f"{label}: kernels", total[0].item(), "")
    report(f"{label}: all kernels", total[1].item(), "ms")
    for name, found in sorted(kernels.items(), key=lambda item: -item[1][1])[:most]:
        report(f"{label}: {found[0].item():.0f} x {name[:90]}", found[1].item(), "ms")


# ---- TRL -----------------------------------------------------------------------------------------------------------


@part
def trl_step(toy: bool, attention: str):
    """Measure TRL's whole GRPO steps with the same model, prompts and completions as the part `step`.

    Gradient checkpointing is on, as in TRL's examples, and a micro-batch is a prompt with its completions.
    """
    if attention != "sdpa" and CARD.type == "cpu":
        return report_skipped(f"step with {attention}", "this part needs a GPU")
    pixels, prompts, new_tokens = (56, 2, 4) if toy else (STEP.pixels, 8, 256)

    def report_step(number: int, seconds: float) -> bool:
        report(f"{attention}: step {number}", seconds, "s")
        if CARD.type == "cuda":
            report(f"{attention}: peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
        return seconds > 55  # then the second step is skipped

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        small, processor, token_ids = small_model(Path(folder))
        save_model(path, small, processor)
        config = config_json.from_dict(HUB["toy" if toy else STEP.size] | token_ids)
        model = twin(build(config, torch.float32 if toy else torch.bfloat16))
        model.set_attn_implementation(attention)
        model.generation_config.eos_token_id = None  # so that all completions have the same length
        generation = {"min_new_tokens": new_tokens, "suppress_tokens": sorted(token_ids.values())}
        trainer = trl_side(
            model, path, make_rows(pixels, prompts), 2, trl_clock(report_step), new_tokens, gradient_checkpointing=True,
            per_device_train_batch_size=8, gradient_accumulation_steps=prompts, generation_kwargs=generation, beta=0.0,
            learning_rate=1e-6,
        )  # fmt: skip
        sampled = []
        generate_and_score = marked(trainer._generate_and_score_completions, sampled)
        with mock.patch.object(trainer, "_generate_and_score_completions", generate_and_score):
            trainer.train()
        synchronize()
    for pair in sampled:
        report(f"{attention}: sampling and rewards of a step", seconds_between(*pair), "s")


if __name__ == "__main__":
    run_part(__doc__, globals())
