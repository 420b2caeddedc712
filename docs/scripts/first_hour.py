"""docs/first_hour.ipynb: a notebook for the first hour, made of the cells below.

`python -m docs.scripts.make_pages` writes it.

tests/repository/test_wheel.py runs its cells in order, with fewer rows and steps.
"""

import json
import re
from pathlib import Path

REPOSITORY = "minivlmrl/minivlmrl"  # of the badges
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
BADGE += f"(https://colab.research.google.com/github/{REPOSITORY}/blob/main/docs/NAME.ipynb)"
INSTALL = """
import importlib.util, subprocess, sys

if not importlib.util.find_spec("minivlmrl"):  # on Colab; in a clone it is there
    source = "git+https://github.com/minivlmrl/minivlmrl"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", source], check=True)
""".strip()
LOSSES = (Path(__file__).parents[1] / "policy_gradients.md").read_text(encoding="utf-8")
CELLS = """
# The first hour

BADGE

A tiny vision-language model that learns on two CPU cores while you watch: look at its data, its tensors and its
answers, train it, and then train it with a reward of your own. All cells take 76 seconds on two idle cores (Intel
Xeon). In a clone: `pip install -c constraints.txt -e . notebook`, then `jupyter notebook docs/first_hour.ipynb`.
The [walkthrough](walkthrough.md) has every number of one step, [this page](step.html) every line of it; the
[FAQ](faq.md) answers what others have asked.
---
INSTALL
---
**Rows** are a picture, a question and its solution; for SFT also a demonstrated answer.
---
from minivlmrl.tasks.shapes import Shapes

ROWS, HELD_OUT, STEPS = 512, 64, 100  # fewer make it faster, more make it better

def as_rows(pictures):  # an image, what is asked, the solution, and for SFT a demonstrated answer
    shown = [pictures[i] for i in range(len(pictures))]
    return [{"image": row.images[0], "completion": row.completion, **row.columns} for row in shown]


pictures = Shapes(ROWS, "mine", wrong_labels=0.5)  # half of the demonstrations name a wrong object
rows, held_out = as_rows(pictures), as_rows(Shapes(HELD_OUT, "eval"))
print({name: value for name, value in rows[0].items() if name != "image"})
rows[0]["image"].resize((168, 168))
---
**A prompt is tensors.** The image becomes rows of patches, the text ids; the image has an id for each 2 x 2 patches.
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
**A group of answers.** Sampling reads the prompt once and decodes all answers together. Random weights say noise.
---
from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation.sampler import Sampler

[answers] = Sampler(model, processor, SamplingOptions(max_new_tokens=12))([prompt], 4, keys=["first"])
[processor.decode(answer.ids) for answer in answers]
---
**A loss** takes log-probabilities and advantages, and imports torch alone, so it can be copied out. An answer's
advantage is how much better it is than its group.
---
LOSS
from minivlmrl.losses.advantages import group_advantages

print(loss.item(), group_advantages(torch.tensor([1.5, 0.5, 0.5, 0.0]), 4))
---
**Train.** SFT on the demonstrations teaches the form and a vague idea of the task; GRPO goes on with a reward for the
form and the truth of the answer. `runs/first/report.html` shows curves and answers: open it in a browser.
---
from minivlmrl.commands.notebook import train

train("shapes.yaml", rows, held_out, output_dir="runs/sft", resume="never", stages=["sft"])
start = {"path": "runs/sft/checkpoint", "config": None}
steps = {"grpo": {"max_steps": STEPS}, "stages": ["grpo"], "resume": "never"}
train("shapes.yaml", rows, held_out, output_dir="runs/first", model=start, **steps)
---
**What does it say?** `completions.jsonl` has answers of training with the sum of their weighted rewards: here of the
first and the last step that it has logged.
---
import json
from pathlib import Path


def show(run):
    groups = [json.loads(line) for line in Path(run, "completions.jsonl").read_text().splitlines()]
    for group in (groups[0], groups[-1]):
        print(f"step {group['step']}, solution {group['solution']}")
        for completion in group["completions"][:4]:
            print(f"   {completion['reward']:.1f}  {completion['text']}")


show("runs/first")
---
**Your own reward** is a function of texts. This one likes triangles, whatever the picture shows. Training begins once
more after SFT: the model learns what you reward, not what you meant. Change it, and see.
---
def triangles(completions, **columns):
    return [float("triangle</answer>" in text) for text in completions]


rewards = {"format": 0.5, triangles: 1.0}
summary = train("shapes.yaml", rows, held_out, rewards=rewards, output_dir="runs/triangles", model=start, **steps)
lines = [json.loads(line) for line in Path("runs/triangles/metrics.jsonl").read_text().splitlines()]
print("triangles answered:", *(f"{line['rewards/triangles/mean']:.2f}" for line in (lines[0], lines[-1])))
print("right answers:     ", *(f"{summary[name]['eval/accuracy_sampled']:.2f}" for name in ("start", "after_grpo")))
show("runs/triangles")
"""


def page() -> str:
    """The notebook, without outputs."""
    [loss] = [code for code in re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL) if "grpo_loss" in code]
    return notebook("first_hour", CELLS.replace("LOSS\n", loss, 1))


def notebook(name: str, cells: str) -> str:
    """A notebook of docs/ of its cells: Markdown and code by turns."""
    written, badge = [], BADGE.replace("NAME", name)
    for number, text in enumerate(cells.split("\n---\n")):
        text = text.strip("\n").replace("BADGE", badge).replace("INSTALL", INSTALL)
        kind = "code" if number % 2 else "markdown"
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        written.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"
