"""Test recipes/fashion.py on small files in the format of Fashion-MNIST."""

import gzip
from types import SimpleNamespace

import numpy as np
import pytest

from recipes.fashion import LABELS, TASK, read_split

IMAGES = np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8)
CLASSES = np.arange(30, dtype=np.uint8) % 10
SPLITS = {"train": (IMAGES[:20], CLASSES[:20]), "test": (IMAGES[20:], CLASSES[20:])}


def write_debian(folder):
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = SPLITS[split]
        sizes = np.array([2051, len(images), 28, 28], ">i4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(sizes + images.tobytes()))
        header = np.array([2049, len(labels)], ">i4").tobytes()
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))


def test_the_photographs_and_labels_are_those_of_the_files(tmp_path):
    write_debian(tmp_path)
    for split, expected in SPLITS.items():
        for array, own in zip(read_split(tmp_path, split), expected, strict=True):
            assert array.dtype == np.uint8 and np.array_equal(array, own)


@pytest.fixture
def datasets(tmp_path):
    """Return a function from the options of the task to its rows."""
    write_debian(tmp_path)
    data = SimpleNamespace(prompt_template="{problem}", system_prompt=None, eval_rows=5)
    return lambda **options: TASK.datasets(data, 0, str(tmp_path), **options)


def test_rows_of_sft_have_wrong_labels_and_rows_of_grpo_none(datasets):
    training, held_out = datasets(demonstrations=12, wrong_demonstrations=0.5)
    demonstrations, prompts = training["demonstrations"], training["prompts"]
    assert (len(demonstrations), len(prompts), len(held_out)) == (12, 20, 5)
    assert 1 <= sum(row.completion != row.columns["solution"] for row in demonstrations) <= 10
    assert sorted(row.columns["solution"] for row in prompts) == sorted(LABELS[label] for label in CLASSES[:20])
    for label, image, row in zip(CLASSES[20:], IMAGES[20:], held_out, strict=False):
        assert row.columns["solution"] == LABELS[label]
        shown = np.asarray(row.images[0].convert("L").resize((28, 28)), np.float64)
        assert np.corrcoef(shown.ravel(), image.ravel())[0, 1] > 0.5
