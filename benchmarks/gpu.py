"""Measure and test this repository on a GPU. first_gpu_hour.py runs all parts.

python benchmarks/gpu.py step          # a GRPO step with Qwen2.5-VL-3B
python benchmarks/gpu.py step --toy    # tests this script at toy size in float32, even on a CPU

Weights are random, in bfloat16, in the real size. Packages for only one part are imported inside its function, so other
parts run without them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

if os.environ.get("MINIVLMRL_KERNELS") == "triton" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before importing triton below
from common import CARD, part, report, run_part, seconds_of, synchronize
from grpo_step import Ours, make_rows

from minivlmrl.config.loading import load_config
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import recompute_blocks
from minivlmrl.extras.memory.estimate import RESERVE, MemoryEstimator, MemoryQuestion, estimate_phases, peak_bytes
from minivlmrl.generation import generate, sampler
from minivlmrl.generation.cuda_graphs import CapturedDecode
from minivlmrl.model import config_json
from minivlmrl.model.build import initialize, random_model
from minivlmrl.model.checkpoint import DTYPES
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.qwen2_5_vl import Qwen2_5VL
from minivlmrl.model.families.registry import module_name
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import init_adapters, inject_adapters
from minivlmrl.model.packing import pack
from minivlmrl.model.trainable import select_trained
from minivlmrl.run import loop
from minivlmrl.tasks import shapes
from minivlmrl.trainers.grpo import GRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
RECORDED = json.loads((ROOT / "tests" / "recorded" / "hub_configs.json").read_text())  # config.json from the hub


def read_config(size: str) -> dict:
    """Return config.json for Qwen2.5-VL in the size "3B" or "7B", or for a "toy" model that a CPU runs in seconds."""
    if size != "toy":
        return RECORDED[f"Qwen2.5-VL-{size}"]
    config = json.loads((ROOT / "recipes" / "shapes_model.json").read_text())
    config["vocab_size"] = 512
    config["vision_config"] |= {"patch_size": 14, "window_size": 112}  # as in the real models, for the same image sizes
    return config


def small_model(folder: Path):
    """Create the toy model with random weights; return model, processor, and {name: special token id}."""
    path = folder / "toy.json"
    path.write_text(json.dumps(read_config("toy")))
    model, processor = random_model(path, shapes.tokenizer(), seed=0)
    token_ids = {name: value for name, value in vars(model.config).items() if name.endswith("_token_id")}
    return model, processor, token_ids


def build(model_config: ModelConfig, dtype: torch.dtype):
    """Create minivlmrl's model with random weights, sampled on the GPU."""
    with torch.device("meta"):
        ours = Qwen2_5VL().build_model(model_config).to(dtype)
    ours.to_empty(device=CARD)
    if model_config.tie_word_embeddings:
        ours.lm_head.weight = ours.model.embed_tokens.weight
    initialize(ours, torch.Generator(CARD).manual_seed(0))
    return ours


# ---- the repository's programs --------------------------------------------------------------------------------------


@part
def self_test(toy: bool):
    """Compare matrix products and Triton kernels with float64; --toy compares only the products, even on a CPU."""
    from minivlmrl.kernels.self_test import CHECKS, TOLERANCE, largest_error

    kernels = ["float32_matmul"] if toy else list(CHECKS)
    begin = time.perf_counter()
    wrong = []
    if CARD.type == "cuda":  # fail instead of replacing a wrong kernel by PyTorch
        os.environ |= {"MINIVLMRL_KERNELS": "triton", "MINIVLMRL_SELF_TEST": "0"}
    for kernel in kernels:
        error = largest_error(kernel, CARD.type)
        report(f"{kernel}: relative error", error, "")
        if not error <= TOLERANCE:
            wrong.append(kernel)
    report("all kernels", time.perf_counter() - begin, "s")
    assert not wrong, f"wrong kernels: {', '.join(wrong)}"


@part
def tests(toy: bool):
    """Run the tests that need a GPU."""
    run_tests("gpu", "-n", "0", "tests/kernels", "tests/model", "tests/generation")


@part
def vllm_tests(toy: bool):
    """Run the vLLM tests, in which MINIVLMRL_TEST_GPU makes the GPU visible."""
    os.environ["MINIVLMRL_TEST_GPU"] = "1"
    run_tests("slow", "-n", "0", "tests/extras/test_vllm.py")


def run_tests(marker: str, *arguments: str):
    """Run tests with a marker, and report how many pass and fail.

    Raises:
        subprocess.CalledProcessError: a test failed.
    """
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "-m", marker, *arguments, check=False)
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


def run_python(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository, and print its output as it comes.

    Args:
        check: raise subprocess.CalledProcessError if the exit status is not 0.
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


# ---- transformers ---------------------------------------------------------------------------------------------------


@part
def transformers(toy: bool):
    """Compare log-probabilities and gradients with the transformers model, which shares the parameters.

    The batch is one prompt with 1,024 image tokens and 8 completions with 256 tokens. Packed results are compared with
    unpacked rows, one per completion, in our model and in transformers. In float32, with two decoder layers and two
    vision blocks, all must agree.
    """
    torch.backends.cudnn.allow_tf32 = False  # otherwise Conv3d in transformers uses TF32, with ten bits
    with tempfile.TemporaryDirectory() as folder:
        _, processor, token_ids = small_model(Path(folder))
    config = config_json.from_dict(read_config("toy" if toy else "3B") | token_ids)
    vision = replace(config.vision_config, depth=2, fullatt_block_indexes=(1,))  # one block with windows, one without
    shallow = replace(config, num_hidden_layers=2, vision_config=vision)
    compare("two layers, float32", shallow, torch.float32, processor, toy, tolerance=1e-3)
    compare("whole model", config, torch.float32 if toy else torch.bfloat16, processor, toy, tolerance=float("inf"))


def compare(
    label: str, model_config: ModelConfig, dtype: torch.dtype, processor: Processor, toy: bool, tolerance: float
):
    """Report the largest log-probability difference, and the norm of the gradient difference, per peer.

    Args:
        tolerance: maximum difference, in nats and relative to the gradient norm.
    """
    [row] = make_rows(56 if toy else STEP.pixels, 1)
    prompt = processor(row.messages, row.images)
    shape = (2, 6) if toy else (8, 256)
    # ids below 256 are not control tokens
    completions = torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    ours = build(model_config, dtype)
    logps, gradients = logps_and_gradients(packed, ours, ours, prompt, completions, len(completions))
    norm = sum(g.float().square().sum() for g in gradients).sqrt()
    # at most 2 rows, because 4 rows in a 3B model need more than 80 GB
    peers = {"our model, a row each": (packed, ours, 1), "transformers": (padded_rows, twin(ours), 2)}
    for name, (way, model, at_once) in peers.items():
        their_logps, their_gradients = logps_and_gradients(way, model, ours, prompt, completions, at_once)
        squares = sum((a - b).float().square().sum() for a, b in zip(gradients, their_gradients, strict=True))
        differences = (logps - their_logps).abs().max().item(), (squares.sqrt() / norm).item()
        report(f"{label}, {name}: difference of log-probabilities", differences[0], "nats")
        report(f"{label}, {name}: difference of gradients / their norm", differences[1], "")
        assert max(differences) <= tolerance, (label, name)


def logps_and_gradients(way: Callable, model, ours, prompt: Prompt, completions: Tensor, at_once: int):
    """Compute log-probabilities (G, C) and gradients of a weighted sum, `at_once` completions at a time."""
    weights = torch.randn(completions.shape, generator=torch.Generator().manual_seed(1)).to(CARD)
    logps = []
    for part_of, weight in zip(completions.split(at_once), weights.split(at_once), strict=True):
        logps.append(way(model, prompt, part_of))
        (logps[-1] * weight).sum().backward()
    gradients = [p.grad for p in ours.parameters()]
    ours.zero_grad()
    return torch.cat(logps).detach(), gradients


def packed(model: VisionLanguageModel, prompt: Prompt, completions: Tensor) -> Tensor:
    """Compute log-probabilities (n, C) as in training, with the prompt packed only once."""
    batch = pack([prompt], [[Completion(ids) for ids in completions]], model.config, CARD)
    return batch.pad(per_token_logps(model, batch)[0])


def padded_rows(model: torch.nn.Module, prompt: Prompt, completions: Tensor) -> Tensor:
    """Compute log-probabilities (n, C) with the transformers model: logits only for completion tokens, as in TRL."""
    n, C = completions.shape
    ids = torch.cat([prompt.input_ids.repeat(n, 1), completions], dim=1).to(CARD)
    logits = model(
        pixel_values=prompt.pixel_values.repeat(n, 1).to(CARD),
        image_grid_thw=prompt.image_grid_thw.repeat(n, 1).to(CARD),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == model.config.image_token_id).long(),
        use_cache=False,
        logits_to_keep=C + 1,
    ).logits[:, :-1]
    return -F.cross_entropy(logits.float().mT, ids[:, -C:], reduction="none")


def twin(ours: VisionLanguageModel):
    """Create the transformers model with our parameters."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    hub_config = Qwen2_5_VLConfig.from_dict(config_json.to_dict(ours.config))
    with CARD:
        theirs = Qwen2_5_VLForConditionalGeneration._from_config(hub_config, attn_implementation="sdpa")
    theirs.load_state_dict({module_name(name): x for name, x in ours.state_dict(keep_vars=True).items()}, assign=True)
    assert {id(p) for p in theirs.parameters()} == {id(p) for p in ours.parameters()}
    return theirs


# ---- GRPO steps ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """GRPO setup: model size, side of the square images in pixels, recipe, and recipe options."""

    size: str
    pixels: int
    recipe: str
    options: tuple[str, ...] = ()


# 8 prompts with 1,024 image tokens, 8 completions per prompt with 256 tokens; all in bfloat16, even AdamW states
STEP = Case(
    "3B", 896, "own_data.yaml",
    (
        "--model.dtype=bfloat16", "--model.compute_dtype=null", "--model.activation_checkpointing=false",
        "--grpo.prompts_per_step=8", "--grpo.loss_type=grpo", "--grpo.warmup_steps=0",
    ),
)  # fmt: skip
# recipes for a 24 GB card; here 484 tokens per image, up to 512 in the recipes
LORA = Case("3B", 616, "own_data_one_card.yaml")
NF4 = Case("7B", 616, "lora_7b.yaml")
# all completions have the same length, and random completions get different rewards
COMMON = ("--sampling.stop_token_ids=[]", "--rewards={grpo_step:distinct_characters: 1}")
TOY = (
    "--model.dtype=float32", "--model.compute_dtype=null", "--sampling.max_new_tokens=4", "--grpo.prompts_per_step=2",
)  # fmt: skip


class GRPOStep(Ours):
    """Model and trainer for a Case, on the GPU; `step` runs one optimizer step.

    Attributes:
        mismatch: largest logp_mismatch so far, in nats.
    """

    def __init__(self, case: Case, toy: bool):
        config = load_config(ROOT / "recipes" / case.recipe, [*case.options, *COMMON, *(TOY if toy else ())])
        rows = make_rows(56 if toy else case.pixels, config.grpo.prompts_per_step)
        with tempfile.TemporaryDirectory() as folder:
            _, processor, token_ids = small_model(Path(folder))
        model = build(
            config_json.from_dict(read_config("toy" if toy else case.size) | token_ids), DTYPES[config.model.dtype]
        )
        inject_adapters(model, config.adapter)
        init_adapters(model, seed=0)
        select_trained(model, config.model.freeze)
        if config.model.activation_checkpointing:
            recompute_blocks(model)
        super().__init__(GRPOTrainer(config, model, processor, World(device=CARD)), rows)
        self.prompts = [row.prompt(processor) for row in rows]
        self.model = model
        self.mismatch = 0.0
        if CARD.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step(self) -> dict[str, float]:
        metrics = super().step()
        self.mismatch = max(self.mismatch, metrics["rollout/logp_mismatch"])
        return metrics

    def planned_gb(self) -> float:
        """Return the estimate of `minivlmrl memory` for this step in GB, without the reserve."""
        config = self.model.config
        image_tokens = int((self.prompts[0].input_ids == config.image_token_id).sum())
        text_tokens = len(self.prompts[0].input_ids) - image_tokens
        with mock.patch.dict(os.environ, {"MINIVLMRL_KERNELS": "auto"}):  # kernels cannot be forced on meta tensors
            rows = [RowSize(text_tokens, image_tokens)]
            question = MemoryQuestion(self.trainer.config, "grpo", MemoryEstimator(config), 1, rows, held_out=())
            phases = estimate_phases(question)
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
    """Report seconds, measured and estimated peak memory, and the largest logp_mismatch in GRPO steps.

    Args:
        steps: steps after the first one, which compiles kernels.
    """
    built = GRPOStep(case, toy)
    for number in range(1 + steps):
        report(f"step {number + 1}", seconds_of(built.step), "s")
    if CARD.type == "cuda":
        report("peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    report("peak memory by the command `memory`", built.planned_gb(), "GB")
    report("largest logp_mismatch", built.mismatch, "nats")
    return built


@contextmanager
def timed_phases(built: GRPOStep) -> Iterator[Callable[[], dict[str, float]]]:
    """Time the phases of a step with GPU events, without waiting for the GPU.

    Yields:
        A function that returns seconds per phase, to call after the `with` block.
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
    marks = defaultdict(list)  # {phase: (time before, time after) per call}

    def seconds() -> dict[str, float]:
        synchronize()
        return {label: sum(seconds_between(*pair) for pair in pairs) for label, pairs in marks.items()}

    with ExitStack() as stack:
        for label, (owner, name) in targets.items():
            stack.enter_context(mock.patch.object(owner, name, marked(getattr(owner, name), marks[label])))
        yield seconds


def marked(function: Callable, marks: list) -> Callable:
    """Return a function that also appends the times before and after a call to a list."""

    @wraps(function)
    def call(*args, **kwargs):
        before = now()
        result = function(*args, **kwargs)
        marks.append((before, now()))
        return result

    return call


def now() -> "torch.cuda.Event | float":
    """Return an event that records when the GPU gets here; on a CPU, the time in seconds."""
    if CARD.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before: "torch.cuda.Event | float", after: "torch.cuda.Event | float") -> float:
    return after - before if CARD.type == "cpu" else before.elapsed_time(after) / 1e3


if __name__ == "__main__":
    run_part(__doc__, globals())
