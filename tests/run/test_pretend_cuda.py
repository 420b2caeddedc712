"""Test on a simulated GPU (pretend_cuda.py) that no operation mixes devices, and count waits for the GPU."""

import json
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minivlmrl.distributed.process_group import World
from minivlmrl.model import lora, vision
from minivlmrl.monitor.memory import memory_check
from tests.helpers import tiny
from tests.helpers.pretend_cuda import CUDA, PretendCuda
from tests.helpers.runs import metrics
from tests.helpers.stages import Stage, write_recipe

SMALL = [
    "--data.eval_rows=1", "--state_steps=1", "--rewards={letters: 1, format: 0.5}", "--grpo.beta=0.1",
    "--grpo.max_steps=1", "--grpo.prompts_per_step=2", "--grpo.micro_batch_size=1", "--sampling.max_new_tokens=3",
]  # fmt: skip


def test_a_reference_of_adapters_stays_behind(tmp_path, varied_rollouts):
    """The reference exchanges the data of parameters; its KL is that of the CPU."""
    write_recipe(tmp_path)
    kl = []
    for device in (CUDA, torch.device("cpu")):
        with PretendCuda() if device == CUDA else nullcontext():
            stage = Stage(tmp_path, "grpo", "--grpo.beta=0.1", "--adapter.r=2", world=World(device=device))
            kl.append(stage.go(2)[1]["kl"])
    assert kl[0] == pytest.approx(kl[1], rel=1e-3) and kl[1] > 0


def test_a_run_mixes_no_devices(run, quick, varied_rollouts):
    with PretendCuda() as gpu:
        folder = run(*SMALL, "--stages=[grpo]")
    assert gpu.waits.total() > 100 and (folder / "checkpoint").is_dir()
    # the clock counts events of the GPU, and the step has two micro-batches
    once, twice = ("sampling", "rewards", "scoring", "update", "optimizer"), ("preparation", "forward", "backward")
    expected = dict.fromkeys(once, 1.0) | dict.fromkeys(twice, 2.0)
    assert metrics(folder, "timings.jsonl")[0]["phases"] == expected


def test_a_run_on_a_t4(run, user_data, quick, varied_rollouts, monkeypatch, capsys):
    """On a T4, attention is in float32 in all phases, and the largest batches are tried before the first step."""
    dtypes, tried = set(), []
    sdpa, try_batches = F.scaled_dot_product_attention, memory_check.try_largest_batches

    def attention(q, *given, **options):
        dtypes.add(q.dtype)
        return sdpa(q, *given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(memory_check, "try_largest_batches", lambda *given: tried.append(try_batches(*given)))
    options = ["--model.dtype=bfloat16", "--model.compute_dtype=null", "--adapter.r=2"]
    with PretendCuda(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (14.5e9, 15.8e9))
        folder = run(*user_data[:2], *options, *SMALL, "--stages=[grpo]")
    text = "device: Tesla T4 (compute capability 7.5, 14.5 of 15.8 GB free); ranks: 1; kernels"
    assert text in capsys.readouterr().out
    assert dtypes == {torch.float32} and len(tried) == 1 and (folder / "checkpoint").is_dir()


STEPS = {  # name: (options, dtype of the model)
    "float32": ([], torch.float32),
    "bfloat16": (["--model.dtype=bfloat16"], torch.bfloat16),
    "LoRA on bfloat16": (["--model.dtype=bfloat16", "--adapter.r=2"], torch.bfloat16),
}


@pytest.mark.parametrize("name", STEPS)
def test_waits_of_a_grpo_step(tmp_path, varied_rollouts, name):
    """A step of two micro-batches may wait at most 13 times for the GPU; never raise the limit."""
    write_recipe(tmp_path)
    vision_config = tiny.RUN_MODEL["vision_config"] | {"intermediate_size": 20}  # padded to 24 columns
    (tmp_path / "model.json").write_text(json.dumps(tiny.RUN_MODEL | {"vision_config": vision_config}))
    options, dtype = STEPS[name]
    options = [*options, "--sampling.stop_token_ids=[]"]  # no completion ends early
    paths = [
        mock.patch.object(vision.MLP, "forward_padded", autospec=True, side_effect=vision.MLP.forward_padded),
        mock.patch.object(lora.AdapterSum, "backward", side_effect=lora.AdapterSum.backward),
    ]
    with PretendCuda() as gpu, paths[0] as padded, paths[1] as tf32:
        stage = Stage(tmp_path, "grpo", *options, dtype=dtype, world=World(device=CUDA))
        stage.go()  # the first step fills caches
        gpu.waits.clear()
        [metrics] = stage.go()
    assert gpu.waits.total() <= 13, gpu.waits
    assert bool(padded.call_count) == (dtype == torch.bfloat16) and bool(tf32.call_count) == ("LoRA" in name)
    assert metrics["grad_norm"] > 0 and metrics["rollout/logp_mismatch_rms"] < 0.03
