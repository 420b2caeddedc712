"""Names of rewards: options in a name, and functions of one's own in the table. The rest is in test_rewards.py."""

import pytest

from minivlmrl.reward_functions.names import REWARDS, get_reward, required_columns


def near(completions, solution, tolerance=0.0, units=None, **columns):
    return [tolerance for _ in completions]


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(REWARDS, "near", near)


@pytest.mark.parametrize("name", ["near", "near()", "near( )", f"{__file__}:near", f"{__name__}:near"])
def test_without_options(own, name):
    assert get_reward(name)(["a"], ["b"]) == [0.0] and required_columns([name]) == ["solution"]


@pytest.mark.parametrize(
    "name", ["near(tolerance=0.5)", "near(units=['(m)'], tolerance=.5,)", f"{__file__}:near(tolerance=0.5)"]
)
def test_options_are_named_parameters(own, name):
    assert get_reward(name)(["a"], ["b"]) == [0.5]
    assert required_columns([name]) == ["solution"]


@pytest.mark.parametrize("name, error", [
    ("near(0.5)", r"^reward near\(0.5\): its options must have the form name=value, name=value$"),
    ("near(tolerance=open('x'))", "its options must have the form"),
    ("near(tolerence=0.5)", r"there is no option 'tolerence'; there are: tolerance, units$"),
    ("near(solution=['b'])", "there is no option 'solution'"),
    ("format(strict=True)", "there is no option 'strict'; there are: none$"),
    ("far(tolerance=0.5)", "^unknown reward 'far'; there are: acc_0_5, accuracy, "),
])  # fmt: skip
def test_other_options_are_refused(own, name, error):
    with pytest.raises(ValueError, match=error):
        get_reward(name)


@pytest.mark.parametrize(("text", "says"), [
    ("def f(completions, **columns)\n    return", r"cannot be loaded \(SyntaxError: .*\(mine.py, line 1\)\)$"),
    ("f = undefined", r"cannot be loaded \(NameError: name 'undefined' is not defined\)$"),
    ("f = 0.5", r"it is 0\.5, no function$"),
    ("def f(completions):\n    return []", r"end its arguments with \*\*columns$"),
])  # fmt: skip
def test_a_file_of_ones_own_that_is_wrong_is_one_line(tmp_path, text, says):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=rf"^reward:? .*mine\.py:f: .*{says}"):
        get_reward(f"{tmp_path / 'mine.py'}:f")
