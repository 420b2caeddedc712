"""recipes/two_steps.py: the steps are right, and no held-out problem is trained."""

import json
import re

from recipes import two_steps


def test_rows(tmp_path):
    two_steps.main(tmp_path)
    rows = {file.stem.removeprefix("two_steps_"): file.read_text().splitlines() for file in tmp_path.iterdir()}
    rows = {name: [json.loads(line) for line in lines] for name, lines in rows.items()}
    problems = [{row["problem"] for row in rows[name]} for name in ("train", "eval", "think")]
    assert [len(part) for part in problems] == [600, 96, 32]
    assert len(set.union(*problems)) == 728
    for thought, direct in zip(rows["think"], rows["direct"], strict=True):
        assert thought["problem"] == direct["problem"]
        steps, answer = re.fullmatch("<think>(.*)</think><answer>(.*)</answer>", thought["completion"]).groups()
        assert answer == direct["completion"]
        equations = re.findall(r"(\d+ [*+-] \d+) = (\d+)\.", steps)
        assert len(equations) == 2
        assert equations[1][1] == answer
        for left, right in equations:
            assert eval(left) == int(right)
        assert set(re.findall(r"\d+", equations[0][0])) < set(re.findall(r"\d+", thought["problem"]))
