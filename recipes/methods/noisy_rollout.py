"""NoisyRollout (arXiv 2504.13055): sample half of each group beside a noisy picture, train all beside the clean one.

python train.py recipes/fashion.yaml "--sampling.engine=recipes/methods/noisy_rollout.py:NoisyRollout(steps=2000)" \
    --rollout.max_logp_mismatch=.inf

Sampler and trainer see other pictures, so their log-probabilities differ on purpose: the check is off.
Left out: noise before instead of after resizing, rounding to 8 bits, and videos.
"""

import math
from dataclasses import replace

import torch

from minivlmrl.generation.sampler import Sampler


class NoisyRollout(Sampler):
    """Sampler with annealed noise.

    Args:
        steps: optimizer steps of the stage.
        noise: diffusion step of the noise at the start, below 1,000.
        slope, middle: the noise falls as a sigmoid around the fraction `middle` of the stage.
    """

    def __init__(self, *arguments, steps=100, noise=500, slope=30.0, middle=0.4):
        super().__init__(*arguments)
        self.schedule = steps, noise, slope, middle

    def __call__(self, prompts, num_generations, keys):
        kept = diffusion_kept(noise_step(self.step, *self.schedule))
        noisy = []
        for prompt in prompts:
            noisy.append(replace(prompt, pixel_values=self.add_noise(prompt.pixel_values, kept), vision_embeds=None))
            noisy[-1].row = prompt.row
        half = num_generations // 2
        distorted = super().__call__(noisy, half, [f"{key}/noisy" for key in keys])
        clean = super().__call__(prompts, num_generations - half, keys)
        return [a + b for a, b in zip(clean, distorted, strict=True)]

    def add_noise(self, patches, kept):
        """Add Gaussian noise to pixel values from 0 to 1; `kept` is the share of the picture's variance."""
        images = self.processor.image_processor
        mean, std = (
            torch.tensor(x).repeat_interleave(patches.shape[1] // 3).to(patches)
            for x in (images.image_mean, images.image_std)
        )
        pixels = math.sqrt(kept) * (patches * std + mean) + math.sqrt(1 - kept) * torch.randn_like(patches)
        return (pixels.clamp(0, 1) - mean) / std


def noise_step(step, steps, noise, slope, middle):
    """Return the diffusion step of the noise, from about `noise` down to 0."""
    return int(noise * (1 - 1 / (1 + math.exp(-slope * (step / steps - middle)))))


def diffusion_kept(number):
    """Return the product of (1 - beta) up to a diffusion step, with the authors' 1,000 betas."""
    betas = torch.linspace(-6, 6, 1000).sigmoid() * (0.5e-2 - 1e-5) + 1e-5
    return float((1 - betas).cumprod(0)[number])
