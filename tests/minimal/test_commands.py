"""Run the commands of minimal.py on tiny folders and rows."""

import json
import random
import re
import runpy
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file

import minimal
from tests.helpers.links import ROOT
from tests.helpers.pretend_cuda import PretendCuda
from tests.helpers.runs import write_lines
from tests.minimal.pairs import main

OPTIONS = (
    "--max_steps=2", "--warmup_steps=1", "--prompts_per_step=3", "--learning_rate=1e-3", "--num_generations=3",
    "--max_new_tokens=5",
)  # fmt: skip
NAMES = {"grpo": [], "sft": ["--sft"], "dpo": ["--dpo"]}


@pytest.mark.parametrize("stage", NAMES)
def test_rows_are_trained_on_a_gpu_with_less_memory_and_equal_weights(tiny, rows, tmp_path, stage, monkeypatch, capsys):
    """Layers run again only where gradients are computed: not in sampling, and not for the reference.

    safetensors cannot use the simulated GPU, whose autocast does not convert the inputs of a layer.
    """
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    load, save = minimal.load_file, minimal.save_file
    monkeypatch.setattr(minimal, "load_file", lambda file, device: {n: w.to(device) for n, w in load(file).items()})
    monkeypatch.setattr(minimal, "save_file", lambda weights, *a: save({n: w.cpu() for n, w in weights.items()}, *a))
    computed = []
    checkpoint = minimal.checkpoint

    def counted(layer, *arguments, **options):
        computed.append(torch.is_grad_enabled())
        return checkpoint(layer, *arguments, **options)

    monkeypatch.setattr(minimal, "reward", lambda text, solution: len(text) % 3 / 2)  # no random answer is right
    sdpa = minimal.F.scaled_dot_product_attention
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(minimal.F, "scaled_dot_product_attention", lambda *a: (used.append(has_cudnn()), sdpa(*a))[1])
    used, weights = [], []
    with PretendCuda():
        for function in (counted, lambda layer, *arguments, **_: layer(*arguments)):
            monkeypatch.setattr(minimal, "checkpoint", function)
            main(tiny, rows, *NAMES[stage], *OPTIONS, "--beta=0.3", f"--output_dir={tmp_path}")
            assert f"{stage} step 2 of 2: " in capsys.readouterr().out
            weights.append(load_file(tmp_path / "model.safetensors"))
    assert len(computed) > 20 and all(computed) and len(used) > 50 and not any(used)
    before = load_file(tiny / "model.safetensors")
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]) and not torch.equal(weight, before[name]), name


def test_the_seed_determines_the_run(tiny, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(minimal, "reward", lambda text, solution: len(text) % 3 / 2)  # no random answer is right
    weights = []
    for seed, state in ((1, 5), (1, 6), (2, 6)):
        torch.manual_seed(state)
        random.seed(state)
        main(tiny, rows, *OPTIONS, f"--seed={seed}", f"--output_dir={tmp_path}")
        weights.append(load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_products_are_computed_in_bfloat16_on_a_gpu_alone():
    ids = torch.zeros(2, dtype=torch.long)
    with PretendCuda(), minimal.in_bfloat16(minimal.Prompt(ids.to("cuda"), None, [])):
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    with minimal.in_bfloat16(minimal.Prompt(ids, None, [])):
        assert not torch.is_autocast_enabled("cuda")


def test_the_import_switches_cudnns_attention_off_and_asks_cuda_nothing(monkeypatch):
    """A process that has asked CUDA cannot fork, and cuDNN's attention has NaN gradients with a mask."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was asked"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    runpy.run_path(minimal.__file__)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


@pytest.mark.parametrize(("groups", "is_useless"), [
    ([[1.5, 1.5], [0.5, 0.5]], True), ([[1.5, 1.5], [0.5, 1.5]], False), ([[0.0, 0.0], [0.0, 0.0]], True),
])  # fmt: skip
def test_a_step_teaches_something_if_one_group_has_different_rewards(groups, is_useless, capsys):
    minimal.report(minimal.grpo, 2, 20, list(map(torch.tensor, groups)))
    advice = ", equal rewards of a prompt teach nothing; if they stay 0, run --sft first" * is_useless
    assert capsys.readouterr().out == f"grpo step 2 of 20: {torch.tensor(groups).mean():.3f}{advice}\n"


FORM = "<think>a</think><answer>2</answer>"


@pytest.mark.parametrize(("problems", "answers", "asks"), [
    (["How many?", "Count."], ["2", "2"], {"solution": True, "completion": False}),
    (["How many?", "Count."], [FORM, FORM], {"solution": True, "completion": True}),
    (["How many?", "Count."], [FORM, "2"], {"solution": True, "completion": False}),
    (["Write <answer>2</answer>."] * 2, [FORM, FORM], {"solution": False, "completion": False}),
    (["How many?", "Write <answer>2</answer>."], [FORM, FORM], {"solution": True, "completion": True}),
])  # fmt: skip
def test_questions_ask_for_the_form_of_their_answers(tmp_path, problems, answers, asks):
    """SFT on answers in the form has GRPO's question; other answers, and questions that ask themselves, stay alone."""
    row = {"images": [], "solution": "2"}
    rows = [row | {"problem": a, "completion": b} for a, b in zip(problems, answers, strict=True)]
    write_lines(tmp_path / "rows.jsonl", rows)
    for field, expected in asks.items():
        read, template = minimal.read_rows(tmp_path / "rows.jsonl", [field])
        assert template == "{problem}" + minimal.ASK * expected
        assert [row["problem"] for row in read] == [template.replace("{problem}", text) for text in problems]
    assert f"{{problem}}{minimal.ASK}" in " ".join((ROOT / "recipes" / "own_data.yaml").read_text().split())


def test_a_file_without_rows_is_refused(tiny, tmp_path):
    """Without rows, the first step would wait for a row forever."""
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows"):
        main(tiny, tmp_path / "rows.jsonl")


def test_the_folder_is_not_overwritten(tiny, rows, capsys):
    with pytest.raises(SystemExit):
        main(tiny, rows, "--sft", "--max_steps=1", f"--output_dir={tiny / 'x' / '..'}")
    assert "has a model; move it, or choose another --output_dir" in capsys.readouterr().err


def test_an_earlier_model_is_not_overwritten_unless_it_is_tiny(tiny, rows, tmp_path, monkeypatch, capsys):
    """Neither the folder of an earlier run nor that of the model; the commands of the README may be typed twice."""
    monkeypatch.setattr(minimal, "train", lambda *_: None)
    minimal.save(minimal.load(tiny), tmp_path)
    main(tiny, rows, "--sft", f"--output_dir={tmp_path}")
    config = json.loads((tmp_path / "config.json").read_text())
    minimal.write_json(tmp_path / "config.json", config | {"hidden_size": 2048})
    for words in ((tmp_path, rows), (tiny, rows, "--sft"), ()):
        with pytest.raises(SystemExit):
            main(*words, f"--output_dir={tmp_path}")
        assert f"{tmp_path} has a model; move it, or choose another --output_dir" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "expected"), [
    ("--beta=0", "--dpo needs a --beta above 0"),
    ("--num_generations=1", "--num_generations must be at least 2: the rewards of a group are compared"),
    ("--steps=0", "--max_steps must be at least 1"), ("--rows_per_step=0", "--prompts_per_step must be at least 1"),
    ("--max_new_tokens=0", "--max_new_tokens must be at least 1"), ("--beta=-0.1", "--beta must be at least 0"),
    ("--max_pixels=-1", "--max_pixels must be at least 1"), ("--warmup=-1", "--warmup_steps must be at least 0"),
    ("--learning_rate=-1", "--learning_rate must be at least 0"),
    ("--learning_rate=nan", "--learning_rate must be at least 0"),
])  # fmt: skip
def test_a_run_that_would_train_nothing_is_refused(word, expected, monkeypatch, capsys):
    """With a beta of 0, the loss of DPO is log 2 for all models, and a group of one has NaN as advantage."""
    monkeypatch.setattr(minimal, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit):
        main(word, *["--dpo"] * (word == "--beta=0"))
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "copies"), [("sft", 0), ("grpo", 1), ("dpo", 1)])
def test_only_stages_that_read_a_reference_copy_the_model(tiny, rows, tmp_path, monkeypatch, stage, copies):
    made = []
    make_reference = minimal.make_reference
    monkeypatch.setattr(minimal, "make_reference", lambda model: made.append(1) or make_reference(model))
    main(tiny, rows, *NAMES[stage], *OPTIONS, "--beta=0.3", f"--output_dir={tmp_path}")
    assert len(made) == copies


def test_each_row_comes_once_before_any_comes_again(capsys):
    seen = []

    def stage(model, reference, rows, options):
        seen.extend(rows)
        yield model.weight.sum(), torch.tensor(0.0)

    random.seed(0)
    options = Namespace(max_steps=7, prompts_per_step=3, learning_rate=1e-3, warmup_steps=1, beta=0.0)
    model = torch.nn.Linear(1, 1)
    model.updates = 0
    minimal.train(model, list(range(7)), stage, options)
    orders = [seen[i : i + 7] for i in (0, 7, 14)]
    assert [sorted(order) for order in orders] == [list(range(7))] * 3
    assert len({*map(tuple, orders)}) == 3
    assert capsys.readouterr().out.endswith("stage step 7 of 7: 0.000\n")


@pytest.mark.parametrize("stage", NAMES)
def test_the_built_in_task_trains_with_each_stage(stage, tmp_path, monkeypatch, capsys):
    train, draw_row = minimal.train, minimal.draw_row
    monkeypatch.setattr(minimal, "draw_row", lambda **options: draws.append(options) or draw_row(**options))
    monkeypatch.setattr(minimal, "accuracy", lambda model, rows: 0.5)
    draws, trained = [], []

    def one_step(model, rows, stage, options):
        trained.append((stage.__name__, options.max_steps, options.prompts_per_step, options.learning_rate))
        train(model, rows, stage, Namespace(**vars(options) | {"max_steps": 1, "prompts_per_step": 3}))

    monkeypatch.setattr(minimal, "train", one_step)
    main(*NAMES[stage], f"--output_dir={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert printed.startswith("sft step 1 of 1: ") and "accuracy after SFT 0.500\n" in printed
    assert printed.endswith(f"\naccuracy after {stage} 0.500\nsaved {tmp_path / 'out'}\n")
    assert trained[0] == ("sft", 40, 32, 3e-3) and [name for name, *_ in trained] == ["sft", stage]
    assert draws.count({"wrong": 0.5}) == 96 and draws.count({}) == 128 + 2560


@pytest.mark.slow
def test_the_command_of_the_readme_learns(tmp_path, capsys):
    main(f"--output_dir={tmp_path}")
    before, after = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "accuracy" in line)
    assert before < 0.6 and after > 0.75


def test_the_help_states_the_memory_that_was_counted():
    text = (ROOT / "benchmarks" / "minimal_memory.py").read_text()
    counted = re.findall(r"^    Qwen2\.5-VL-\dB +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    assert re.search(r"^ +sft +grpo +dpo$", text, re.MULTILINE) and len(counted) == 2
    stated = [str(round(float(gigabytes))) for row in counted for gigabytes in row]
    assert re.findall(r"\b(\d+)(?=,| and| GB)", minimal.__doc__) == stated
