"""Check that minimal.py reads a row, a config or an option as the package does, or refuses it with one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

import minimal
from minivlmrl.rewards.text import accuracy
from tests.helpers.links import ROOT
from tests.helpers.runs import write_lines
from tests.minimal.pairs import main

GRPO, SFT, DPO = ["solution"], ["completion"], ["chosen", "rejected"]


ROW = {
    "image": "a.png",
    "problem": "How\u2028many?",
    "solution": "2",
    "completion": "2",
    "chosen": "2",
    "rejected": "3",
}
TURNS = [{"role": "assistant", "content": "2"}]


def read(tmp_path, row, answers=GRPO):
    """Return a row that is read from a file with an empty line and unescaped line separators inside of texts."""
    for name, size in (("a", (56, 56)), ("long", (201, 1)), ("strip", (1, 200))):
        PIL.Image.new("RGB", size).save(tmp_path / f"{name}.png")
    PIL.Image.new("I;16", (56, 56)).save(tmp_path / "deep.png")
    text = row if isinstance(row, bytes | str) else json.dumps(row, ensure_ascii=False)
    line = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "rows.jsonl").write_bytes(b"%s\n\n%s\n" % (json.dumps(ROW).encode("utf-8-sig"), line))
    return minimal.read_rows(tmp_path / "rows.jsonl", answers)[0][1]


@pytest.mark.parametrize(("changes", "answers", "expected"), [
    ({"system": "Be brief."}, GRPO, "minimal.py does not read 'system'"),
    ({"video": "a.mp4"}, GRPO, "minimal.py does not read 'video'"),
    ({"messages": TURNS}, SFT, "minimal.py does not read 'messages'"),
    ({"images": ["a.png"]}, GRPO, "but it needs either 'image' or 'images'"),
    ({"image": {"path": "a.png"}}, GRPO, "os.PathLike object"),
    ({"image": "data:image/png;base64," + 9000 * "A"}, GRPO, "File name too long"),
    ({"image": "no.png"}, GRPO, "no.png cannot be read as an image: no such file"),
    ({"image": None}, GRPO, "but it needs either 'image' or 'images'"),
    ({"problem": None}, GRPO, "'problem' must be a text with letters or digits in {'image': 'a.png', 'solution': '2'"),
    ({"problem": "Is <image> like <image>?"}, GRPO, "'problem' has 2 <image> for 1 images"),
    ({"image": "long.png"}, SFT, "long.png cannot be read as an image: it is more than 200 times as long"),
    ({"image": "rows.jsonl"}, SFT, "cannot identify image file"),
    ({"image": "deep.png"}, DPO, "deep.png cannot be read as an image: save the image with 8 bits per color"),
    ({"problem": 5}, GRPO, "'problem' must be a text with letters or digits in {'image': 'a.png', 'problem': 5"),
    ({"completion": TURNS}, SFT, "'completion' must be a text with letters or digits in {'image'"),
    ({"rejected": " "}, DPO, "'rejected' must be a text with letters or digits in {'image'"),
    ({"solution": "."}, GRPO, "'solution' must be a text with letters or digits in {'image'"),
    ({"solution": [1, 2]}, GRPO, "'solution' must be a text with letters or digits in {'image'"),
    ("[1, 2]", GRPO, "a row is an object {...}, but this is [1, 2]"),
    ("{'image': 'a.png'}", GRPO, "Expecting property name"),
    (b"{'problem': 'caf\xe9'}", GRPO, "'utf-8' codec can't decode"),
    (b'{"problem": "\\ud800"}', GRPO, "'utf-8' codec can't encode"),
    ("[" * 100_000, GRPO, "maximum recursion depth exceeded"),
])  # fmt: skip
def test_a_row_that_would_mean_something_else_is_refused(tmp_path, changes, answers, expected):
    with pytest.raises(minimal.InputError, match=r"rows\.jsonl, line 3: ") as error:
        read(tmp_path, ROW | changes if isinstance(changes, dict) else changes, answers)
    assert expected in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "images"), [
    ({}, ["a"]), ({"image": None, "images": []}, []), ({"image": None, "images": ["a.png", "a.png"]}, ["a", "a"]),
    ({"image": "strip.png"}, ["strip"]), ({"problem": ""}, ["a"]), ({"problem": "Is <image> a cat?"}, ["a"]),
    ({"solution": 2.0}, ["a"]), ({"solution": True}, ["a"]), ({"solution": 0}, ["a"]),
])  # fmt: skip
def test_these_rows_are_read(tmp_path, changes, images):
    row = read(tmp_path, ROW | changes)
    assert row["images"] == [tmp_path / f"{name}.png" for name in images]
    assert row["problem"] == changes.get("problem", ROW["problem"]) + minimal.ASK


@pytest.mark.parametrize("rejected", ["...", "<think>no</think><answer></answer>"])
def test_a_rejected_answer_may_say_nothing(tmp_path, rejected):
    """The solution of a pair is not read, so it may be of any form."""
    assert read(tmp_path, ROW | {"rejected": rejected, "solution": {"a": 1}}, DPO)["rejected"] == rejected


@pytest.mark.parametrize("answer", [
    "3", " 3 ", "Green  square", "green square.", "true", "[28, 56]", "no", "2", "2.0", "1e-05", "0.00001", "2.5",
    "cafe\u0301", "GREEN\n square",
])  # fmt: skip
@pytest.mark.parametrize("solution", [
    "3", 3, 3.0, 2.0, 2.5, 1e-5, "<answer> 3 </answer>", "<think>a</think><answer>3</answer>", "green square",
    "Green square .", True, [28, 56], [2.0, 1], "caf\u00e9", "cafe\u0301",
], ids=str)  # fmt: skip
def test_solutions_are_compared_as_in_the_package(answer, solution):
    [right] = accuracy([answer], [solution])
    assert minimal.reward(f"<think>a</think><answer>{answer}</answer>", solution) == 0.5 + right


def change(tiny, folder, file, changes):
    """Copy a model folder with changes of a JSON file, in which a key may have the form section.key."""
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / file).read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        target = settings[section] if section else settings
        if value is None:
            del target[name]
        else:
            target[name] = value
    (folder / file).write_text(json.dumps(settings))
    return folder


CONFIG, IMAGES = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(("file", "key", "value", "expected"), [
    (CONFIG, "rope_scaling", {"type": "yarn", "mrope_section": [4, 6, 6]}, "minimal.py cannot compute the rope 'yarn'"),
    (CONFIG, "rope_scaling.type", None, "minimal.py cannot compute the rope None"),
    (CONFIG, "hidden_act", "gelu", "hidden_act is 'gelu', but minimal.py computes 'silu'"),
    (CONFIG, "vision_config.hidden_act", "quick_gelu", "hidden_act is 'quick_gelu'"),
    (CONFIG, "image_token_id", 7, "image_token_id in config.json is not the id of <|image_pad|>"),
    ("tokenizer_config.json", "chat_template", "You are Bob.", "train.py reads other chat templates than Qwen2.5-VL's"),
    (IMAGES, "image_mean", [0.5, 0.5, 0.5], "image_mean is [0.5, 0.5, 0.5]"),
    (IMAGES, "do_resize", False, "do_resize is False"),
    (CONFIG, "use_sliding_window", True, "use_sliding_window is True"),
    (CONFIG, "attention_dropout", 0.1, "attention_dropout is 0.1"),
    (CONFIG, "quantization_config", {"bits": 4}, "quantization_config is {'bits': 4}"),
    (IMAGES, "image_std", [0.5, 0.5, 0.5], "image_std is [0.5, 0.5, 0.5]"),
    (IMAGES, "image_std", 0.5, "image_std is 0.5"),
    (IMAGES, "resample", 2, "resample is 2, but minimal.py computes 3"),
    (IMAGES, "do_rescale", False, "do_rescale is False"),
    (IMAGES, "rescale_factor", 1 / 127.5, "rescale_factor is 0.00784"),
    (IMAGES, "do_normalize", False, "do_normalize is False"),
    (IMAGES, "min_pixels", 10**9, "an image has 1000000000 or more pixels, but at most 12845056"),
])  # fmt: skip
def test_a_setting_that_minimal_does_not_compute_is_named(tiny, tmp_path, file, key, value, expected):
    with pytest.raises(minimal.InputError) as error:
        minimal.load(change(tiny, tmp_path / "model", file, {key: value}))
    assert expected in str(error.value) and "model" in str(error.value)


def test_a_folder_that_lacks_files_is_refused(tiny, tmp_path):
    for missing in ("config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        folder = change(tiny, tmp_path / missing, CONFIG, {})
        (folder / missing).unlink()
        with pytest.raises((OSError, minimal.InputError), match=missing):
            minimal.load(folder)


def test_a_file_of_weights_that_is_cut_off_ends_the_command_with_one_line(tiny, cats, tmp_path):
    folder = change(tiny, tmp_path / "model", CONFIG, {})
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    command = [sys.executable, str(ROOT / "minimal.py"), str(folder), str(cats), *SHORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and re.fullmatch(r"minimal\.py: .*incomplete metadata.*\n", done.stderr)


def test_a_stale_shard_beside_the_model_is_not_read(tiny, tmp_path):
    folder = change(tiny, tmp_path / "model", CONFIG, {})
    stale = {name: torch.zeros_like(weight) for name, weight in load_file(tiny / "model.safetensors").items()}
    stale["of another model"] = torch.zeros(1)  # found in any order of reading
    save_file(stale, folder / "model-00003-of-00003.safetensors")
    assert minimal.load(folder).lm_head.weight.any()
    half = dict.fromkeys(stale, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": half}))
    assert minimal.load(folder).lm_head.weight.any()


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    PIL.Image.effect_noise((64, 64), 50).save(tmp_path / "half.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "half.png").read_bytes()[:500])
    (tmp_path / "text.png").write_text("no image")
    for name in ("half.png", "text.png"):
        with pytest.raises(minimal.InputError, match=rf"{name} cannot be read as an image: "):
            minimal.load_image(tmp_path / name)


@pytest.fixture
def cats(tmp_path):
    PIL.Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    write_lines(tmp_path / "rows.jsonl", [ROW] * 2)
    return tmp_path / "rows.jsonl"


SHORT = ("--sft", "--warmup_steps=1", "--prompts_per_step=2", "--learning_rate=1e-3")


def test_a_refused_input_ends_the_command_with_one_line(tiny, cats):
    row = ROW | {"completion": TURNS}
    write_lines(cats, [row])
    command = [sys.executable, str(ROOT / "minimal.py"), str(tiny), str(cats), *SHORT]
    done = subprocess.run(command, cwd=cats.parent, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"minimal.py: {cats}, line 1: 'completion' must be a text with letters or digits in {row}\n"


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tiny, cats, tmp_path):
    (tmp_path / "file").touch()
    command = [sys.executable, str(ROOT / "minimal.py"), str(tiny), str(cats), *SHORT]
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "out", "Not a directory")):
        done = subprocess.run([*command, f"--output_dir={folder}"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == ""
        assert re.fullmatch(rf"minimal\.py: \[Errno \d+\] {why}: '{folder}'\n", done.stderr)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_trained_before_an_error_is_saved(tiny, cats, tmp_path, monkeypatch, capsys, error):
    sft = minimal.sft
    steps = []

    def stage(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise error
        yield from sft(*arguments)

    train = minimal.train
    monkeypatch.setattr(minimal, "train", lambda model, rows, _, options: train(model, rows, stage, options))
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        main(tiny, cats, *SHORT, "--max_steps=9", f"--output_dir={tmp_path / 'out'}")
    assert len(steps) == 3 and f"saved {tmp_path / 'out'}\n" in capsys.readouterr().out
    trained, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny))
    assert not torch.equal(trained["model.norm.weight"], before["model.norm.weight"])


def test_a_run_that_diverges_ends_with_one_line_and_saves_its_steps(tiny, cats, tmp_path):
    command = [sys.executable, str(ROOT / "minimal.py"), str(tiny), str(cats), *SHORT, "--learning_rate=1e30"]
    done = subprocess.run([*command, f"--output_dir={tmp_path / 'out'}"], capture_output=True, text=True)
    message = "minimal.py: gradients are not finite after 1 optimizer steps; try a lower --learning_rate\n"
    assert (done.returncode, done.stderr) == (1, message)
    assert f"saved {tmp_path / 'out'}\n" in done.stdout and (tmp_path / "out" / "model.safetensors").exists()


def test_a_model_that_diverged_does_not_sample(tiny):
    model = minimal.load(tiny)
    torch.nn.init.constant_(model.model["norm"].weight, torch.inf)
    model.updates = 3
    with pytest.raises(minimal.InputError, match="probabilities are not finite after 3 optimizer steps; try a lower"):
        minimal.sample(model, minimal.make_prompt(model, minimal.draw_row()), 2, 5)


def test_an_error_in_the_first_step_keeps_the_model_of_an_earlier_run(tiny, cats, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_text("of an earlier run")
    monkeypatch.setattr(minimal, "make_prompt", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(tiny, cats, *SHORT, f"--output_dir={tmp_path / 'out'}")
    assert (tmp_path / "out" / "model.safetensors").read_text() == "of an earlier run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_saves_its_steps(tiny, cats, tmp_path, number):
    command = [sys.executable, str(ROOT / "minimal.py"), str(tiny), str(cats), *SHORT, "--max_steps=10000"]
    command.append(f"--output_dir={tmp_path / 'out'}")
    heeds = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 (a background process ignores it)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as run:
        assert run.stdout.readline().startswith("sft step 1 of 10000: ")
        run.send_signal(number)
        printed, error = run.communicate()
    assert run.returncode == 1 and error == "stopped with Ctrl-C or SIGTERM\n"
    assert f"saved {tmp_path / 'out'}\n" in printed
    assert minimal.load(tmp_path / "out").lm_head.weight.isfinite().all()


def test_a_signal_does_not_interrupt_the_save(tiny, cats, tmp_path, monkeypatch):
    save_file = minimal.save_file

    def interrupted(*arguments):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        save_file(*arguments)

    monkeypatch.setattr(minimal, "save_file", interrupted)
    main(tiny, cats, *SHORT, "--max_steps=1", f"--output_dir={tmp_path / 'out'}")
    assert minimal.load(tmp_path / "out")


@pytest.mark.parametrize("is_everywhere", [False, True])
def test_a_full_disk_loses_neither_the_model_nor_an_earlier_one(
    tiny, cats, tmp_path, monkeypatch, capsys, is_everywhere
):
    save_file = minimal.save_file

    def full(weights, file, *arguments):
        save_file(weights, file, *arguments)
        if is_everywhere or file.parent.name == "out":
            file.write_bytes(file.read_bytes()[:1000])
            raise minimal.SafetensorError("No space left on device")

    main(tiny, cats, *SHORT, "--max_steps=1", f"--output_dir={tmp_path / 'out'}")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(minimal, "save_file", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(minimal.SafetensorError, match="No space") if is_everywhere else nullcontext():
        main(tiny, cats, *SHORT, "--max_steps=2", f"--output_dir={tmp_path / 'out'}")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    printed = capsys.readouterr()
    assert printed.err == f"minimal.py: {tmp_path / 'out'} cannot be saved: No space left on device\n"
    if not is_everywhere:
        [folder] = tmp_path.glob("minimal-*")
        assert f"saved {folder}\n" in printed.out and minimal.load(folder)


def test_a_disk_that_is_full_before_the_first_step_is_named(tiny, cats, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=2_900_000)
    monkeypatch.setattr(minimal.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(minimal, "train", lambda *_: pytest.fail("a step was trained"))
    with pytest.raises(minimal.InputError, match=r"out has 0\.003 GB free, but the model needs 0\.003 GB"):
        main(tiny, cats, *SHORT, f"--output_dir={tmp_path / 'out'}")


def test_a_folder_without_permission_to_write_is_refused_before_the_first_step(tiny, cats, tmp_path, monkeypatch):
    def denied(dir):
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(minimal, "train", lambda *_: pytest.fail("a step was trained"))
    with pytest.raises(PermissionError, match="out"):
        main(tiny, cats, *SHORT, f"--output_dir={tmp_path / 'out'}")


def test_a_gpu_that_is_too_small_is_named_before_the_first_step(tiny, tmp_path, monkeypatch):
    model = minimal.load(tiny)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**7))
    with pytest.raises(
        minimal.InputError, match=r"training needs over 0 GB of 0 GB; use LoRA, as in recipes/own_data_one_card\.yaml"
    ):
        minimal.check_space(model, tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2 * 10**7))
    minimal.check_space(model, tmp_path)
    assert (ROOT / "recipes" / "own_data_one_card.yaml").exists()


def test_no_link_of_a_model_folder_is_followed(tiny, tmp_path):
    """A stranger's folder must not copy a private file into the trained one; the Hub's cache links to its blobs."""
    (tmp_path / "private").write_text("PRIVATE")
    folder = change(tiny, tmp_path / "model", CONFIG, {})
    (folder / "notes.txt").symlink_to(tmp_path / "private")
    (folder / "adapter_config.json").write_text("{}")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "tokenizer.json").rename(blobs / "abc")
    (folder / "tokenizer.json").symlink_to(blobs / "abc")
    minimal.save(minimal.load(folder), tmp_path / "saved")
    saved = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    assert saved["tokenizer.json"] == (tiny / "tokenizer.json").read_bytes()
    assert not {"notes.txt", "adapter_config.json"} & {*saved}
    assert not (tmp_path / "saved" / "tokenizer.json").is_symlink()
    for name in ("vocab.json", "merges.txt", "chat_template.jinja"):
        (folder / name).symlink_to(tmp_path / "private")
        with pytest.raises(minimal.InputError, match=rf"{name} is a link to .*private; replace it with a copy"):
            minimal.load(folder)
        (folder / name).unlink()


def test_a_trained_folder_keeps_what_other_programs_read(tiny, tmp_path):
    folder = change(tiny, tmp_path / "model", CONFIG, {})
    kept = ["added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json"]
    kept += ["chat_template.jinja", "video_preprocessor_config.json", "generation_config.json", "tokenizer_config.json"]
    text = "You are a helpful assistant."  # of the chat template that minimal.py trains with
    for name in kept:
        (folder / name).write_text(name + text)
    (folder / "README.md").write_text("of the model before training")
    minimal.save(minimal.load(folder), tmp_path / "saved")
    assert [(tmp_path / "saved" / name).read_text() for name in kept] == [name + text for name in kept]
    assert not (tmp_path / "saved" / "README.md").exists()


def test_a_folder_may_vanish_during_the_run(tiny, tmp_path):
    folder = change(tiny, tmp_path / "model", CONFIG, {})
    model = minimal.load(folder)
    for file in folder.iterdir():
        file.unlink()
    minimal.save(model, tmp_path / "saved")
    assert minimal.load(tmp_path / "saved")


def test_the_saved_folder_has_the_image_sizes_of_the_training(tiny, cats, tmp_path):
    sizes = {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 196, "longest_edge": 10**6}}
    new = change(tiny, tmp_path / "new", IMAGES, sizes)
    content = {"image_processor": json.loads((new / IMAGES).read_text())}
    (new / IMAGES).unlink()
    (new / "processor_config.json").write_text(json.dumps(content))
    for folder in (tiny, new):
        main(folder, cats, *SHORT, "--max_steps=1", "--max_pixels=784", f"--output_dir={tmp_path / 'out'}")
        assert minimal.load(tmp_path / "out").pixels == (196, 784)
        file = "processor_config.json" if folder == new else IMAGES
        saved = json.loads((tmp_path / "out" / file).read_text())
        assert saved.get("image_processor", saved)["size"] == {"shortest_edge": 196, "longest_edge": 784}
        for path in (tmp_path / "out").iterdir():
            path.unlink()


def test_options_have_short_names(tiny, cats, tmp_path, capsys):
    short = ("--sft", "--steps=2", "--rows_per_step=1", "--warmup=0", "--group", "3")
    main(tiny, cats, *short, f"--output={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert "sft step 2 of 2" in printed and f"saved {tmp_path / 'out'}\n" in printed


def test_a_completion_without_tokens_has_no_nan():
    logps = torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    loss = minimal.grpo_loss(logps, torch.tensor([1.0, -1.0]), mask)
    loss.backward()
    assert loss.item() == -0.5 and logps.grad.tolist() == [[-0.25, -0.25, 0], [0, 0, 0]]


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 8])
def test_equal_rewards_have_advantages_of_exactly_0(count):
    """The rounded mean of equal rewards can differ from them, and AdamW would train on the difference."""
    rewards = torch.tensor([[value] * count for value in (0.1, 0.3, 0.7, 1.1)]).flatten()
    assert minimal.group_advantages(rewards, count).tolist() == [0.0] * len(rewards)


def test_groups_have_their_own_means():
    advantages = minimal.group_advantages(torch.tensor([1.0, 0.0, 5.0, 6.0, 2.0, 2.0]), 2)
    assert advantages.tolist() == pytest.approx([0.707, -0.707, -0.707, 0.707, 0.0, 0.0], abs=1e-3)


def test_the_reference_of_a_model_on_the_cpu_is_in_float32_also_beside_a_gpu(tiny, monkeypatch):
    """The built-in task runs on the CPU, where autocast for a GPU does not convert the inputs of a layer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {p.dtype for p in minimal.make_reference(minimal.load(tiny)).parameters()} == {torch.float32}


@pytest.mark.parametrize("tied", [False, True])
def test_a_reference_in_bfloat16_has_the_same_log_probabilities(tmp_path, tiny, tied, monkeypatch):
    """On a GPU, matrices are multiplied in bfloat16, so a copy with matrices in bfloat16 loses nothing."""
    model = minimal.load(change(tiny, tmp_path / "model", CONFIG, {"tie_word_embeddings": tied}))
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "is_cuda", True)
        reference = minimal.make_reference(model)
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in (model, reference)]
    assert sizes[1] < 0.7 * sizes[0] and not any(p.requires_grad for p in reference.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = minimal.make_prompt(model, minimal.draw_row())
    answers, _ = minimal.tokenize_answers(model, ["red square", "<think>no</think>"])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logps = [minimal.log_probabilities(m, prompt, answers) for m in (model, reference)]
    assert torch.equal(*logps)
