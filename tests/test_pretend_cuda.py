"""What a card would refuse or wait for, found without one: see pretend_cuda.py."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import launch, shards_bytes, stage_on_ranks
from pretend_cuda import CUDA, DeviceMix, PretendCuda, pretend
from runs import metrics
from test_ranks import REFERENCE, assert_equal, prepare

from minivlmrl.batch import pack
from minivlmrl.generate import SamplingConfig
from minivlmrl.logprobs import per_token_logps
from minivlmrl.scale.ranks import World
from minivlmrl.tools import ask

import tiny
from draws import prompts, sample
from stages import Stage, write_recipe


def on_card(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(CUDA, dtype)


# ---- the tool finds what is planted --------------------------------------------------------------------------------

REFUSED = {
    "sum": lambda x: x + torch.ones(3),
    "ids on the host": lambda x: F.embedding(torch.tensor([0, 1]), on_card(4, 2)),
    "the host's tensor by an index on the card": lambda x: torch.ones(3)[x.long()],
    "values on the host": lambda x: x.index_put_((x.long(),), torch.ones(3)),
    "numpy": lambda x: x.numpy(),
}
ALLOWED = {
    "a number on the host": lambda x: x * torch.tensor(2.0),
    "where with a number": lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
    "a view, from the end": lambda x: x[-2:] + x.to("cuda")[:2],
}
WAITED_FOR = {
    "item": lambda x: x[0].item(),
    "a mask": lambda x: x[x > 1],
    "an index on the host": lambda x: x[torch.tensor([0, 2])],
    "repeat_interleave by a tensor": lambda x: x.repeat_interleave(x.long()),
    "copied to the card": lambda x: x.copy_(torch.ones(3)),
    "copied from the card": lambda x: x.cpu() + torch.ones(3),
    "made of a list": lambda x: torch.tensor([1, 2], device=CUDA),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mixed_devices_are_refused(name):
    with PretendCuda(), pytest.raises((DeviceMix, TypeError), match="cuda:0"):
        REFUSED[name](on_card(3))


@pytest.mark.parametrize("name", ALLOWED | WAITED_FOR)
def test_waits_are_counted(name):
    with PretendCuda() as gpu:
        x = on_card(3)
        gpu.waits.clear()
        (ALLOWED | WAITED_FOR)[name](x)
        assert gpu.waits.total() == (name in WAITED_FOR) and x.device == CUDA
        assert torch.empty(3, device=CUDA).isnan().all()  # uninitialised memory


# ---- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=str)
def test_scores_and_gradients_are_those_of_the_cpu(dtype, close):
    """In bfloat16 through the stand-in of the flash kernel, which knows completions of prompts of any length."""

    def score(model, device):
        generator = torch.Generator().manual_seed(1)
        completions = [[tiny.completion(generator, n).to(device) for n in (1, 4, 9)] for _ in range(4)]
        logps, entropies = per_token_logps(model, pack(prompts(4), completions, model.config, device))
        (logps.sum() + entropies.sum()).backward()
        gradients = [p.grad for p in model.parameters()]
        return [x.detach().cpu() for x in (logps, entropies, *gradients[:: 1 if dtype == torch.float32 else 1000])]

    model = tiny.model(dtype=dtype)
    alone = score(model, "cpu")
    model.zero_grad()
    with PretendCuda():
        card = score(pretend(model), CUDA)
    for ours, expected in zip(card, alone, strict=True):
        scale = 10 if ours.dim() > 1 else 1  # gradients are sums over all tokens
        torch.testing.assert_close(ours, expected, atol=scale * close, rtol=close)


# ---- whole runs ----------------------------------------------------------------------------------------------------

SMALL = [
    "--data.eval_rows=2", "--state_steps=1", "--keep_states=9", "--rewards={letters: 1, format: 0.5}",
    *(f"--{stage}.{option}" for stage in ("sft", "dpo", "kto", "reward_model", "grpo", "ppo")
      for option in ("max_steps=2", "prompts_per_step=2", "micro_batch_size=1")),
]  # fmt: skip
GRPO = ["--stages=[grpo]"]
SHARDED = ["--sharding.enabled=true", "--model.activation_checkpointing=true"]
OFFLOADED = [*SHARDED, "--sharding.cpu_offload=true"]
ADAPTER = ["--adapter.r=4", "--adapter.target=[language, vision, merger]"]
DROPOUT, LAYERS = "--adapter.dropout=0.1", "--rollout.gather_weights=false"
ADAPTED = ["--stages=[ppo]", "--ppo.critic=separate", *ADAPTER, "--adapter.quantize=nf4", DROPOUT]
QUICK = {
    "grpo with a reference": [*GRPO, "--grpo.beta=0.1"],
    "sharded, bfloat16": [*GRPO, *SHARDED, "--model.compute_dtype=bfloat16"],
}
SLOW = {
    "sft, grpo in bfloat16": ["--model.dtype=bfloat16"],
    "grpo, all that is scored before": [
        *GRPO, "--grpo.max_steps=3", "--grpo.steps_per_generation=2", "--grpo.rollout_correction=sequence_mask",
        "--grpo.beta=0.1", "--grpo.top_entropy_quantile=0.5", "--reference.sync_ref_model=true",
        "--reference.ref_model_sync_steps=1", "--grpo.mask_truncated_completions=true", "--grpo.soft_punish_cache=2",
        "--sampling={max_new_tokens: 6, repetition_penalty: 1.1, top_p: 0.9, top_k: 20, min_p: 0.01, "
        "stop_strings: [a]}",
    ],
    "rloo": [*GRPO, "--grpo.loss_type=rloo", "--grpo.beta=0.1", "--reference.num_shared_layers=1",
             "--grpo.max_num_gen_batches=2", "--grpo.num_iterations=2"],
    "mpo, weighted": ["--stages=[dpo]", "--dpo.loss_type=[sigmoid, bco_pair, sft]", "--dpo.use_weighting=true",
                      "--dpo.loss_weights=[0.8, 0.2, 1.0]", "--dpo.precompute_ref_log_probs=true"],
    "kto": ["--stages=[kto]"],
    "ppo, a critic of its own": ["--stages=[ppo]", "--ppo.critic=separate", "--ppo.whiten_rewards=true",
                                 "--ppo.missing_eos_penalty=1", "--ppo.num_ppo_epochs=2"],
    "sharded, layer by layer": [*GRPO, *SHARDED, LAYERS, "--grpo.beta=0.1",
                                "--grpo.multi_objective_aggregation=normalize_then_sum"],
    "reward model, grpo, offloaded": ["--stages=[reward_model, grpo]", "--rewards={reward_model: 1}",
                                      *OFFLOADED, LAYERS],
    "adapters": ["--stages=[sft, grpo]", *ADAPTER, "--model.dtype=bfloat16", "--grpo.beta=0.1", DROPOUT],
}  # fmt: skip
PACKED = "ppo, adapters on NF4, offloaded"
RUNS = QUICK | SLOW | {PACKED: [*ADAPTED, *OFFLOADED]}


@pytest.fixture
def card(run, plain, lively):
    """Train on the card; a failed run leaves no process group."""

    def card(*options, **names):
        with PretendCuda() as gpu:
            folder = run(*SMALL, *options, **names)
        assert gpu.launches.total() > 500
        return folder

    yield card
    if dist.is_initialized():
        dist.destroy_process_group()


# of what else is in their states, or how it is kept
RESUMED = ["grpo, all that is scored before", "reward model, grpo, offloaded", "ppo, a critic of its own"]


LONG = [*(pytest.param(name, marks=pytest.mark.slow) for name in SLOW), shards_bytes(PACKED, marks=[pytest.mark.slow])]


@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_a_run_mixes_no_devices_and_resumes(card, name):
    """With evaluations, checkpoints and states; resumed from the first state it ends with the same bytes."""

    def written(*more):
        folder = card(*RUNS[name], *more)
        files = [folder / "metrics.jsonl", *folder.glob("**/*.safetensors")]
        return min((folder / "states").iterdir()), {file: file.read_bytes() for file in files}

    state, files = written()
    assert len(files) > 1 and (name not in RESUMED or written(f"--resume={state}")[1] == files)


@pytest.mark.slow
def test_offloaded_weights_are_trained_alike(card, checkpoint):
    """From a folder, of which each rank reads its part into host memory; sampled from layer by layer."""
    options = [*GRPO, "--model.config=null", f"--model.path={checkpoint}", "--check_memory=false"]  # plan needs meta

    def lines(name, *more):
        return [list(line.values())[1:] for line in metrics(card(*options, *more, name=name))]

    for line, expected in zip(lines("offloaded", *OFFLOADED, LAYERS), lines("alone"), strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_videos_and_the_command_that_asks_a_model(card, own, rows, checkpoint, capsys):
    folder = card("--stages=[sft]", *own, f"--data.train_file={rows.with_name('film.jsonl')}", "--check_memory=false")
    assert len(metrics(folder)) == 2
    capsys.readouterr()
    with PretendCuda() as gpu:
        ask.main(["--model", str(checkpoint), "--image", str(rows.with_name("0.png")), "--prompt", "Name it.",
                  "--max_new_tokens", "5"])  # fmt: skip
    assert capsys.readouterr().out and gpu.launches.total() > 500


def stage_on_card(folder, overrides, world):
    """One of two processes, each with a card of its own."""
    with PretendCuda():
        result = stage_on_ranks(folder, overrides, replace(world, device=CUDA))
        result.weights = {name: weight.cpu() for name, weight in result.weights.items()}
    return result


@pytest.mark.slow
def test_two_cards_make_what_one_cpu_makes(tmp_path):
    prepare(tmp_path)
    short = [*REFERENCE, "--grpo.max_steps=2"]
    [alone] = launch(1, tmp_path, {"cpu": short})
    ways = {"replicated": [], "offloaded, layer by layer": [*OFFLOADED, LAYERS]}
    for rank in launch(2, tmp_path, {name: [*short, *more] for name, more in ways.items()}, stage_on_card):
        for result in rank.values():
            assert_equal(result, alone["cpu"], 1e-10, 1e-10)


# ---- waits ---------------------------------------------------------------------------------------------------------


def test_waits_of_a_grpo_step(tmp_path):
    """4 prompts, 3 completions each of 6 tokens, two micro-batches: rollout, rewards, losses, update.

    The number only falls; an error shows where the host waits: {(why, file, line): how often}.
    """
    write_recipe(tmp_path)
    options = ["--sampling.stop_token_ids=[]", "--rewards={format: 1}"]  # no completion ends earlier
    with PretendCuda() as gpu:
        stage = Stage(tmp_path, "grpo", *options, dtype=torch.float32, world=World(device=CUDA))
        stage.go()  # what is computed once
        gpu.waits.clear()
        stage.go()
    assert gpu.waits.total() <= 13, gpu.waits


def test_kernels_of_a_decode_step():
    """An eager decode step is as slow as its launches: about 1,700 for the 36 layers of a 3B model."""
    model, launches = tiny.model(dtype=torch.bfloat16), []
    with PretendCuda() as gpu, torch.inference_mode():
        for tokens in (2, 3):
            gpu.launches.clear()
            sample(pretend(model), prompts(1), 4, SamplingConfig(max_new_tokens=tokens), ())
            launches.append(gpu.launches.total())
    assert launches[1] - launches[0] <= 36 * model.config.num_hidden_layers + 50
