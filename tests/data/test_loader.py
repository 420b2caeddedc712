"""Test which rows a rollout gets, in which order, and with which workers."""

import itertools
import time
from concurrent.futures import wait
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch

from minivlmrl.config.options import DataOptions
from minivlmrl.data import file_dataset, loader, processor
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.rows import Row, uniform_numbers
from minivlmrl.distributed.process_group import World
from minivlmrl.tasks import shapes
from tests.helpers.talk import IMAGE_PART, user


def test_random_numbers_depend_on_the_key_of_a_prompt():
    """NumPy's generator is seeded with the key of a prompt, and gives one number per token of a completion."""
    numbers = uniform_numbers(["a", "bc"], 2, 3)
    expected = [np.random.default_rng(seed).random((2, 3)) for seed in ([97], [98, 99])]
    assert numbers.tolist() == np.concatenate(expected).tolist()
    assert numbers.dtype == torch.float64


@pytest.mark.parametrize(("size", "per_step"), [(50, 5), (10, 3), (3, 7), (1, 4)])
def test_every_pass_visits_every_row_once_in_another_order(size, per_step):
    numbers = list(itertools.chain(*itertools.islice(loader.shuffled(size, per_step, seed=0), 4 * size)))
    assert len(numbers) == 4 * size * per_step
    for start in range(0, len(numbers), size):
        assert sorted(numbers[start : start + size]) == list(range(size))
    assert size < 50 or numbers[:50] != numbers[50:100]


PROCESSOR = processor.Processor(shapes.tokenizer(), ImageProcessor())


class RankAlone(World):
    def barrier(self):
        """Do not wait for ranks that this process only imagines."""


class Numbered:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return Row([], [], {"number": index})


def batches(rank=0, ranks=1, prompts_per_step=4, steps=1, seed=0, rows=None, answers=(), batches_consumed=0, **data):
    trainer = SimpleNamespace(
        options=SimpleNamespace(prompts_per_step=prompts_per_step, steps_per_generation=steps), stage="grpo",
        config=SimpleNamespace(seed=seed, data=DataOptions(**data)), world=RankAlone(rank, ranks, torch.device("cpu")),
        processor=PROCESSOR, answers=answers,
    )  # fmt: skip
    return loader.Batches(rows or Numbered(), trainer, batches_consumed)


def next_rows(batches, count):
    return [[(row.columns["number"], row.index, row.key) for row in next(batches)] for _ in range(count)]


def test_rows_have_their_index_and_a_unique_key():
    rows = [row for draw in next_rows(batches(steps=2, seed=7), 3) for row in draw]
    assert [number for number, _, _ in rows] == [index for _, index, _ in rows]
    assert [key for _, _, key in rows] == [f"7/grpo/{draw}/{i}" for draw in range(3) for i in range(8)]
    # a resumed run continues after two batches
    assert next_rows(batches(steps=2, seed=7, batches_consumed=2), 1) == [rows[16:]]


@pytest.mark.parametrize(("ranks", "steps"), [(1, 3), (2, 3), (4, 1)])
def test_any_number_of_ranks_gets_the_same_rows_and_keys(ranks, steps):
    alone = next_rows(batches(steps=steps), 5)
    shares = [next_rows(batches(rank, ranks, steps=steps), 5) for rank in range(ranks)]
    for draw, rows in enumerate(alone):
        own = 4 // ranks
        together = []
        for step in range(steps):
            together += [row for share in shares for row in share[draw][step * own : (step + 1) * own]]
        assert together == rows
        assert {len(share[draw]) for share in shares} == {steps * own}


def test_a_skipped_row_is_reported_in_the_step_that_needs_it(write_rows, tmp_path, recwarn):
    """Not when a thread prepares it: a resumed run prepares it again, and would report it twice."""
    (tmp_path / "a.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    images = ["red", "green", "blue", "a"]
    rows = file_dataset.FileDataset(write_rows(*({"problem": image, "image": f"{image}.png"} for image in images)))
    read = batches(rows=rows, prompts_per_step=1, skip_unreadable=True, image_workers=1)
    for _ in itertools.takewhile(lambda numbers: numbers != [3], loader.shuffled(4, 1, 0)):
        next(read)
    wait(read.ahead)
    assert not recwarn
    next(read)
    assert [str(one.message).rpartition("is skipped; ")[2] for one in recwarn] == ["1 so far"]


def test_an_unreadable_row_is_replaced_by_the_next(write_rows, tmp_path):
    """Without data.skip_unreadable, a damaged file would stop the run again after each resumption."""
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    images = ["red", "a", "b", "green", "blue"]
    rows = file_dataset.FileDataset(write_rows(*({"problem": image, "image": f"{image}.png"} for image in images)))
    with pytest.raises(ValueError, match=r"rows\.jsonl:[23]: .*[ab]\.png: the image cannot be read"):
        [row.prompt(PROCESSOR) for row in next(batches(rows=rows, prompts_per_step=5))]
    read = batches(rows=rows, prompts_per_step=5, skip_unreadable=True)
    with pytest.warns(UserWarning) as noted:
        draws = [next(read), next(read)]
    assert [str(one.message).rpartition("is skipped; ")[2] for one in noted] == ["1 so far", "2 so far"]
    for draw in draws:
        assert sorted(row.index for row in draw) == [0, 3, 3, 3, 4] and len({row.key for row in draw}) == 5
        assert [row.columns["problem"] for row in draw] == [images[row.index] for row in draw]
        for row in draw:
            assert torch.equal(row.prompt(PROCESSOR).pixel_values, rows[row.index].prompt(PROCESSOR).pixel_values)


@pytest.mark.parametrize("answers", [("completion",), ("chosen", "rejected")])
def test_a_row_with_an_unreadable_image_in_an_answer_is_replaced(answers, write_rows, tmp_path):
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:40])
    question, answer = {"role": "user", "content": "Colors?"}, {"role": "assistant", "content": "red"}
    rows = []
    for image in ("green", "cut", "blue"):
        second = {"role": "user", "content": [{"type": "image", "image": f"{image}.png"}]}
        row = {"prompt": [question], answers[0]: [answer, second, answer]}
        rows.append(row | {name: "blue" for name in answers[1:]})
    rows = file_dataset.FileDataset(write_rows(*rows))
    good, damaged = rows[0], rows[1]
    assert processor.encode_answer(PROCESSOR, good, getattr(good, answers[0])).pictures
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*cut\.png: .*data\.skip_unreadable=true"):
        processor.encode_answer(PROCESSOR, damaged, getattr(damaged, answers[0]))
    with pytest.warns(UserWarning, match=r"rows\.jsonl:2: .*cut\.png: .*skipped; 1 so far"):
        draw = next(batches(rows=rows, prompts_per_step=3, answers=answers, skip_unreadable=True))
    assert sorted(row.index for row in draw) == [0, 2, 2]
    draw = next(batches(rows=rows, prompts_per_step=3, skip_unreadable=True))
    assert sorted(row.index for row in draw) == [0, 1, 2]


class Delayed(Numbered):
    def __init__(self):
        self.read = []
        self.threads = set()

    def __getitem__(self, index):
        time.sleep(0.002 * (index % 4))
        self.read.append(index)
        self.threads.add(torch.get_num_threads())
        picture = PIL.Image.linear_gradient("L").rotate(17 * index).convert("RGB")
        return Row([user([IMAGE_PART])], [picture], {"number": index})


def test_workers_give_the_same_rows_in_order():
    found = []
    for workers in (0, 4):
        draws = batches(rows=Delayed(), image_workers=workers)
        rows = [row for _ in range(5) for row in next(draws)]
        found.append([(row.index, row.key, row.prepared_prompt.pixel_values.numpy().tobytes()) for row in rows])
    assert found[0] == found[1]


def test_workers_use_one_cpu_thread_each():
    torch.set_num_threads(3)
    rows = Delayed()
    next(batches(rows=rows, image_workers=2))
    assert rows.threads == {1} and torch.get_num_threads() == 3


def test_workers_prepare_a_limited_number_of_rows(monkeypatch):
    monkeypatch.setattr(loader, "MAX_AHEAD", 3)
    rows = Delayed()
    draws = batches(rows=rows, image_workers=2)
    for number in range(1, 4):
        expected = {row.index for row in next(draws)} | {index for index, _ in draws.next_batch[:3]}
        [future.result() for future in draws.ahead]
        assert set(rows.read) >= expected and len(rows.read) == 4 * number + 3


def test_rows_that_are_all_unreadable_end_the_run(write_rows, tmp_path):
    (tmp_path / "red.png").write_bytes(b"")
    rows = file_dataset.FileDataset(write_rows(*[{"problem": "a", "image": "red.png"}] * 3))
    with pytest.raises(ValueError, match=r"^The run ends, because 100 .*red\.png: "):
        next(batches(rows=rows, skip_unreadable=True))
