"""Generate docs/first_hour.ipynb, a notebook for the first hour with minivlmrl.

`python -m docs.scripts.make_pages` runs the cells and writes the notebook with their outputs.

tests/repository/test_wheel.py runs all cells in order, with fewer rows and steps. test_docs.py runs the cells before
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
from types import ModuleType

import PIL.Image

REPOSITORY = "minivlmrl/minivlmrl"  # repository in the badges' links
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
BADGE += f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/docs/NAME.ipynb)"
INSTALL = """
import importlib.util, subprocess, sys

if not importlib.util.find_spec("minivlmrl"):  # on Colab; a clone has it installed
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    wheels = "https://download.pytorch.org/whl/cu126"  # also for drivers of CUDA 12
    pins = "https://raw.githubusercontent.com/minivlmrl/minivlmrl/main/constraints.txt"
    subprocess.run([*pip, "torch==2.13.0", "--index-url", wheels], check=True)
    subprocess.run([*pip, "-c", pins, "git+https://github.com/minivlmrl/minivlmrl"], check=True)
""".strip()
CELLS = """
# The first hour

BADGE

In this notebook, you train a tiny vision-language model on a CPU. You look at its data, its tensors
and its answers, train it, and then train it with a reward of your own. Everything comes from one
file of code, [minimal.py](../minimal.py), and all cells take about 90 seconds on one idle core (AMD
EPYC). To run the notebook in a clone, use `pip install -c constraints.txt -e . notebook` and then
`jupyter notebook docs/first_hour.ipynb`. The [walkthrough](walkthrough.md) shows the numbers of one
training step, and [another page](step.html) every line of code in it. [Words](words.md) explains what
a rollout or an advantage is.
---
import importlib.util, sys, urllib.request

sys.path.append("..")  # a clone has minimal.py in the folder above
if not importlib.util.find_spec("minimal"):  # on Colab
    source = "https://raw.githubusercontent.com/minivlmrl/minivlmrl/main/minimal.py"
    urllib.request.urlretrieve(source, "minimal.py")
import minimal
---
**Rows.** A row has an image, a question and its solution. For SFT, it also has a demonstrated
answer. Half of the demonstrations here name a wrong object, so SFT alone does not solve the task.
---
import random
import torch

ROWS, HELD_OUT, STEPS = 512, 64, 100  # fewer are faster, more give better answers

random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)  # the tensors are too small to share the work
demonstrations = [minimal.draw_row(wrong=0.5) for _ in range(96)]
rows = [minimal.draw_row() for _ in range(ROWS)]
held_out = [minimal.draw_row() for _ in range(HELD_OUT)]
row = rows[0]
print({name: row[name] for name in ("problem", "solution", "completion")})
row["images"][0].resize((168, 168))
---
**A prompt consists of tensors.** The image becomes rows of patches, and the text becomes token ids.
In these ids, the image has one placeholder for each 2 x 2 patches.
---
minimal.make_folder("tiny")  # random weights and a tokenizer, in the files of Hugging Face
model = minimal.load("tiny")
prompt = minimal.make_prompt(model, row)
[(patches, h, w)] = prompt.images
print("ids", tuple(prompt.ids.shape), "patches", tuple(patches.shape), "in", h, "x", w)
model.tokenizer.decode(prompt.ids.tolist(), skip_special_tokens=False)
---
**A group of answers.** The model samples several answers to the same prompt. The weights are still
random, so the answers are random text.
---
completions, mask = minimal.sample(model, prompt, 4, max_new_tokens=12)
minimal.decode(model, completions, mask)
---
**Rewards and advantages.** A reward is a number for the text of an answer. The advantage of an
answer is its reward compared with the rewards of its group.
---
texts = ["<think>I see red</think><answer>red square</answer>", "<answer>red square</answer>", "red"]
rewards = torch.tensor([minimal.reward(text, "red square") for text in texts])
print(rewards, minimal.group_advantages(rewards))
---
**The loss** takes log-probabilities and advantages. It is 0 here, because the advantages add up to 0.
Its gradient is not 0: the first answer becomes more likely, and the others less likely.
---
logps = torch.full((3, 5), -1.0, requires_grad=True)  # three answers with five tokens each
loss = minimal.grpo_loss(logps, logps.detach(), minimal.group_advantages(rewards), torch.ones(3, 5))
loss.backward()
print(round(loss.item(), 6), logps.grad[:, 0])
---
**SFT** teaches the model the form of an answer and a rough idea of the task.
---
import copy
from argparse import Namespace

options = Namespace(steps=min(40, STEPS), rows_per_step=16, learning_rate=3e-3, warmup=10, beta=0.0)
minimal.train(model, demonstrations, minimal.sft, options)
after_sft = copy.deepcopy(model)
print("right answers:", minimal.accuracy(model, held_out))
---
**GRPO** samples eight answers to each question, and raises the probability of answers whose reward
is above the mean of their group. `minimal.train` takes any function that yields a loss and a metric
for each row. The function below also keeps the rewards for a curve.
---
options = Namespace(steps=STEPS, rows_per_step=8, learning_rate=5e-4, warmup=5, beta=0.0)
options.group, options.max_new_tokens = 8, 20


def train_grpo(model):
    mean_rewards = []

    def grpo(*arguments):
        for loss, mean_reward in minimal.grpo(*arguments):
            mean_rewards.append(mean_reward.item())
            yield loss, mean_reward

    minimal.train(model, rows, grpo, options)
    return mean_rewards


mean_rewards = train_grpo(model)
print("right answers:", minimal.accuracy(model, held_out))
---
**The curve** shows the mean reward of the eight questions of each step, from 0 at the bottom to 1.5
at the top.
---
from PIL import Image, ImageDraw


def curve(mean_rewards, width=480, height=140):
    steps = torch.tensor(mean_rewards).view(-1, options.rows_per_step).mean(1).tolist()
    points = [(width * i / len(steps), height * (1 - reward / 1.5)) for i, reward in enumerate(steps)]
    picture = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(picture).line(points, "royalblue", 2)
    return picture


curve(mean_rewards)
---
**What does the model answer?** Here are answers to held-out questions, before and after GRPO.
---
def show(model):
    for row in held_out[:4]:
        completions, mask = minimal.sample(model, minimal.make_prompt(model, row), 2, max_new_tokens=20)
        print(row["solution"], "->", *minimal.decode(model, completions, mask))


show(after_sft)
print()
show(model)
---
**Your own reward** is a function of an answer's text and the row's solution. This function accepts
every triangle as right, whatever the image shows. Training starts again from the model after SFT. You
will see that the model learns what you reward, not what you meant. Change the reward, and train again.
---
usual_reward = minimal.reward


def triangles(text, solution):
    return max(usual_reward(text, f"{color} triangle") for color in minimal.COLORS)


minimal.reward = triangles
model = copy.deepcopy(after_sft)
mean_rewards = train_grpo(model)
minimal.reward = usual_reward
print("right answers:", minimal.accuracy(model, held_out))
show(model)
curve(mean_rewards)
"""


def page() -> str:
    """Return the notebook first_hour.ipynb as JSON text, without outputs."""
    return notebook("first_hour", CELLS)


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
        text = re.sub(r"[^\n]*\r", "", printed.getvalue()).splitlines(keepends=True)  # as a terminal shows it
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
