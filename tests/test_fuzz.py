"""Files that are cut, flipped, grown, random or of a wrong value: each is read, or is a ValueError that names it."""

import hashlib
import json
import os
import shutil
import sys
import unicodedata
from dataclasses import asdict
from pathlib import Path

import numpy as np
import PIL.features
import PIL.Image
import pytest
import torch
from record_vision import encoded, noise
from talk import CHATML
from test_lora import adapted

from minivlmrl.adapters.peft_folder import gather_adapter, load_adapter
from minivlmrl.data.fetch import fetch_image
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.template import ChatTemplate
from minivlmrl.data.video import load_video
from minivlmrl.hub.tokenizer import SPECIAL_TOKENS, load_tokenizer, train_tokenizer
from minivlmrl.run.config import RunConfig, load_config, to_yaml
from minivlmrl.run.report import write_page
from minivlmrl.run.resume import Progress, States
from minivlmrl.scale.checkpoint import load_model, load_processor, random_model, save_model
from minivlmrl.tasks import shapes
from minivlmrl_audit import audit, dump

import tiny
from stages import ONE

pytest.importorskip("hypothesis", reason="extra missing: pip install hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow
IMAGES = [
    "PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "SGI", "DDS", "DIB", "ICNS", "IM", "MPO", "PCX",
    "SPIDER", *["JPEG2000"] * PIL.features.check("jpg_2000"),
]  # fmt: skip
PIL.Image.init()
IMAGES += [kind for kind in ("AVIF", "QOI") if kind in PIL.Image.SAVE]  # Pillow 11 writes neither
VIDEOS = [
    ("matroska", "ffv1", "bgr0"), ("avi", "ffv1", "bgr0"), ("avi", "rawvideo", "bgr24"), ("mov", "png", "rgb24"),
    ("mp4", "libx264", "yuv420p"), ("mp4", "mpeg4", "yuv420p"), ("matroska", "libx264", "yuv420p"),
    ("webm", "libvpx", "yuv420p"), ("webm", "libvpx-vp9", "yuv420p"), ("mpegts", "mpeg2video", "yuv420p"),
    ("gif", "gif", "rgb8"),
]  # fmt: skip
NAMED = [{"name": "default", "template": CHATML}]
TEMPLATES = {
    "chat_template.json": json.dumps({"chat_template": CHATML}),
    "chat_template.jinja": CHATML,
    "tokenizer_config.json": json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": NAMED}),
}
CHECKPOINT = ["config.json", "preprocessor_config.json"]
CHECKPOINT += ["model.safetensors.index.json", "model-00002-of-00002.safetensors"]
MORE = int(os.environ.get("FUZZ", 1))  # times as many damaged files: FUZZ=20 pytest tests/test_fuzz.py
READING, TOUCHED = [], []  # the subject that is read; files that were opened, and what was started or reached
OURS = sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), "/dev", "/proc", "/usr"


def watch(event, arguments):
    if READING and event == "open" and isinstance(arguments[0], str | bytes | Path):
        TOUCHED.append(os.path.abspath(os.fsdecode(arguments[0])))
    elif READING and event in ("subprocess.Popen", "os.system", "os.exec", "socket.connect"):
        TOUCHED.append(event)


sys.addaudithook(watch)


# a subject: (folder, name) -> where a damaged file is put, whole files, how it is read and what must hold of it then


def images(folder, name):
    def read():
        image = fetch_image(folder / name)
        assert image.mode == "RGB" and min(image.size) > 0

    return folder / name, [encoded(noise("RGB", (16, 16)), kind) for kind in IMAGES], read


def videos(folder, name):
    t, y, x, c = np.ogrid[:12, :16, :16, :3]
    frames, files = ((7 * y + 13 * x + 29 * c + 17 * t) % 256).astype(np.uint8), []
    for kind in VIDEOS:
        tiny.write_video(folder / "video", frames, 30, *kind)
        files.append((folder / "video").read_bytes())

    def read():
        video = load_video(folder / name)
        assert len(video.frames) % 2 == 0 and 0 < video.fps < float("inf")

    return folder / name, files, read


def tokenizers(folder, name):
    texts = ["Hello world", "  a  b\n\n", "naïve café 猫 🐈", "<|im_", "x = y[0] + 3.14"]
    path = folder / name
    train_tokenizer(texts * 2, vocab_size=300).backend.save(str(path))

    def read():
        """A file that is read loses no text, finds no control token in it, and is written as it was read."""
        loaded = load_tokenizer(path)
        for text in texts:
            ids = loaded.encode(text)
            assert loaded.decode(ids) in (text, unicodedata.normalize("NFC", text))
            assert not set(ids) & {loaded.backend.token_to_id(token) for token in SPECIAL_TOKENS}
        loaded.backend.save(str(path))
        assert load_tokenizer(path).encode(texts[0]) == loaded.encode(texts[0])

    return path, [path.read_bytes()], read


def templates(folder, name):
    image_and_text = [{"type": "image"}, {"text": " im_end "}]
    talk = [{"role": "user", "content": image_and_text}, {"role": "assistant", "content": "two"}]

    def read():
        template = ChatTemplate.from_folder(folder)
        if template is not None:
            assert all(isinstance(piece, str) for piece in template.render(talk))
            template.render_completion(talk[:1], talk[1:])

    return folder / name, [TEMPLATES[name].encode()], read


def checkpoints(folder, name):
    """A tiny model in two files, with everything that a folder has."""
    (folder / "tiny.json").write_text(json.dumps(tiny.RUN_MODEL | {"tie_word_embeddings": True}))
    model, processor = random_model(folder / "tiny.json", shapes.tokenizer(), seed=0)
    most = sum(p.nbytes for p in model.parameters()) // 2 + 50_000
    save_model(folder / "model", model, processor, max_shard_size=most)
    load_model(folder / "model"), load_processor(folder / "model")
    shutil.copytree(folder / "model", folder / "damaged")
    read = load_processor if name.startswith("pre") else load_model
    return folder / "damaged" / name, [(folder / "model" / name).read_bytes()], lambda: read(folder / "damaged")


def steps(folder, name):
    """A step that a trainer dumped, all that needs no model: what explains a difference is not searched."""
    ids, prompt = torch.arange(24).view(4, 6), torch.tensor([[1, 1, 0, 0, 0, 0]] * 4)
    optimizer = {"name": "adamw", "learning_rate": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "no_decay": ["w"]}
    about = {
        "kind": "grpo", "loss": {"loss_type": "dapo", "beta": 0.1}, "num_generations": 2, "scale_rewards": "group",
        "reward_weights": [1.0], "stop_token_ids": [23], "pad_token_id": 0, "mean_over": "micro_batch",
        "rollout_tokens": 16, "steps_per_rollout": 1, "world_size": 1, "step_rows": 4, "temperature": 1.0,
        "optimizer": optimizer | {"weight_decay": 0.1, "max_grad_norm": 1.0, "step": 1},
        "schedule": {"type": "linear", "learning_rate": 1e-3, "warmup_steps": 0, "max_steps": 9, "step": 0},
    }  # fmt: skip
    tensors = {
        "input_ids": ids, "prompt_mask": prompt, "completion_mask": 1 - prompt, "attention_mask": torch.ones_like(ids),
        "per_token_logps": -torch.rand(4, 6), "ref_per_token_logps": -torch.rand(4, 6), "rewards": torch.eye(4)[:, :1],
        "advantages": torch.ones(4), "rollout_advantages": torch.ones(4), "row": torch.arange(4),
        "group": torch.tensor([0, 0, 1, 1]), "micro_batch": torch.tensor([0, 0, 1, 1]), "loss": torch.ones(2),
        "logps_gradient": torch.rand(4, 6), "grad_norm": torch.ones(1),
    }  # fmt: skip
    kinds = ("grad", "clipped", "before", "after", "exp_avg", "exp_avg_sq")
    dump.write(folder / "step", about, tensors | {f"{kind}.w": torch.ones(2, 3) for kind in kinds})

    def read():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(audit, "explain", lambda *_: [])
            assert audit.main([str(folder / "step")]) in (0, 1)

    return folder / "step" / name, [(folder / "step" / name).read_bytes()], read


def adapters(folder, name):
    gather_adapter(adapted(["language"], dtype=torch.float32))(folder)
    return folder / name, [(folder / name).read_bytes()], lambda: load_adapter(tiny.model(), folder)


def recipes(folder, name):
    """A recipe names code, which is not to be executed when it is read."""
    values = {"seed": 1, "stages": ["sft", "grpo"], "model": {"config": "model.json"}, "output_dir": "runs/x"}
    values |= {"data": {"task": "evil.py:f", "columns": {"a": "b"}}, "rewards": {"evil.py:f": 1.0, "accuracy": 0.5}}
    values |= {"grpo": {"learning_rate": "1e-4", "max_steps": 3, "loss_type": "dapo"}, "adapter": {"r": 4, "alpha": 8}}
    return folder / name, [json.dumps(values).encode()], lambda: load_config(folder / name)


def rows(folder, name):
    """Rows of several forms, read with their pictures."""
    PIL.Image.new("RGB", (4, 4)).save(folder / "a.png")
    talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]
    lines = [
        {"image": "a.png", "problem": "What?", "solution": "2", "completion": "two", "label": True, "margin": 1.5},
        {"images": ["a.png"], "prompt": talk, "solution": [1, 2, 3, 4], "completion": "no", "answer_extent": [4, 4]},
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": 2}]},
        {"question": "Which?", "A": "cat", "B": "dog", "answer": "A", "image": "a.png"},
    ]  # fmt: skip

    def read():
        assert all(row.messages for row in FileDataset(folder / name, ("problem",)))

    return folder / name, [json.dumps(line).encode() for line in lines], read


def runs(folder, name):
    """The folder of a run that somebody sent: its page shows nothing else of this machine."""
    run, at = folder / "run", {"stage": "grpo", "step": 0}
    (run / "images").mkdir(parents=True)
    PIL.Image.new("RGB", (4, 4)).save(run / "images" / "grpo-0-0.webp")
    said = {"text": "a", "rewards": {"accuracy": 1.0}, "reward": 1.0, "advantage": 0.0, "boxes": [[0, 0, 1, 1]]}
    said |= {"stopped": True, "tokens": [["a", -0.5]]}
    line = at | {"row": 0, "where": "x:1", "prompt": "?", "solution": "a", "truth": [], "completions": [said]}
    files = {
        "completions.jsonl": line | {"images": ["images/grpo-0-0.webp"]}, "metrics.jsonl": at | {"reward": 1.0},
        "timings.jsonl": at | {"seconds": 1.0, "peak_memory_gib": 0.5}, "warnings.jsonl": at | {"warning": "all"},
        "evaluations.jsonl": at | {"sampled": 0.5}, "summary.json": {"chance": None, "start": {"sampled": 0.5}},
    }  # fmt: skip
    for file, values in files.items():
        (run / file).write_text(json.dumps(values) + "\n")
    (run / "config.yaml").write_text(to_yaml(RunConfig()))
    return run / name, [(run / name).read_bytes()], lambda: write_page([run], folder / "page.html")


def states(folder, name):
    """The progress of a state whose checksums are right: read, or reported and not used."""
    state = folder / "states" / "000003"
    state.mkdir(parents=True)
    progress = Progress(0, ["sft", "grpo"], "", stage=1, step=2, steps=3, logs={"metrics.jsonl": "{}\n"})

    def read():
        sums = {name: hashlib.blake2b((state / name).read_bytes()).hexdigest()}
        (state / "complete.json").write_text(json.dumps(sums))
        States(RunConfig(output_dir=str(folder)), ONE, None).read(state)

    return state / name, [json.dumps(asdict(progress)).encode()], read


LOGS = ["completions.jsonl", "metrics.jsonl", "timings.jsonl", "warnings.jsonl", "evaluations.jsonl"]
SENT = dict.fromkeys((*LOGS, "summary.json", "config.yaml"), runs)  # what somebody may send
SENT |= dict.fromkeys(("step.json", "step.safetensors"), steps)
SENT |= dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), adapters)
SENT |= {"recipe.json": recipes, "rows.jsonl": rows, "run.json": states}
SUBJECTS = {"image": images, "video": videos, "tokenizer.json": tokenizers}
SUBJECTS |= dict.fromkeys(TEMPLATES, templates) | dict.fromkeys(CHECKPOINT, checkpoints) | SENT
NAMELESS = ("recipe.json", "run.json")  # their errors name a key


# the damage

LEAVES = [None, True, 0, -1, 300, 2**40, -(2**70), 1e308, "", "<|im_end|>", [], {}, ["a", "b"], "ByteLevel", "BPE"]
LEAVES += ["/etc/hostname", "../../../../../etc/hostname", "evil.py:f", "(a+)+$", "x" * 300]
LEAVES += ["F8_E4M3", "I64", "BOOL", "F64", "F16", "F4", "C64"]  # dtypes of safetensors
WRONG = st.recursive(
    st.sampled_from(LEAVES) | st.integers(-2, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def json_part(content):
    """(begin, end) of the JSON in a file: a safetensors file's header, all of a file that begins with a brace."""
    if content[8:9] == b"{" and not content.startswith(b"{"):
        return 8, 8 + int.from_bytes(content[:8], "little")
    return 0, len(content)


def wrong_value(draw, content):
    """One or two values replaced or taken out."""
    begin, end = json_part(content)
    values = json.loads(content[begin:end])
    for _ in range(draw(st.integers(1, 2))):
        inside, keys = values, list(values)
        while keys:
            key = draw(st.sampled_from(keys))
            inner = inside[key]
            keys = list(inner) if isinstance(inner, dict) else [*range(len(inner))] if isinstance(inner, list) else []
            if keys and draw(st.integers(0, 3)):
                inside = inner
            else:
                break
        if not values:
            break
        if isinstance(inside, dict) and draw(st.booleans()):
            del inside[key]
        else:
            others = list(inside.values()) if isinstance(inside, dict) else inside  # perhaps a neighbour's value
            inside[key] = draw(WRONG | st.sampled_from(others))
    text = json.dumps(values).encode()
    return (len(text).to_bytes(8, "little") if begin else b"") + text + content[end:]


def flipped(draw, content):
    """Some bytes changed, and those of the header more often."""
    content, (_, end) = bytearray(content), json_part(content)
    where = st.integers(0, end - 1) | st.integers(0, min(300, end - 1))
    for index, value in draw(st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=6)):
        content[index] = value
    return bytes(content)


def cut(draw, content):
    return content[: draw(st.integers(0, len(content) - 1))]


def grown(draw, content):
    """With a piece of itself in another place."""
    first, begin, end = (draw(st.integers(0, len(content))) for _ in range(3))
    return content[:first] + content[begin:end] + content[first:]


def random(draw, content):
    """Random from some byte of the beginning on."""
    return content[: draw(st.integers(0, min(100, len(content))))] + draw(st.binary(max_size=300))


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_damaged_file_is_read_or_named(name, tmp_path):
    path, wholes, read = SUBJECTS[name](tmp_path, name)
    of_json = name.endswith((".json", ".jsonl", ".safetensors"))
    damages = [flipped, cut, grown, random] + [wrong_value] * 4 * of_json
    examples = {"image": 200} | dict.fromkeys(CHECKPOINT, 40) | dict.fromkeys(SENT, 15)

    @settings(max_examples=MORE * examples.get(name, 60), deadline=None, database=None)
    @given(data=st.data())
    def fuzz(data):
        damage, whole = data.draw(st.sampled_from(damages)), data.draw(st.sampled_from(wholes))
        path.write_bytes(damage(data.draw, whole))
        TOUCHED.clear()
        READING.append(name)
        try:
            read()
        except ValueError as error:
            assert name in NAMELESS or str(path.parent) in str(error), error
            assert len(str(error)) < 3000
        finally:
            READING.clear()
        # rows may name any picture of this machine
        others = [place for place in TOUCHED if not place.startswith((str(tmp_path), *OURS))]
        assert name == "rows.jsonl" or not others, others

    for whole in wholes:
        path.write_bytes(whole)
        read()
    fuzz()
