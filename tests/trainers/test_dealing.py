"""Test that groups are dealt to ranks by length, and that dealing changes nothing that a rank trains on."""

import pytest
import torch

from minivlmrl.config.loading import load_config
from minivlmrl.data.loader import Batches
from minivlmrl.run.rollout_log import groups
from minivlmrl.run.setup import build_model
from minivlmrl.trainers import registry
from minivlmrl.trainers.dealing import assign
from tests.distributed.test_process_group import REFERENCE, prepare
from tests.helpers.on_ranks import Uneven, launch


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[9, 5, 1], [8, 7, 2]], [[(0, 0), (0, 1), (1, 2)], [(1, 0), (1, 1), (0, 2)]]),
        ([[1, 9], [2, 8]], [[(0, 1), (0, 0)], [(1, 1), (1, 0)]]),
        ([[9, 8], [2, 1]], [[(0, 0), (1, 1)], [(0, 1), (1, 0)]]),
        ([[5, 5, 5], [5, 5, 5]], [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]),  # no group moves
    ],
)
def test_examples(lengths, expected):
    assert assign(lengths) == expected


@pytest.mark.parametrize(("ranks", "slowest", "sharded"), [(8, 1.01, 1.1), (64, 1.04, 1.15)])
def test_long_tails(ranks, slowest, sharded):
    """Without dealing, the slowest of 8 ranks takes 1.15 times the mean on average, and the slowest of 64 1.24 times.

    Each rank has 8 prompts of 1,224 tokens with 8 completions, whose lengths are lognormal with a median of 800.
    """
    torch.manual_seed(0)
    lengths = (800 * torch.randn(ranks, 8, 8).exp()).clamp(64, 4096).round().sum(2) + 1224
    dealt = torch.stack([torch.stack([lengths[group] for group in part]) for part in assign(lengths.tolist())])
    mean = lengths.sum(1).mean()
    assert dealt.sum() == lengths.sum() and lengths.sum(1).max() > 1.1 * mean
    assert dealt.sum(1).max() < slowest * mean
    assert dealt.amax(0).sum() < sharded * mean  # sharded ranks also wait for each other in each micro-batch


def step_on_rank(folder, overrides, world):
    """Return the groups of this rank by row key, before and after dealing, and the advantages in the log."""
    config = load_config(folder / "recipe.yaml", [f"--output_dir={folder / 'out'}", *overrides])
    model, processor = build_model(config, world)
    trainer = registry.find_trainer("grpo", config)(config, model, processor, world)
    step = next(trainer.steps(Batches(Uneven(), trainer)))
    dealt = {}
    for sample in (sample for batch in step.micro_batches for sample in batch.samples):
        dealt.setdefault(sample.row.key, []).append(sample)
    logged = [[one["advantage"] for one in line["completions"]] for line in groups(trainer, step)]
    sampled = {group[0].row.key: group for group in step.groups}
    contents = [{key: list(map(content, group)) for key, group in some.items()} for some in (sampled, dealt)]
    return *contents, dict(zip(sampled, logged, strict=True))


def content(sample):
    prompt, completion = sample.prompt, sample.completion
    tensors = prompt.input_ids, prompt.pixel_values, prompt.vision_embeds, completion.ids, completion.logps
    return sample.index, [image.tobytes() for image in prompt.row.images], *tensors, sample.rewards


def test_nothing_is_lost(tmp_path):
    """A group moves as a whole, with its image embeddings, and the log has the advantages of a single process."""
    prepare(tmp_path)
    grpo = [*REFERENCE, "--grpo.prompts_per_step=8", "--model.freeze=[vision, merger]"]
    [(one, _, advantages)] = [rank["step"] for rank in launch(1, tmp_path, {"step": grpo}, step_on_rank)]
    (before, after, logged), (other_before, other_after, other_logged) = [
        rank["step"] for rank in launch(2, tmp_path, {"step": grpo}, step_on_rank)
    ]
    assert list(before | other_before) == list(one)
    assert len(after) == len(other_after) == 4 and before.keys() != after.keys()
    moved = after | other_after
    for key, group in (before | other_before).items():
        for found, expected in zip(moved[key], group, strict=True):
            torch.testing.assert_close(found[2:], expected[2:], rtol=0, atol=0)
            assert found[:2] == expected[:2]
    assert logged | other_logged == {key: pytest.approx(values) for key, values in advantages.items()}
    tokens = [sum(len(sample[2]) + len(sample[5]) for group in part.values() for sample in group)
              for part in (before, other_before, after, other_after)]  # fmt: skip
    assert abs(tokens[2] - tokens[3]) < 20 < abs(tokens[0] - tokens[1])
