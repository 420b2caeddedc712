"""Sample given tokens instead of a model's choices, in tests of tools and trajectories."""

from dataclasses import replace

import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.generation import sampler as sampler_file
from minivlmrl.generation.environments import make_sampler
from tests.helpers import tiny
from tests.helpers.stages import ONE


def model_of(processor, model_type="qwen2_5_vl", dtype=torch.float32):
    ids = [processor.tokenizer.special_tokens[f"<|{kind}_pad|>"] for kind in ("image", "video")]
    config = replace(tiny.config(model_type=model_type), image_token_id=ids[0], video_token_id=ids[1])
    return tiny.model_of(replace(config, vocab_size=len(processor.tokenizer))).to(dtype)


def sample_script(monkeypatch, scripts, rows, processor, model, world=ONE, **options):
    """Sample completions that follow the scripts of token ids, and return (groups, prompts)."""
    sampler = make_sampler(model, processor, SamplingOptions(**options), world)
    begin = type(sampler).token_sampler

    def token_sampler(self, *arguments):
        sample_token = begin(self, *arguments)
        for number, episode in enumerate(self.episodes):
            episode.script = scripts[number]
        return sample_token

    def draw(probs, numbers, step):
        ids = []
        for episode in (sampler.episodes[number] for number in numbers.tolist()):
            written = sum(len(turn.ids) for turn in getattr(episode, "turns", ())) + sum(episode.policy_mask)
            ids.append(episode.script[min(written, len(episode.script) - 1)])
        return torch.tensor(ids, device=numbers.device)

    with monkeypatch.context() as patch:
        patch.setattr(type(sampler), "token_sampler", token_sampler)
        patch.setattr(sampler_file, "sample_by_uniforms", lambda *_: draw)
        prompts = [row.prompt(processor) for row in rows]
        keys = [f"k{i}" for i in range(len(rows))]
        return sampler(prompts, len(scripts) // len(rows), keys), prompts
