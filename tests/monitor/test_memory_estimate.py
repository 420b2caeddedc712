"""Compare the memory estimate with the tensors that exist during a step on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.config.options import LoRAOptions, OptimizerOptions, RunConfig, SamplingOptions, ShardingOptions
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.data.rows import Prompt
from minivlmrl.distributed.micro_batching import split_into_micro_batches
from minivlmrl.distributed.weights import copy_model, recompute_blocks
from minivlmrl.generation import filters, generate, sampler
from minivlmrl.kernels import dense_attention, shared_prefix
from minivlmrl.model import build, config_json, logprobs, lora, value_head, vision
from minivlmrl.model.checkpoint import load_model
from minivlmrl.monitor.memory import estimate as memory
from minivlmrl.run.evaluate import evaluation_sampling
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.run.setup import patch_dtype
from tests.helpers import tiny

BFLOAT16 = ["--model.dtype=bfloat16", "--model.compute_dtype=null"]
LORA = ["--adapter.r=16", "--adapter.target=[language, vision, merger]"]
WIDER = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
MODEL = tiny.RUN_MODEL | {"vocab_size": 512, "image_token_id": 400, "video_token_id": 401}
CONFIGS = {
    "tied": MODEL | {"tie_word_embeddings": True, "vocab_size": 2000},
    "wider": {**MODEL, **WIDER, "vision_config": tiny.RUN_MODEL["vision_config"] | {"out_hidden_size": 64}},
}
ROWS = [RowSize(text_tokens=150, image_tokens=64)]
WORK = memory.BatchShape((*ROWS, *ROWS), num_generations=3, completion_tokens=40)


def run_config(**sections):
    run = RunConfig(stages=["grpo"], sampling=SamplingOptions(max_new_tokens=WORK.completion_tokens), **sections)
    run.grpo.num_generations, run.grpo.prompts_per_step, run.grpo.micro_batch_size = 3, 2, 2
    return run


def estimate(*question):
    return memory.estimate_phases(memory.MemoryQuestion(*question))


def estimator_of(sizes=MODEL):
    return memory.MemoryEstimator(config_json.from_dict(sizes))


def grpo_phases(run, costs, gpus=1):
    return estimate(run, "grpo", costs, gpus, ROWS, ROWS)


FORMS = {
    "all weights": [],
    "LoRA on bfloat16, recomputed": [*LORA, *BFLOAT16, "--model.activation_checkpointing=true"],
    "LoRA on NF4": [*LORA, *BFLOAT16, "--adapter.quantize=nf4"],
    "a group divided": ["--grpo.max_tokens_per_micro_batch=300"],
    "a critic, LoRA": ["--ppo.critic=separate", *LORA],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_peak_of_a_step(form, home, monkeypatch):  # noqa: PLR0915 (one sequence of steps)
    """The estimate is within 10 % of the memory of weights, gradients, optimizer state and activations."""
    monkeypatch.setattr(shared_prefix, "MAX_SCORE_BYTES", 0)
    # as on a GPU, where no kernel for float32 returns the log-sum-exps of attention
    monkeypatch.setattr(shared_prefix, "has_flash_attention", lambda q, k, v: q.dtype == torch.bfloat16)
    monkeypatch.setattr(lora, "is_half_on_gpu", lambda device, dtype: dtype == torch.bfloat16)
    config = config_json.from_dict(CONFIGS["tied" if form == "all weights" else "wider"])
    stage = "ppo" if "critic" in form else "grpo"
    sizes = [f"--{stage}.num_generations=3", f"--{stage}.prompts_per_step=2", f"--{stage}.micro_batch_size=2"]
    sizes += [f"--sampling.max_new_tokens={WORK.completion_tokens}", f"--stages=[{stage}]", "--ppo.kl_coef=0"]
    run = load_config(home / "recipe.yaml", [*sizes, *FORMS[form]])
    estimated = estimate(run, stage, memory.MemoryEstimator(config), 1, ROWS)["training"]
    ids = torch.cat([torch.full((64,), config.image_token_id), torch.randint(0, 400, (ROWS[0].text_tokens,))])
    patches = torch.rand(256, config.vision_config.patch_dim).to(patch_dtype(run))
    prompt = Prompt(ids, patches, torch.tensor([[1, 16, 16]]))
    model = memory.MemoryEstimator(config).build(run).to_empty(device="cpu")
    if config.tie_word_embeddings:  # to_empty has given tied weights separate memory
        model.lm_head.weight = model.model.embed_tokens.weight
    build.initialize(model, torch.Generator().manual_seed(0))
    critics = [value_head.ValueModel(copy_model(model))] if stage == "ppo" else []
    models = torch.nn.ModuleList([model, *critics])
    weights = [*models.parameters(), *models.buffers()]
    if run.model.activation_checkpointing:
        recompute_blocks(model)
    completion = torch.randint(0, 400, (WORK.completion_tokens,))
    most = run.grpo.max_tokens_per_micro_batch
    piece = split_into_micro_batches([(len(ids), [len(completion)] * 3)] * 2, 2, most)[0]
    assert len(piece) == (6 if most is None else 2)
    prompts = len({i for i, _ in piece})
    batch = tiny.pack([prompt] * prompts, [[completion] * min(3, len(piece))] * prompts, model.config)

    def forward_and_backward():
        with lora.dropout(models, run.adapter.dropout, "memory"):
            outputs = [logprobs.per_token_logps(model, batch)[0], *(critic(batch) for critic in critics)]
            sum(output.sum() for output in outputs).backward()

    optimizer = build_optimizer(models, run.grpo, run.optimizer)
    forward_and_backward()
    gradients = [p.grad for p in models.parameters() if p.grad is not None]
    # track the second micro-batch, when gradients already exist
    with memory.AllocationTracker([*weights, *gradients, batch.pixel_values]) as live:
        forward_and_backward()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values()]
    found = {"weights": weights, "gradients": gradients, "optimizer": moments}
    held = {name: sum(x.nbytes for x in tensors) for name, tensors in found.items()}
    estimated["weights"] += estimated.pop("critic", 0)
    assert {name: estimated[name] for name in held} == pytest.approx(held, rel=0.1)
    measured = sum(held.values()) + live.peak + batch.pixel_values.nbytes
    assert sum(size for name, size in estimated.items() if name != "logits") == pytest.approx(measured, rel=0.1)


def test_padded_columns_of_the_tower_are_estimated(monkeypatch):
    """In 16 bits on a GPU, a vision tower with 2,500 columns pads weights to 2,504 columns for the backward pass."""
    vision_config = MODEL["vision_config"] | {"depth": 3, "intermediate_size": 2500}
    costs, run = estimator_of(MODEL | {"vision_config": vision_config}), run_config()
    run.model.dtype = "bfloat16"
    work = memory.BatchShape((RowSize(150, 4),) * 2, 3, completion_tokens=2)

    def peak():
        return costs.activations(run, torch.nn.ModuleList([costs.build(run)]), work)

    peak()  # the first estimate also creates rotary frequencies
    padded = peak()
    monkeypatch.setattr(vision, "is_half_on_gpu", lambda device, dtype: False)
    weights = 3 * 3 * vision_config["hidden_size"] * 2504 * torch.bfloat16.itemsize  # 3 matrices in each of 3 blocks
    assert padded - peak() == pytest.approx(weights, rel=0.2)


ALL_FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize(("options", "size"), [
    ({}, memory.DRAW_BYTES), (ALL_FILTERS, memory.FILTER_BYTES),
])  # fmt: skip
def test_sampling_a_token_takes_the_estimated_memory(options, size):
    sampling = SamplingOptions(**options)
    logits = torch.randn(4, 151936)
    warp = filters.Filters(sampling, [torch.arange(9)] * 4, 1) if options else None
    draw = generate.sample_by_uniforms(torch.rand(4, 1, dtype=torch.float64))
    choose = generate.make_token_sampler(sampling.temperature, [], draw, warp)
    with memory.AllocationTracker([]) as live:
        choose(logits, torch.arange(4), torch.zeros(4, dtype=torch.long))
    assert live.peak + logits.nbytes == pytest.approx(size * logits.numel(), rel=0.01)


def test_what_options_change(tmp_path):
    costs = estimator_of()
    alone = grpo_phases(run_config(), costs)["training"]
    shared = grpo_phases(run_config(sharding=ShardingOptions(enabled=True)), costs, gpus=4)["training"]
    for name in ("weights", "optimizer", "gradients"):
        assert shared[name] == alone[name] / 4
    run = run_config(sharding=ShardingOptions(enabled=True, cpu_offload=True))
    assert grpo_phases(run, costs, gpus=4)["training"]["weights"] == 0
    run = run_config()
    run.grpo.beta = 0.1
    assert "reference" not in alone and grpo_phases(run, costs)["training"]["reference"] == alone["weights"]
    run.sampling = SamplingOptions(engine="vllm", vllm={"dtype": "bfloat16"})  # vLLM copies the weights in bfloat16
    assert grpo_phases(run, costs)["sampling"]["vLLM's weights"] == 2 * costs.parameters
    run.dpo.reference_free = True
    assert "reference" not in estimate(run, "dpo", costs, 1, ROWS, ROWS)["training"]
    # rollouts need copies of adapters in 16 bits
    run = run_config(adapter=LoRAOptions(r=4))
    run.model.dtype = "bfloat16"
    adapted = grpo_phases(run, costs)
    copies = adapted["training"]["gradients"] / 2
    assert [adapted[name].get("16-bit adapters") for name in ("sampling", "training")] == [copies, None]
    # a custom optimizer: the state of SGD with momentum is as large as the weights
    (tmp_path / "my_opt.py").write_text(
        "import torch\n\n\ndef sgd(parameters, rate, betas, weight_decay, momentum=0.0):\n"
        "    return torch.optim.SGD(parameters, rate, momentum)\n"
    )
    for moments in (0, 1):
        run = run_config(optimizer=OptimizerOptions(f"{tmp_path}/my_opt.py:sgd(momentum=0.{9 * moments})"))
        train = grpo_phases(run, costs)["training"]
        assert train["optimizer"] == moments * train["gradients"]


@pytest.mark.parametrize("rank", [0, 4])
def test_once_per_step_keeps_weights_and_gradients(rank):
    costs, found = estimator_of(), []
    for once in (False, True):
        run = run_config(sharding=ShardingOptions(enabled=True, once_per_step=once), adapter=LoRAOptions(r=rank))
        run.model.compute_dtype = "bfloat16"
        found.append(grpo_phases(run, costs, gpus=4)["training"])
    model, (plain, train) = costs.build(run), found
    assert train["gathered"] - plain["gathered"] / 2 == 2 * sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert train["gradients"] - plain["gradients"] == 4 * trained
    assert all(train[name] == plain[name] for name in train.keys() - {"gathered", "gradients"})


@pytest.mark.parametrize("option", ["", "adapter.r=2", "reference.path"])
def test_a_reference_takes_the_estimated_memory(option, stage, checkpoint):
    option = f"reference.path={checkpoint}" if "path" in option else option
    run = stage("dpo", *([f"--{option}"] if option else []), dtype=torch.float32)
    estimated = estimate(run.trainer.config, "dpo", memory.MemoryEstimator(run.model.config), 1, ROWS)["training"]
    trained = [p for p in run.model.parameters() if p.requires_grad]
    found = {"reference": run.trainer.reference.model.parameters(), "gradients": trained}
    assert {name: estimated[name] for name in found} == {name: sum(p.nbytes for p in found[name]) for name in found}


def test_a_reward_model_is_estimated_by_its_own_config(checkpoint):
    run = run_config(rewards={"reward_model": 1.0})
    run.reward_model.path = str(checkpoint)
    estimated = estimate(run, "grpo", estimator_of(CONFIGS["wider"]), 1, ROWS)["training"]["reward model"]
    assert estimated == sum(p.nbytes for p in load_model(checkpoint).parameters())


FAMILY_SIZES = {
    "qwen2_5_vl": CONFIGS["wider"],
    "qwen3_vl": tiny.RUN_QWEN3 | {"image_token_id": 400, "video_token_id": 401},
    "qwen3_5": tiny.RUN_QWEN35 | {"image_token_id": 400, "video_token_id": 401},
}


def deeper(sizes):
    """Return a config with more layers, so that no single tensor outweighs the others."""
    text = {"num_hidden_layers": 8}
    return sizes | ({"text_config": sizes["text_config"] | text} if "text_config" in sizes else text)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_the_peak_of_each_phase(family, home, monkeypatch):
    """The CPU runs the code paths of a GPU."""
    monkeypatch.setattr(shared_prefix, "MAX_SCORE_BYTES", 0)
    monkeypatch.setattr(dense_attention, "MAX_KEYS", 0)
    for module in (shared_prefix, dense_attention):
        monkeypatch.setattr(module, "has_flash_attention", lambda q, k, v: False)
    config = config_json.from_dict(deeper(FAMILY_SIZES[family]))
    estimator = memory.MemoryEstimator(config)
    run = load_config(home / "recipe.yaml", ["--sampling.max_new_tokens=10",
        "--grpo.num_generations=3", "--grpo.prompts_per_step=4", "--sft.micro_batch_size=2",
        "--dpo.micro_batch_size=2", "--sft.prompts_per_step=2", "--dpo.prompts_per_step=2",
        "--sampling.max_batch_tokens=3000", "--sampling.temperature=1"])  # fmt: skip
    model = estimator.build(run).to_empty(device="cpu")
    build.initialize(model, torch.Generator().manual_seed(0))
    weights = [*model.parameters(), *model.buffers()]
    ids = torch.cat([torch.full((64,), config.image_token_id), torch.randint(0, 400, (ROWS[0].text_tokens,))])
    patches = torch.rand(256, config.vision_config.patch_dim).to(patch_dtype(run))
    prompt = Prompt(ids, patches, torch.tensor([[1, 16, 16]]))
    processor = SimpleNamespace(stop_token_ids=())
    answer = torch.randint(0, 400, (10,))

    def sampled(sampling, prompts, num_generations):
        sample = sampler.Sampler(model, processor, sampling)
        with memory.AllocationTracker(weights) as live:
            sample([prompt] * prompts, num_generations, [str(i) for i in range(prompts)])
        return live.peak

    def computed(prompts, num_answers):
        batch = tiny.pack([prompt] * prompts, [[answer] * num_answers] * prompts, config)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in model.parameters()]
        with memory.AllocationTracker([*weights, *gradients, batch.pixel_values]) as live:
            logprobs.per_token_logps(model, batch)[0].sum().backward()
        return live.peak + prompts * prompt.pixel_values.nbytes

    measured = {
        ("grpo", "sampling"): sampled(run.sampling, 4, 3),
        # 13 of the 14 prompts fill a batch
        ("grpo", "evaluation"): sampled(evaluation_sampling(run.sampling), 14, 1),
        ("grpo", "training"): computed(4, 3),
        ("sft", "training"): computed(2, 1),
        ("dpo", "training"): computed(2, 2),
    }
    held = sum(x.nbytes for x in weights)
    estimated = {stage: estimate(run, stage, estimator, 1, ROWS, ROWS) for stage in ("grpo", "sft", "dpo")}
    for (stage, phase), peak in measured.items():
        items = estimated[stage][phase]
        total = held + sum(items.get(name, 0) for name in ("gathered", "keys and values", "activations"))
        assert total == pytest.approx(peak + held, rel=0.03), (stage, phase)


def test_the_largest_batch_by_hand():
    """A prompt counts once for all its completions."""
    rows = [RowSize(text_tokens=10, image_tokens=0)]

    def sizes(*arguments):
        shape = memory.largest_batch(rows, *arguments)
        return len(shape.rows), shape.num_generations

    assert sizes(5, [10, 10], 60) == (2, 2)
    assert sizes(5, [10, 10], None) == (5, 2)
    assert sizes(1, [10, 10, 10], 30) == (1, 2)
    rows.insert(0, RowSize(text_tokens=21, image_tokens=4))
    assert memory.largest_batch(rows, 2, [10], None).rows == tuple(rows)
