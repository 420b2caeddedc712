"""Reward function: mean log-prob under another model, loaded by every rank.

    rewards: {"recipes/fluent.py:fluent(path='FOLDER')": 1}

`minivlmrl memory` does not count this model, so leave room for it.
"""

from functools import cache

import torch

from minivlmrl.data.rows import Completion, Row
from minivlmrl.model.checkpoint import load_model, load_processor
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def load_judge(path: str):
    """Load model and processor from a folder, only once per process."""
    return load_model(path, device=DEVICE).requires_grad_(False), load_processor(path)


@torch.no_grad()
def fluent(completions, path="FOLDER", **columns):
    """Return the mean log-prob per token for each completion, in nats."""
    model, processor = load_judge(path)
    prompt = Row([{"role": "user", "content": "Write."}], []).prompt(processor)
    texts = [Completion(torch.tensor(processor.tokenizer.encode(text or "."))) for text in completions]
    logps, _ = per_token_logps(model, pack([prompt], [texts], model.config, DEVICE))
    return [part.mean().item() for part in logps.split([len(text.ids) for text in texts])]
