"""Does a look follow the thought or the picture? Names another corner in the thought of a policy of recipes/zoom.yaml.

    python benchmarks/thought.py runs/zoom/checkpoint [--rows 128]

Each held-out picture is followed by `<think>corner</think><zoom>`, with each of the four corners. Printed are the mean
probabilities of the quarter that the thought names, and of the one that has the stripes.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from minivlmrl.batch import pack  # noqa: E402
from minivlmrl.generate import Decode, prefill  # noqa: E402
from minivlmrl.hub.load import load_name  # noqa: E402
from minivlmrl.scale.checkpoint import load_model, load_processor  # noqa: E402


def main(arguments: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args(arguments)
    model, processor = load_model(options.folder), load_processor(options.folder)
    os.chdir(ROOT)
    rows, corners = load_name("recipes/zoom.py:Stripes")(options.rows, "eval"), load_name("recipes/zoom.py:CORNERS")
    encode = processor.tokenizer.encode
    digits = [encode(f"<zoom>{q + 1}</zoom>")[2] for q in range(4)]
    right, others = [], []
    for i in range(options.rows):
        prompt, seen = rows[i].prompt(processor), rows[i].columns["quarter"] - 1
        begun = [torch.tensor(encode(f"<think>{corner}</think><zoom>")) for corner in corners]
        prompts = [replace(prompt, input_ids=torch.cat([prompt.input_ids, ids])) for ids in begun]
        with torch.no_grad():
            batch = pack(prompts, [[] for _ in prompts], model.config)
            logits, *_ = prefill(model, batch, torch.arange(4), 1, Decode())  # (4, V)
        probs = logits.softmax(-1)[:, digits]  # (named, asked for)
        right.append(probs[seen, seen].item())
        others += [(probs[named, named].item(), probs[named, seen].item()) for named in range(4) if named != seen]
    followed, looked = (sum(column) / len(others) for column in zip(*others, strict=True))
    print(f"the right corner is named: looks at it {sum(right) / len(right):.3f}")
    print(f"another corner is named: looks there {followed:.3f}, at the right one {looked:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
