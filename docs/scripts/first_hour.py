"""Generate docs/first_hour.ipynb, a notebook for the first hour with minivlmrl.

`python -m docs.scripts.make_pages` runs the cells and writes the notebook with their outputs.

tests/repository/test_wheel.py runs its cells in order, with fewer rows and steps. test_docs.py runs the cells before
the first training, and compares their outputs with the stored ones.
"""

import ast
import base64
import contextlib
import io
import json
import pprint
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import PIL.Image

REPOSITORY = "minivlmrl/minivlmrl"  # repository in the badges' links
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
BADGE += f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/docs/NAME.ipynb)"
INSTALL = """
import importlib.util, subprocess, sys

if not importlib.util.find_spec("minivlmrl"):  # on Colab; a clone has it installed
    source = "git+https://github.com/minivlmrl/minivlmrl"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)
""".strip()
LOSSES = (Path(__file__).parents[1] / "policy_gradients.md").read_text(encoding="utf-8")
CELLS = """
# The first hour

BADGE

In this notebook, you train a tiny vision-language model on two CPU cores. You look at its data, its
tensors and its answers, train it, and then train it with a reward of your own. All cells take 76
seconds on two idle cores (Intel Xeon). To run the notebook in a clone, use
`pip install -c constraints.txt -e . notebook` and then `jupyter notebook docs/first_hour.ipynb`.
The [walkthrough](walkthrough.md) shows every number of one training step, and
[this page](step.html) shows every line of code that a step runs. The [FAQ](faq.md) answers common
questions.
---
INSTALL
---
**Rows.** A row has an image, a question and its solution. For SFT, it also has a demonstrated
answer.
---
from minivlmrl.tasks.shapes import Shapes

ROWS, HELD_OUT, STEPS = 512, 64, 100  # fewer are faster, more give better answers

def as_rows(pictures):  # columns: image, problem, solution, and for SFT the demonstrated completion
    shown = [pictures[i] for i in range(len(pictures))]
    return [{"image": row.images[0], "completion": row.completion, **row.columns} for row in shown]


pictures = Shapes(ROWS, "mine", wrong_labels=0.5)  # half of the demonstrations name a wrong object
rows, held_out = as_rows(pictures), as_rows(Shapes(HELD_OUT, "eval"))
print({name: value for name, value in rows[0].items() if name != "image"})
rows[0]["image"].resize((168, 168))
---
**A prompt consists of tensors.** The image becomes rows of patches, and the text becomes token ids.
In these ids, the image has one placeholder for each 2 x 2 patches.
---
from minivlmrl.model.build import random_model
from minivlmrl.config.loading import recipes_folder
from minivlmrl.tasks import shapes

model, processor = random_model(recipes_folder() / "shapes_model.json", shapes.tokenizer(), seed=0)
prompt = pictures[0].prompt(processor)
for name in ("input_ids", "pixel_values", "image_grid_thw"):
    print(f"{name:15}", tuple(getattr(prompt, name).shape), getattr(prompt, name).dtype)
processor.tokenizer.decode(prompt.input_ids.tolist())
---
**A group of answers.** The sampler processes the prompt once, and decodes all its answers together.
The weights are still random, so the answers are random text.
---
from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation.sampler import Sampler

[answers] = Sampler(model, processor, SamplingOptions(max_new_tokens=12))([prompt], 4, keys=["first"])
[processor.decode(answer.ids) for answer in answers]
---
**A loss** takes log-probabilities and advantages. Its file imports only torch, so you can copy it
into your own code. The advantage of an answer is its reward compared with the rewards of its group.
---
LOSS
from minivlmrl.losses.advantages import group_advantages

print(loss.item(), group_advantages(torch.tensor([1.5, 0.5, 0.5, 0.0]), 4))
---
**Train.** SFT on the demonstrations teaches the model the answer format and a rough idea of the
task. GRPO then rewards the format and the correctness of answers. Open `runs/first/report.html` in
a browser to see curves and answers.
---
from minivlmrl.commands.notebook import train

train("shapes.yaml", rows, held_out, output_dir="runs/sft", resume="never", stages=["sft"])
start = {"path": "runs/sft/checkpoint", "config": None}
steps = {"grpo": {"max_steps": STEPS}, "stages": ["grpo"], "resume": "never"}
train("shapes.yaml", rows, held_out, output_dir="runs/first", model=start, **steps)
---
**The curve.** `metrics.jsonl` has the metrics of each step. This picture shows the mean reward of
each step, from 0 at the bottom to 1.5 at the top.
---
import json
from pathlib import Path
from PIL import Image, ImageDraw


def curve(run, name, top, width=480, height=140):
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    points = []
    for i, line in enumerate(lines):
        points.append((width * i / max(1, len(lines) - 1), height * (1 - line[name] / top)))
    picture = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(picture).line(points, "royalblue", 2)
    return picture


curve("runs/first", "reward", 1.5)
---
**What does the model answer?** `completions.jsonl` has answers from training, with the weighted sum
of their rewards. This cell prints answers of the first and the last logged step.
---
def show(run):
    groups = [json.loads(line) for line in Path(run, "completions.jsonl").read_text().splitlines()]
    for group in (groups[0], groups[-1]):
        print(f"step {group['step']}, solution {group['solution']}")
        for completion in group["completions"][:4]:
            print(f"   {completion['reward']:.1f}  {completion['text']}")


show("runs/first")
---
**Your own reward** is a function of the completions' texts. This function rewards the answer
"triangle", whatever the image shows. Training starts again from the checkpoint after SFT. You will
see that the model learns what you reward, not what you meant. Change the reward, and train again.
---
def triangles(completions, **columns):
    return [float("triangle</answer>" in text) for text in completions]


rewards = {"format": 0.5, triangles: 1.0}
steps |= {"rewards": rewards, "data": {"eval_rewards": ["accuracy"]}}
summary = train("shapes.yaml", rows, held_out, output_dir="runs/triangles", model=start, **steps)
lines = [json.loads(line) for line in Path("runs/triangles/metrics.jsonl").read_text().splitlines()]
print("triangles answered:", *(f"{line['rewards/triangles/mean']:.2f}" for line in (lines[0], lines[-1])))
print("right answers:     ", *(f"{summary[name]['eval/accuracy_sampled']:.2f}" for name in ("start", "after_grpo")))
show("runs/triangles")
curve("runs/triangles", "rewards/triangles/mean", 1.0)
"""


def page() -> str:
    """Return the notebook first_hour.ipynb as JSON text, without outputs."""
    [loss] = [code for code in re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL) if "grpo_loss" in code]
    return notebook("first_hour", CELLS.replace("LOSS\n", loss, 1))


def notebook(name: str, cells: str) -> str:
    """Build a notebook from `cells`, which alternate between Markdown and code, as JSON text."""
    cell_list, badge = [], BADGE.replace("NAME", name)
    for number, text in enumerate(cells.split("\n---\n")):
        text = text.strip("\n").replace("BADGE", badge).replace("INSTALL", INSTALL)
        kind = "code" if number % 2 else "markdown"
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        code_fields = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cell_list.append(cell | code_fields)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cell_list, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def with_outputs(text: str) -> str:
    """Run a notebook's code cells in an empty folder, and return the notebook with their outputs."""
    content = json.loads(text)
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(cells, run_cells(cells), strict=True), start=1):
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell |= {"execution_count": number, "outputs": outputs}
    return json.dumps(content, indent=1) + "\n"


def run_cells(cells: list[dict]) -> list[list[dict]]:
    """Run code cells in an empty folder, and return each cell's outputs in the notebook format."""
    space = {"__name__": "__main__"}
    # if this module is loaded, a run prints every tenth step instead of every step
    sys.modules["ipykernel"] = ModuleType("ipykernel")
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return [run_cell("".join(cell["source"]), space) for cell in cells]
    finally:
        del sys.modules["ipykernel"]


def run_cell(source: str, space: dict) -> list[dict]:
    """Run a code cell in a namespace, and return its printed text and its last expression's value."""
    statements = ast.parse(source).body
    last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), "cell", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": pprint.pformat(value, width=100, sort_dicts=False).splitlines(keepends=True)}
        if isinstance(value, PIL.Image.Image):
            file = io.BytesIO()
            value.save(file, "PNG", optimize=True)
            size = f"<PIL image, {value.width} x {value.height}>"  # repr() has an address in memory
            data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": [size]}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs
