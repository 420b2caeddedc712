"""Test that a run out of memory names the phase in one sentence, and resumes to the same bytes."""

import contextlib
import functools
import re

import pytest
import torch

from minivlmrl.__main__ import main
from minivlmrl.config.options import ModelOptions, RunConfig
from minivlmrl.distributed import saving
from minivlmrl.errors import is_out_of_memory
from minivlmrl.generation import generate
from minivlmrl.monitor.memory.out_of_memory import OutOfMemory, cures
from minivlmrl.run import evaluate, setup, state_files
from minivlmrl.trainers.base import Trainer
from tests.helpers.runs import LETTERS, metrics

OPTIONS = [
    "--stages=[sft, grpo]", LETTERS, "--sft.max_steps=1", "--grpo.beta=0.1", "--eval_steps=2", "--save_steps=2",
    "--data.eval_rows=2",
]  # fmt: skip
FILES = ["metrics.jsonl", "evaluations.jsonl", "completions.jsonl", "checkpoint/model.safetensors"]
ERRORS = {
    "GPU": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of"),
    "host": (MemoryError, "Unable to allocate 8. EiB"),
    "allocator": (RuntimeError, "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"),
}


@contextlib.contextmanager
def run_out(folder, owner, name, lines, error="GPU", half_done=False):
    """Let a function raise an error while metrics.jsonl has `lines` lines, after its work if half_done."""
    original = getattr(owner, name)
    kind, text = ERRORS[error]

    @functools.wraps(original)
    def call(*arguments, **options):
        fails = (folder / "metrics.jsonl").is_file() and len(metrics(folder)) == lines
        if fails and not half_done:
            raise kind(text)
        result = original(*arguments, **options)
        if fails:
            raise kind(text)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


whole = {}  # contents of uninterrupted runs by their options


@pytest.fixture
def interrupted(run, quick, varied_rollouts, tmp_path):
    """Return a function that interrupts a run, resumes it, compares its files, and returns the error message."""

    def interrupted(*place, options=(), **how):
        options = [*OPTIONS, *options]
        if str(options) not in whole:
            whole[str(options)] = contents(run(*options, name="whole"))
        with run_out(tmp_path / "run", *place, **how), pytest.raises(OutOfMemory) as caught:
            run(*options)
        run(*options, "--resume=auto")
        assert contents(tmp_path / "run") == whole[str(options)]
        return "; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])

    return interrupted


# phase: (owner, function, lines in metrics.jsonl when memory runs out)
PLACES = {
    "load": (Trainer, "__init__", 1),
    "sampling": (generate, "inverse_cdf", 2),
    "forward": (Trainer, "training_loss", 2),
    "evaluation": (evaluate, "generate_and_score", 3),
    "save": (saving, "save_tensors", 3),
}


@pytest.mark.parametrize("phase", PLACES)
def test_each_phase_is_named(interrupted, phase):
    *place, lines = PLACES[phase]
    error = {"forward": "host", "evaluation": "allocator"}.get(phase, "GPU")
    message = interrupted(*place, lines, error=error)
    phrase = f"{'sft' if phase == 'load' else 'grpo'} step {lines - (phase != 'load')}, phase {phase}: "
    assert message.startswith(phrase)
    first_line = ERRORS[error][1].partition("\n")[0]
    assert f"({first_line})" in message and "\n" not in message
    # An error between two updates loses no step; memory that runs out in saving ends before a state is written.
    assert re.search(r"; saved in .*states/\d+: continue with --resume=auto$", message)
    assert ("the longest row is" in message) == (phase not in ("load", "save"))


EARLIER = [
    ((torch.optim.AdamW, "step", 2), [], "no state was saved yet: start the run again$"),
    ((torch.optim.AdamW, "step", 2), ["--state_steps=1"],
     "phase optimizer: .*with --adapter.r=16; saved in STATES/000002: continue with --resume=auto"),
    ((state_files, "save_tensors", 2), ["--state_steps=2"],
     "grpo step 1, phase save: .*; saved in STATES/000001: continue with --resume=auto"),
    (PLACES["forward"], ["--grpo.steps_per_generation=2", "--grpo.max_steps=4", "--state_steps=1"],
     "grpo step 1, phase forward: .*; saved in STATES/000001: continue with --resume=auto"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "options", "sentence"), EARLIER)
def test_a_run_continues_from_an_earlier_state(interrupted, tmp_path, place, options, sentence):
    message = interrupted(*place, half_done=True, options=options)
    assert re.search(sentence.replace("STATES", str(tmp_path / "run" / "states")), message), message


def test_the_exit_code_is_2(run, quick, tmp_path, home, capsys):
    with run_out(tmp_path / "run", setup, "build_weights", 0), pytest.raises(OutOfMemory, match="phase load: memory"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
        (tmp_path / "run" / ".minivlmrl").touch()
        run()
    with run_out(tmp_path / "run", Trainer, "training_loss", 0), pytest.raises(SystemExit) as ended:
        main(["train", str(home / "recipe.yaml"), f"--output_dir={tmp_path / 'run'}"])
    *_, message = capsys.readouterr().err.splitlines()  # before it, the input check says that it ran out of memory
    assert ended.value.code == 2 and message.startswith("sft step 0, phase forward: ")


@pytest.mark.parametrize(("options", "phase", "gpus", "cure"), [
    ({}, "sampling", 1, "--sampling.max_batch_tokens=16384"),
    # an evaluation never samples more than 16,384 tokens at once
    ({"sampling.max_batch_tokens": 65536}, "evaluation", 1, "--sampling.max_batch_tokens=8192"),
    ({"sampling.max_batch_tokens": 1024}, "sampling", 1, "--sampling.max_batch_tokens=512"),
    ({"sampling.max_batch_tokens": 512, "adapter.r": 4}, "sampling", 1, "--adapter.quantize=nf4"),
    ({}, "backward", 1, "--model.activation_checkpointing=true"),
    ({"model.activation_checkpointing": True}, "forward", 1, "--grpo.micro_batch_size=16"),
    ({"grpo.micro_batch_size": 1}, "reference", 1, "--grpo.max_tokens_per_micro_batch=1024"),
    ({}, "optimizer", 2, "--sharding.enabled=true"),
    ({}, "optimizer", 1, "--adapter.r=16"),
    ({"adapter.r": 4}, "optimizer", 1, "--adapter.quantize=nf4"),
    ({"model.freeze": ["language"]}, "optimizer", 1, "--optimizer.name=adamw_8bit"),
    ({"adapter.r": 4, "adapter.quantize": "nf4"}, "load", 1, "--optimizer.name=adamw_8bit"),
    ({}, "load", 2, "--sharding.enabled=true"),
    ({"adapter.r": 4}, "load", 2, "--adapter.quantize=nf4"),  # sharding the base of an adapter saves less
    ({"grpo.prompts_per_step": 16}, "reference", 4, "--grpo.micro_batch_size=2"),  # half of a rank's prompts
])  # fmt: skip
def test_the_option_that_is_named_is_not_set_yet(options, phase, gpus, cure):
    config = RunConfig(model=ModelOptions(dtype="float32"))
    for name, value in options.items():
        section, option = name.split(".")
        setattr(getattr(config, section), option, value)
    assert cures(config, "grpo", phase, gpus)[0] == cure


def test_errors_of_memory_are_recognized():
    assert all(is_out_of_memory(kind(text)) for kind, text in ERRORS.values())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(ValueError("out of memory"))
