"""A vision tower that nobody trains sees the images of a rollout once, for sampling, reference and training."""

from collections.abc import Sequence

from minivlmrl.rows import Prompt


def see_once(algorithm, prompts: Sequence[Prompt]):
    """Let the prompts keep what the prefill, the tower's next forward, makes of their images.

    The reference's tower is the policy's, if that is frozen. A critic or a reward model reads the same prompts with a
    tower of its own, so with these nothing is kept, nor where the prefill is made in pieces.
    """
    visual, most = algorithm.policy.visual, algorithm.run.sampling.max_tokens_at_once
    trained = any(parameter.requires_grad for parameter in visual.parameters())
    merge = algorithm.policy.config.vision_config.spatial_merge_size**2
    tokens = [int(prompt.image_grid_thw.prod(-1).sum()) // merge for prompt in prompts]
    if (
        trained
        or algorithm.stage != "grpo"
        or algorithm.reward_model is not None
        or most is not None
        or not sum(tokens)
    ):
        return

    def keep(visual, arguments, vision_embeds):
        for prompt, own in zip(prompts, vision_embeds.split(tokens), strict=True):
            prompt.vision_embeds = own
        handle.remove()

    handle = visual.register_forward_hook(keep)
