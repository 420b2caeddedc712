"""Generate docs/photographs.ipynb, a notebook that trains a classifier on a folder of photographs.

`python -m docs.scripts.make_pages` runs the cells and writes the notebook with their outputs.

tests/repository/test_wheel.py runs all cells in order, with fewer pictures and steps. test_docs.py runs the cells
before the training, and compares their outputs with the stored ones.
"""

from docs.scripts import first_hour

CELLS = """
# Your folder of photographs

BADGE

This notebook trains a model to name the class of an image, with LoRA and a reward for the right
name. It needs a folder with one subfolder per class, for example `photographs/cat/1.jpg`. With a
GPU, it trains Qwen2-VL-2B, which fits a T4 of 16 GB. Without a GPU, it trains a tiny model with
random weights, in 45 seconds on two idle cores (Intel Xeon).
---
INSTALL
---
**The folder.** Upload your images next to this notebook, in a folder `photographs`. If the folder
does not exist, this cell creates one with drawings of shapes.
---
from pathlib import Path
from minivlmrl.tasks.shapes import Shapes

PICTURES, STEPS = 240, 60  # fewer are faster, more give better answers
FOLDER = Path("photographs")
if not FOLDER.is_dir():
    for number, row in enumerate(Shapes(PICTURES, "photographs")):
        path = FOLDER / row.columns["solution"] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        row.images[0].save(path)
classes = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
print(classes)
---
**Rows.** A row has an image, a question, and the class as its solution. `completion` is a demonstrated
answer for SFT. Every fifth image is held out, which means that the model is not trained on it.
---
import json

QUESTION = f"Which of these is it: {', '.join(classes)}?"
photographs = [
    {"image": str(path), "problem": QUESTION, "solution": path.parent.name, "completion": path.parent.name}
    for path in sorted(FOLDER.glob("*/*.*"))
]
held_out, rows = photographs[::5], [row for number, row in enumerate(photographs) if number % 5]
for name, part in [("train.jsonl", rows), ("held_out.jsonl", held_out)]:
    Path(name).write_text("".join(json.dumps(row) + "\\n" for row in part))
print(len(rows), "rows,", len(held_out), "held out")
rows[0]
---
**GPU memory.** `memory` estimates how much memory a training step needs, from the sizes in
config.json. This cell does so for Qwen2-VL-2B on a GPU with 16 GB. Note that a T4 computes bfloat16
slowly.
---
from minivlmrl.extras import memory

tower = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4}
sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
sizes |= {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "vision_config": tower}
Path("config.json").write_text(json.dumps({"model_type": "qwen2_vl", **sizes}))
RECIPE = "cls_qwen2_vl_2b.yaml"
options = ["--adapter.r=64", "--model.dtype=bfloat16", "--model.compute_dtype=null", "--image_tokens=196"]
memory.main(["--model=config.json", "--gpu_memory=16", RECIPE, *options])
---
**Train.** The tiny model first needs a few steps of SFT, because GRPO can only reward a model that
sometimes answers correctly. Qwen2-VL-2B needs no SFT.
---
import torch
from minivlmrl.commands.train import train_recipe
from minivlmrl.config.loading import recipes_folder

data = ["--data.train_file=train.jsonl", "--data.eval_file=held_out.jsonl", "--resume=never"]
lora = ["--adapter.r=64", f"--grpo.max_steps={STEPS}", "--output_dir=runs/photographs"]
if torch.cuda.is_available():
    model = ["--model.path=Qwen/Qwen2-VL-2B-Instruct", "--model.dtype=bfloat16", "--model.compute_dtype=null"]
    train_recipe([RECIPE, *data, *lora, *model, "--grpo.learning_rate=1e-5"])
else:
    data += ["--data.image={}", "--model.compute_dtype=null"]
    toy = ["--model.path=null", f"--model.config={recipes_folder() / 'shapes_model.json'}", "--output_dir=runs/toy"]
    speak = ["--stages=[sft]", f"--sft.max_steps={STEPS // 3}", "--sft.prompts_per_step=16", "--sft.learning_rate=2e-3"]
    train_recipe([RECIPE, *data, *toy, *speak])
    train_recipe([RECIPE, *data, *lora, "--model.path=runs/toy/checkpoint", "--grpo.learning_rate=3e-3"])
---
**The model and its report.** Open `runs/photographs/report.html` in a browser to see curves, images
and answers. `checkpoint/` is the model with the adapter merged into its weights.
`checkpoint/adapter/` is only the adapter, for PEFT.
---
from minivlmrl.commands import chat
from PIL import Image

summary = json.loads(Path("runs/photographs/summary.json").read_text())
print("right:", *(f"{name} {summary[name]['eval/accuracy_sampled']:.2f}" for name in ("start", "after_grpo")))
print(held_out[0]["image"])
picture = "--image", held_out[0]["image"]
chat.main(["--model=runs/photographs/checkpoint", *picture, "--prompt", QUESTION, "--temperature=0"])
Image.open(held_out[0]["image"]).resize((168, 168))
"""


def page() -> str:
    """Return the notebook photographs.ipynb as JSON text, without outputs."""
    return first_hour.notebook("photographs", CELLS)
