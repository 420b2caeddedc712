"""Older versions of transformers on checkpoints that we save:

    PYTHONPATH=tests/helpers python tests/record/record_checkpoints.py

For each version it makes an environment of its own (pip install into a temporary folder) and lets that version read the
folders that `write` has written: model, tokenizer and image processor. What came of it lies in
tests/recorded/checkpoints_transformers_*.json, and test_checkpoint_versions.py sees to it that we still write the very
files that the record is about. The record also has config.json of the hub's models as that version writes it anew. All
this needs the network and five minutes; transformers 5.23 is in the tests themselves.
"""

import datetime
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from hub_configs import ARCHITECTURES, SIZES, real_config, tiny_config

import tiny

VERSIONS = ["4.49.0", "4.51.3", "4.57.6"]
RECORDED = Path(__file__).parents[1] / "recorded"
TEXT = "I see green squares, 12 of them.\n\n你好 \u00e9e\u0301"
BATCHES = {"text": [], "image": [(1, 6, 10)], "two images": [(1, 18, 4), (1, 6, 10)]}


def write(root: Path):
    """Save a checkpoint of each kind, and what is to come out of it."""
    import PIL.Image

    from minivlmrl.batch import pack
    from minivlmrl.decoder import Qwen2_5_VL
    from minivlmrl.hub.model_config import ModelConfig
    from minivlmrl.hub.tokenizer import train_tokenizer
    from minivlmrl.image import ImageProcessor
    from minivlmrl.rows import Processor
    from minivlmrl.scale.checkpoint import save_model

    processor = Processor(train_tokenizer([TEXT], vocab_size=300), ImageProcessor())
    ramp = torch.arange(60 * 90 * 3).mul(7).remainder(251).to(torch.uint8).view(60, 90, 3)
    image = PIL.Image.fromarray(ramp.numpy())
    expected = {"ids": processor.tokenizer.encode(TEXT), "image": image}
    expected["pixel_values"] = processor.image_processor(image)[0]
    for model_type, tied in itertools.product(ARCHITECTURES, (True, False)):
        model = Qwen2_5_VL(ModelConfig.from_dict(tiny_config(model_type, tied)))
        tiny.telling_weights(model)
        generator = torch.Generator().manual_seed(0)
        kind = f"{model_type}-{'tied' if tied else 'untied'}"
        for name, grids in BATCHES.items():
            prompt = tiny.prompt(generator, grids)
            with torch.no_grad():
                logits = model.lm_head(model(pack([prompt], [[]], model.config)))
            expected[kind, name] = (prompt.input_ids, prompt.pixel_values, prompt.image_grid_thw, logits)
        save_model(root / f"{kind}-one_file", model, processor)
        save_model(root / f"{kind}-shards", model, processor, max_shard_size=200_000)
    torch.save(expected, root / "expected.pt")


def digests(root: Path) -> dict[str, dict[str, str]]:
    """For each folder and file what the file says; of safetensors its header: names, types, shapes and metadata."""
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        found[folder.name] = {}
        for file in sorted(folder.iterdir()):
            content = file.read_bytes()
            if file.suffix == ".safetensors":
                content = content[8 : 8 + int.from_bytes(content[:8], "little")]
            found[folder.name][file.name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def check(root: Path) -> dict:
    """Read all folders with the transformers of this environment; what it has to do with ours, by folder."""
    import huggingface_hub
    import tokenizers
    import transformers

    expected = torch.load(root / "expected.pt", weights_only=False)
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        kind = folder.name.rpartition("-")[0]
        model, info = getattr(transformers, ARCHITECTURES[kind.partition("-")[0]]).from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        images = transformers.Qwen2VLImageProcessor.from_pretrained(folder)
        pixels = images(images=expected["image"], return_tensors="pt")["pixel_values"]
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        found[folder.name] = {
            "strange_keys": sum(len(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")),
            "ids_equal": ids == expected["ids"],
            "eos_token": tokenizer.eos_token,
            "stop_ids": model.generation_config.eos_token_id,
            "pixels_equal": torch.equal(pixels, expected["pixel_values"]),
            "logits": {name: largest_difference(model, *expected[kind, name]) for name in BATCHES},
        }
    versions = {module.__name__: module.__version__ for module in (transformers, tokenizers, huggingface_hub, torch)}
    return {**versions, "folders": found, "configs": {size: rewritten(root / "configs" / size) for size in SIZES}}


def rewritten(folder: Path) -> dict:
    """config.json of one of the hub's models as this version of transformers writes it."""
    import transformers

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(real_config(folder.name)))
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder / "saved")
    content = json.loads((folder / "saved" / "config.json").read_text())
    return {key: value for key, value in content.items() if key != "_name_or_path"}  # where it was read


@torch.no_grad()
def largest_difference(model, input_ids, pixel_values, image_grid_thw, logits) -> float:
    """From ours, as a share of the largest logit."""
    inputs = {"input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids[None])}
    if len(image_grid_thw):
        inputs |= {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
    return ((model(**inputs).logits[0] - logits).abs().max() / logits.abs().max()).item()


def record(version: str):
    with tempfile.TemporaryDirectory() as temporary:
        packages, root = Path(temporary) / "packages", Path(temporary) / "folders"
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", packages, f"transformers=={version}"]
        subprocess.run(install, check=True)
        root.mkdir()
        write(root)
        files = digests(root)
        paths = [str(packages), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, __file__, "--check", root]
        result = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
        found = json.loads(result.stdout.splitlines()[-1])
        command = "PYTHONPATH=tests/helpers python tests/record/record_checkpoints.py"
        about = {"command": command, "date": str(datetime.date.today())}
        content = {**about, **found, "files": files}
        file = RECORDED / f"checkpoints_transformers_{version}.json"
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        print(json.dumps(check(Path(sys.argv[2]))))
    else:
        for version in VERSIONS:
            record(version)
