"""Test that groups are assigned to ranks by length, and that this changes nothing that a rank trains on."""

import pytest
import torch

from minivlmrl.data.loader import Batches
from minivlmrl.run.rollout_log import groups
from tests.distributed.test_process_group import REFERENCE, prepare
from tests.helpers.on_ranks import Uneven, launch, trainer_on_rank


def step_on_rank(folder, overrides, world):
    """Return the groups of this rank by row key, before and after dealing, and the advantages in the log."""
    trainer = trainer_on_rank(folder, overrides, world)
    step = next(trainer.steps(Batches(Uneven(), trainer)))
    rebalanced = {}
    for sample in (sample for batch in step.micro_batches for sample in batch.samples):
        rebalanced.setdefault(sample.row.key, []).append(sample)
    logged = [[one["advantage"] for one in line["completions"]] for line in groups(trainer, step)]
    sampled = {group[0].row.key: group for group in step.groups}
    contents = [{key: list(map(content, group)) for key, group in some.items()} for some in (sampled, rebalanced)]
    return *contents, dict(zip(sampled, logged, strict=True))


def trial_on_rank(folder, overrides, world):
    """Return the number of samples in each micro-batch that this rank tries before it trains."""
    trainer = trainer_on_rank(folder, overrides, world)
    trainer.steps(Batches(Uneven(), trainer))
    return [len(batch.samples) for batch in trainer.trial_batches([Uneven()[0], Uneven()[1]])]


def content(sample):
    prompt, completion = sample.prompt, sample.completion
    tensors = prompt.input_ids, prompt.pixel_values, prompt.vision_embeds, completion.ids, completion.logps
    return sample.index, [image.tobytes() for image in prompt.row.images], *tensors, sample.rewards


def test_nothing_is_lost(tmp_path):
    """A group moves as a whole, with its image embeddings, and the log has the advantages of a single process."""
    prepare(tmp_path)
    grpo = [*REFERENCE, "--grpo.prompts_per_step=8", "--model.freeze=[vision, merger]"]
    [(one, _, advantages)] = [rank["step"] for rank in launch(1, tmp_path, {"step": grpo}, step_on_rank)]
    ranks = [rank["step"] for rank in launch(2, tmp_path, {"step": grpo}, step_on_rank)]
    (before, after, logged), (other_before, other_after, other_logged) = ranks
    assert list(before | other_before) == list(one)
    assert len(after) == len(other_after) == 4 and before.keys() != after.keys()
    for key, group in (before | other_before).items():
        for found, expected in zip((after | other_after)[key], group, strict=True):
            torch.testing.assert_close(found[2:], expected[2:], rtol=0, atol=0)
            assert found[:2] == expected[:2]
    assert logged | other_logged == {key: pytest.approx(values) for key, values in advantages.items()}
    tokens = [sum(len(sample[2]) + len(sample[5]) for group in part.values() for sample in group)
              for part in (before, other_before, after, other_after)]  # fmt: skip
    assert abs(tokens[2] - tokens[3]) < 20 < abs(tokens[0] - tokens[1])


def test_ranks_try_their_largest_batch_before_the_first_step(tmp_path):
    prepare(tmp_path)
    stages = {stage: [f"--stages=[{stage}]", f"--{stage}.num_generations=3"] for stage in ("grpo", "ppo")}
    for rank in launch(2, tmp_path, stages, trial_on_rank):
        assert rank == {"grpo": [3, 3], "ppo": [3, 3]}
