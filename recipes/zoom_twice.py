"""Look again, harder: two squares of stripes, and a look at each.

A completion, in one line:
    <think>northwest, southeast</think><zoom>northwest</zoom>[a crop]<zoom>southeast</zoom>[a crop]
    <answer>red rows, blue columns</answer>
One demonstration in ten looks at both squares, the others anywhere, as in zoom.py. Options of recipes/zoom.yaml:
    --data.task=recipes/zoom_twice.py:TASK --sampling.environment=recipes/zoom_twice.py:Twice
    --sampling.max_new_tokens=72 "--data.eval_rewards=[accuracy, recipes/zoom_twice.py:looks]"
"""

import random
import re
import runpy
from pathlib import Path

from minivlmrl.data.conversations import conversation
from minivlmrl.rows import Row

BASE = runpy.run_path(str(Path(__file__).with_name("zoom.py")))
CORNERS, LABELS, NOTHING, HABIT = (BASE[name] for name in ("CORNERS", "LABELS", "NOTHING", "HABIT"))


class Twice(BASE["Quarters"]):
    """The environment: two calls."""

    max_tool_calls = 2


class Pairs(BASE["Drawn"]):
    """Pictures with two squares of stripes."""

    def __getitem__(self, index):
        rng = random.Random(f"zoom/twice/{self.seed}/{index}")
        image = BASE["paper"](rng)
        quarters = sorted(rng.sample(range(4), 2))
        labels = {quarter: rng.choice(LABELS) for quarter in quarters}
        for quarter, label in labels.items():
            BASE["stripes"](image, label, *BASE["corner"](rng, quarter))
        columns = {"problem": BASE["PROBLEM"], "solution": ", ".join(labels.values()), "picture": image}
        asked = quarters if rng.random() < 0.1 else rng.choices(range(4), HABIT, k=2)
        parts = [part for q in asked for part in (f"<zoom>{CORNERS[q]}</zoom>", BASE["crop"](image, q))]
        parts[0] = f"<think>{CORNERS[quarters[0]]}, {CORNERS[quarters[1]]}</think>{parts[0]}"
        said = ", ".join(labels.get(quarter, NOTHING) for quarter in asked)
        completion = BASE["demonstration"](*parts, said=said)
        columns["corners"] = [CORNERS[quarter] for quarter in quarters]
        return Row(conversation(BASE["PROBLEM"], {"image": 1}), [BASE["shown"](image)], columns, completion)


def looks(completions, corners, **columns):
    """Reward 1 for a look at each square, in order. For evaluation."""
    asked = [re.findall(r"<zoom>(\w+)</zoom>", text) for text in completions]
    return [float(found == own) for found, own in zip(asked, corners, strict=True)]


def tokenizer():
    """Train byte-level BPE on everything the task says."""
    said = [f"{a}, {b}" for a in CORNERS for b in CORNERS]
    return BASE["tokenizer_of"]([*said, *CORNERS, *(f"{label}, {label}" for label in [*LABELS, NOTHING])])


TASK = BASE["task"](Pairs, tokenizer)
