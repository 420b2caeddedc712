"""The memory plan against tensors that are really there, on the CPU."""

import json
import re
from pathlib import Path

import pytest
import torch
from hub_configs import real_config

from benchmarks import tower_pieces
from minivlmrl import attention
from minivlmrl.__main__ import main as start
from minivlmrl.adapters.lora import adapters, dropout
from minivlmrl.batch import pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import SamplingConfig, chooser, draw_by, generate
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.kernels import linear_log_softmax
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.run import plan as plans
from minivlmrl.run.config import RunConfig, load_config
from minivlmrl.run.optimizer import build_optimizer
from minivlmrl.run.plan import GB, IMAGE_TOKENS, TEXT_TOKENS, Costs, LiveBytes, Work, plan
from minivlmrl.sampling.filters import SamplingOptions
from minivlmrl.sampling.pieces import pieces
from minivlmrl.scale.checkpoint import initialize
from minivlmrl.scale.sharding import ShardingSection, recompute_blocks

import tiny
from stages import STAGES

BFLOAT16 = ["--model.dtype=bfloat16", "--model.compute_dtype=null"]
LORA = ["--adapter.r=16", "--adapter.target=[language, vision, merger]"]
WIDER = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
MODEL = tiny.RUN_MODEL | {"image_token_id": 400, "video_token_id": 401}
CONFIGS = {
    "tied": MODEL | {"tie_word_embeddings": True, "vocab_size": 2000},
    "wider": {**MODEL, **WIDER, "vision_config": tiny.RUN_MODEL["vision_config"] | {"out_hidden_size": 64}},
}
WORK = Work(prompts=2, num_generations=3, text_tokens=150, image_tokens=64, completion_tokens=40)


@pytest.fixture(params=CONFIGS)
def config(request):
    return ModelConfig.from_dict(CONFIGS[request.param])


def real(config, work):
    """The model and a batch of the planned lengths, with numbers in them."""
    model = Qwen2_5_VL(config)
    initialize(model, torch.Generator().manual_seed(0))
    grid = torch.tensor([[1, 16, 16]])
    ids = torch.cat([torch.full((64,), config.image_token_id), torch.randint(0, 400, (work.text_tokens,))])
    prompt = Prompt(ids, torch.rand(256, config.vision_config.patch_dim), grid)
    return model, prompt


def near(planned, measured):
    assert planned == pytest.approx(measured, rel=0.1)


def run_config(**sections):
    run = RunConfig(stages=["grpo"], sampling=SamplingOptions(max_new_tokens=WORK.completion_tokens), **sections)
    run.grpo.num_generations, run.grpo.prompts_per_step, run.grpo.micro_batch_size = 3, 2, 2
    return run


FORMS = {
    "all weights": [],
    "8-bit AdamW on bfloat16": ["--optimizer.name=adamw_8bit", *BFLOAT16],
    "LoRA on bfloat16, recomputed": [*LORA, *BFLOAT16, "--model.activation_checkpointing=true"],
    "LoRA with dropout": [*LORA, *BFLOAT16, "--adapter.dropout=0.1"],
    "LoRA on NF4": [*LORA, *BFLOAT16, "--adapter.quantize=nf4"],
    "a group divided": ["--grpo.max_tokens_per_micro_batch=300"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_peak_of_a_step(form, home, monkeypatch):
    """Weights, moments and what a forward and backward adds, of a run's own model, optimizer and micro-batches."""
    monkeypatch.setattr("minivlmrl.kernels.prompt_slots.SHARED_BYTES", 0)
    config = ModelConfig.from_dict(CONFIGS["tied" if form.startswith("8-bit") else "wider"])
    sizes = ["--grpo.num_generations=3", "--grpo.prompts_per_step=2", "--grpo.micro_batch_size=2"]
    sizes += [f"--sampling.max_new_tokens={WORK.completion_tokens}", "--stages=[grpo]"]
    run = load_config(home / "recipe.yaml", [*sizes, *FORMS[form]])
    planned = plan(run, "grpo", Costs(config), 1, WORK.text_tokens, WORK.image_tokens)["train"]
    _, prompt = real(config, WORK)
    model = Costs(config).build(run).to_empty(device="cpu")
    if config.tie_word_embeddings:  # each of the two has got memory of its own
        model.lm_head.weight = model.model.embed_tokens.weight
    initialize(model, torch.Generator().manual_seed(0))
    weights = [*model.parameters(), *model.buffers()]
    if run.model.activation_checkpointing:
        recompute_blocks(model)
    ids = torch.randint(0, 400, (WORK.completion_tokens,))
    lengths, most = [(len(prompt.input_ids), [len(ids)] * 3)] * 2, run.grpo.max_tokens_per_micro_batch
    piece = pieces(lengths, 2, most)[0]
    assert len(piece) == (6 if most is None else 2)
    prompts = len({i for i, _ in piece})
    batch = pack([prompt] * prompts, [[ids] * min(3, len(piece))] * prompts, model.config)

    def forward_and_backward():
        with dropout(model, run.adapter.dropout, "plan"):
            per_token_logps(model, batch)[0].sum().backward()

    optimizer = build_optimizer(model, run.grpo, run.optimizer)
    forward_and_backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with LiveBytes([*weights, *gradients, batch.pixel_values]) as live:  # of a second micro-batch
        forward_and_backward()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values()]
    found = {"weights": weights, "gradients": gradients, "optimizer": moments}
    held = {name: sum(x.nbytes for x in tensors) for name, tensors in found.items()}
    assert {name: planned[name] for name in held} == pytest.approx(held, rel=0.1)
    measured = sum(held.values()) + live.most + batch.pixel_values.nbytes
    near(sum(size for name, size in planned.items() if name != "logits"), measured)


def test_a_tower_in_pieces():
    """Planned within 10 % of what is measured; a tower in pieces holds no more of 16 frames than of 4."""
    found = {case: tower_pieces.measure(*case) for case in ((4, None), (4, 32), (16, 32))}
    for _, measured, planned in found.values():
        near(planned, measured)
    towers = {case: tower for case, (tower, *_) in found.items()}
    assert towers[16, 32] < 1.1 * towers[4, 32] < towers[4, None]


def test_sharded_nf4_is_gathered_packed(config, home):
    """On every rank during a rollout: half a byte a value under adapters, 2 of all others, with blocks filled up."""
    given = [*LORA, *BFLOAT16, "--adapter.quantize=nf4", "--sharding.enabled=true", "--stages=[grpo]"]
    run = load_config(home / "recipe.yaml", given)
    model = Costs(config).build(run)
    packed = sum(-(-layer.in_features * layer.out_features // 64) * 32 for layer in adapters(model).values())
    others = sum(p.numel() * 2 for p in model.parameters() if p.is_floating_point())
    phases = plan(run, "grpo", Costs(config), 2, WORK.text_tokens, WORK.image_tokens)
    assert phases["rollout"]["gathered"] == packed + others > phases["train"]["gathered"] / 2


def test_keys_and_values(config, monkeypatch):
    sizes, original = [], attention.DecodeAttention.__init__

    def measured(self, *arguments, **options):
        original(self, *arguments, **options)
        sizes.append(sum(x.nbytes for layer in (*self.prompt, *self.own) for x in layer))

    monkeypatch.setattr(attention.DecodeAttention, "__init__", measured)
    model, prompt = real(config, WORK)
    choose = chooser(SamplingConfig(), [])
    generate(model, [prompt] * 2, 3, WORK.completion_tokens, choose)
    near(Costs(config).keys_and_values(torch.float32, WORK), sizes[0])


def test_one_draw(config):
    logits = torch.randn(6, config.vocab_size)
    uniform = torch.rand(6, dtype=torch.float64)
    with LiveBytes([logits]) as live:
        chooser(SamplingConfig(), [], draw_by(uniform[:, None]))(logits, torch.arange(6), 0)
    near(Costs(config).one_draw(torch.float32, SamplingOptions(), 6), live.most + logits.nbytes)


def test_the_piece_of_logits(config):
    states, head = torch.randn(240, config.hidden_size), torch.randn(config.vocab_size, config.hidden_size)
    with LiveBytes([states, head]) as live:
        linear_log_softmax._score_by_rows(states, head, torch.zeros(240, dtype=torch.long), 1.0)
    near(linear_log_softmax.piece_bytes(240, config.vocab_size, torch.float32, "cpu"), live.most)


def test_what_an_option_saves():
    """By hand, at 1000 parameters a layer or so: what is cut into shards, and what is not there at all."""
    costs, lengths = Costs(ModelConfig.from_dict(MODEL)), (WORK.text_tokens, WORK.image_tokens)
    alone = plan(run_config(), "grpo", costs, 1, *lengths)["train"]
    run = run_config(sharding=ShardingSection(enabled=True))
    shared = plan(run, "grpo", costs, 4, *lengths)["train"]
    for name in ("weights", "optimizer", "gradients"):
        assert shared[name] == alone[name] / 4
    assert "reference" not in alone
    run = run_config()
    run.grpo.beta, run.reference.num_shared_layers = 0.1, 1
    half = plan(run, "grpo", costs, 1, *lengths)
    assert 0 < half["train"]["reference"] < half["train"]["weights"]
    assert half["train"]["optimizer"] < alone["optimizer"]
    run = run_config(sharding=ShardingSection(enabled=True, cpu_offload=True))
    assert plan(run, "grpo", costs, 4, *lengths)["train"]["weights"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_plan(stage):
    costs = Costs(ModelConfig.from_dict(MODEL))
    phases = plan(run_config(), stage, costs, 2, WORK.text_tokens, WORK.image_tokens)
    assert ("rollout" in phases) == (stage in ("grpo", "ppo")) and phases["train"]["gradients"] > 0
    assert ("reference" in phases["train"]) == (stage in ("dpo", "kto", "ppo"))
    lines = plans.table(phases, 80 * GB).splitlines()
    assert lines[0] == f"| GB on each GPU | {' | '.join(phases)} |" and lines[-1].startswith("| all | ")


def test_the_smallest_saving_is_suggested():
    """Nothing is asked for that is not needed."""
    needs = {"activation_checkpointing": 50, "sharding.enabled": 30, "micro_batch_size": 5}

    def make(overrides):
        return 100 - sum(size for name, size in needs.items() if any(name in o for o in overrides))

    assert plans.smallest_saving(make, "grpo", 100) == []
    assert plans.smallest_saving(make, "grpo", 70) == ["--model.activation_checkpointing=true"]
    both = ["--model.activation_checkpointing=true", "--sharding.enabled=true"]
    assert plans.smallest_saving(make, "grpo", 20) == both
    assert plans.smallest_saving(make, "grpo", 10) is None


def test_the_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    small = ["--text_tokens", "20", "--image_tokens", "16", "--sampling.max_new_tokens=8"]
    start(["plan", "--model", str(file), "--gpus", "2", "recipes/own_data.yaml", *small])
    shown = capsys.readouterr().out
    assert f"{Costs(ModelConfig.from_dict(MODEL)).parameters:,} parameters; 2 GPUs of 80 GB" in shown
    assert "grpo" in shown and "too much" not in shown
    start(["plan", "--model", str(tmp_path / "config.json"), "--gpu_memory", "1", *small])
    assert "does not fit: take more GPUs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_small_card_is_told_of_the_host_the_disk_and_lora(tmp_path, capsys):
    """A 3B of 3.75 billion weights in 16 bytes each (15 with the tied head's share): 60 GB in the host's memory."""
    (tmp_path / "config.json").write_text(json.dumps(real_config("Qwen2.5-VL-3B")))
    start(["plan", "--model", str(tmp_path / "config.json"), "--gpu_memory", "24", "--grpo.prompts_per_step=1"])
    shown = capsys.readouterr().out
    host, state = map(float, re.search(r"([\d.]+) GB of host memory for each GPU; ([\d.]+) GB of disk", shown).groups())
    parameters = int(re.search(r"([\d,]+) parameters", shown)[1].replace(",", ""))
    assert host == pytest.approx(16 * parameters / GB, rel=0.01) and state == pytest.approx(host * 3 / 4, rel=0.01)
    assert re.search(r"over [\d.]+ s a step by the data sheet of an L4", shown)
    assert "LoRA fits with --adapter.r=16 --model.dtype=bfloat16 --model.compute_dtype=null: " in shown


@pytest.mark.parametrize(("options", "passes"), [([], 6), (LORA, 4), (["--model.activation_checkpointing=true"], 8)])
def test_the_least_seconds_of_a_step_by_hand(options, passes):
    """A card of 1 FLOP and 1 byte a second; 3 prompts of 7 tokens with 2 answers of 5, decoded for two steps."""
    sizes = ["--grpo.prompts_per_step=3", "--grpo.num_generations=2", "--grpo.steps_per_generation=2"]
    run = load_config("recipes/own_data.yaml", ["--model.activation_checkpointing=false", *sizes, *BFLOAT16, *options])
    run.sampling.max_new_tokens, costs = 5, Costs(ModelConfig.from_dict(MODEL))
    seconds = plans.least_seconds(run, "grpo", costs, 1, 7, 1, 1)
    assert seconds == costs.backbone * (3 * (passes * (7 + 10) + 2 * 7) + 5 * 2 / 2)


@pytest.mark.slow
def test_recipes_fit_the_cards_that_their_heads_name():
    """Each recipe of a real size says what it needs on one card of 80 GB, and with which options on one of 24 GB."""
    costs, recipes = Costs(ModelConfig.from_dict(real_config("Qwen2.5-VL-3B"))), []
    for path in sorted(Path("recipes").glob("*.yaml")):
        head = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# "))
        if "80 GB: " not in head:
            continue
        recipes.append(path.stem)
        sizes = (re.search(text, head)[1] for text in (r"80 GB: (\d+) GB by", r": (\d+) GB on the card"))
        by_plan, on_small = map(int, sizes)
        small = re.search(r"on the card with (--\S+ --\S+[^,. ])", head)[1].split()
        for options, expected, card in (([], by_plan, 80), (small, on_small, 24)):
            run = load_config(path, options)
            [stage] = run.stages
            needed = plans.most(plan(run, stage, costs, 1, TEXT_TOKENS, IMAGE_TOKENS)) / GB
            assert round(needed) == expected <= card, (path, options)
    assert recipes == ["own_data", "own_pairs", "rec_qwen2_5_vl_3b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "other", "options"),
    [
        ("rec_qwen2_5_vl_3b_one_card", "Qwen2.5-VL-3B", 10, ["--adapter.quantize=nf4"]),
        ("cls_qwen2_vl_2b", "Qwen2-VL-2B", 13, ["--adapter.r=64", *BFLOAT16]),
        ("lora_7b", "Qwen2.5-VL-7B", 25, ["--adapter.quantize=null"]),
        ("rec_qwen3_vl_4b_one_card", "Qwen3-VL-4B", 12, ["--adapter.quantize=nf4"]),
        ("lora_qwen3_vl_8b", "Qwen3-VL-8B", 27, ["--adapter.quantize=null"]),
    ],
)
def test_recipes_of_one_card_fit_it(name, model, other, options):
    path, costs = Path("recipes") / f"{name}.yaml", Costs(ModelConfig.from_dict(real_config(model)))
    head = " ".join(line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# "))
    card, by_plan = map(int, re.search(r"card of (\d+) GB: (\d+) GB by `python -m minivlmrl plan`", head).groups())
    phases = [plan(load_config(path, o), "grpo", costs, 1, TEXT_TOKENS, IMAGE_TOKENS) for o in ([], options)]
    found = [plans.most(phase) / GB for phase in phases]
    assert [round(size) for size in found] == [by_plan, other] and found[0] <= card
    assert f"{other} GB" in head and model.partition("VL-")[2] in head
    if model.startswith("Qwen3"):  # docs/memory.md has a line of it
        [line] = [row for row in Path("docs/memory.md").read_text().splitlines() if row.startswith(f"| {name} |")]
        fits = {size: ", ".join(str(card) for card in (24, 48, 80) if size <= card) for size in found}
        assert line.strip("| ").split(" | ")[1:] == [f"{size:.1f}: {fits[size]}" for size in sorted(found)[::-1]]


def test_a_run_that_does_not_fit_is_refused(checkpoint, home):
    """By the same numbers as the command; the reserve alone is 3 GB."""
    run = load_config(home / "recipe.yaml", [f"--model.path={checkpoint}", "--model.config=null"])
    plans.check_memory(run, 1, 4 * GB)
    with pytest.raises(
        ValueError, match=r"^sft needs about 3\.\d GB on each of 2 GPUs, and one has 2\.0: .*check_memory"
    ):
        plans.check_memory(run, 2, 2 * GB)


def test_an_image_has_as_many_tokens_as_its_family_makes_of_it(home, tmp_path, monkeypatch):
    """One is 28 x 28 pixels, of Qwen3-VL 32 x 32."""
    vision = tiny.RUN_QWEN3["vision_config"] | {"patch_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(tiny.RUN_QWEN3 | {"vision_config": vision}))
    given = [f"--model.path={tmp_path}", "--model.config=null", f"--data.max_pixels={50 * 32**2}", "--stages=[sft]"]
    seen = []
    monkeypatch.setattr(plans, "plan", lambda *arguments: seen.append(arguments[-1]) or {})
    monkeypatch.setattr(plans, "most", lambda phases: 0)
    plans.check_memory(load_config(home / "recipe.yaml", given), 1, GB)
    assert seen == [50]


def test_computing_in_bfloat16_halves_what_is_computed_and_the_reference():
    costs, lengths = Costs(ModelConfig.from_dict(MODEL)), (WORK.text_tokens, WORK.image_tokens)
    run = run_config()
    run.grpo.beta = 0.1
    plain = plan(run, "grpo", costs, 1, *lengths)["train"]
    run.model.compute_dtype = "bfloat16"
    half = plan(run, "grpo", costs, 1, *lengths)["train"]
    assert all(half[name] == plain[name] for name in ("weights", "optimizer", "gradients"))
    assert half["reference"] == plain["reference"] / 2
    assert half["forward and backward"] < plain["forward and backward"]  # norms and the tower's rotary stay float32
    run.reference.sync_ref_model = True  # a reference that moves needs all its digits
    assert plan(run, "grpo", costs, 1, *lengths)["train"]["reference"] == plain["reference"]
