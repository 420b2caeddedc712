"""Compare the rewards for length and repetition with TRL's."""

import math
import random

import pytest

from recipes.lengths import repetition
from tests.helpers.score_texts import score_texts


def test_cosine_equals_trl():
    rewards = pytest.importorskip("trl.rewards", reason="oracle missing: pip install trl==1.16.0")
    rng = random.Random(0)
    message = [rng.choice("34") for _ in range(40)]
    lengths = [rng.randrange(0, 150) for _ in range(40)]
    ids = [[0] * length for length in lengths]
    solution = ["3"] * 39 + [None]
    theirs = rewards.get_cosine_scaled_reward(100)(
        [[{"content": rf"\boxed{{{text}}}"}] for text in message], [text or "" for text in solution], ids
    )
    columns = {"completion_ids": ids, "solution": solution}
    name = "recipes/lengths.py:cosine(max_length=100, reward='recipes/answers.py:number')"
    ours = score_texts([name], message, columns, "whole")[:, 0].tolist()
    assert theirs[-1] is None and math.isnan(ours[-1])
    assert ours[:-1] == pytest.approx(theirs[:-1], abs=1e-6)


def test_repetition_equals_trl():
    rewards = pytest.importorskip("trl.rewards", reason="oracle missing: pip install trl==1.16.0")
    rng = random.Random(1)
    ids = [[rng.randrange(4) for _ in range(rng.randrange(12))] for _ in range(40)]
    for size, penalty in ((1, -1.0), (2, -0.5), (3, -1.0)):
        theirs = rewards.get_repetition_penalty_reward(size, penalty)(ids)
        assert repetition(ids, ngram_size=size, max_penalty=penalty) == pytest.approx(theirs)
