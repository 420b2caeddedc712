"""Objects by name."""

import json

import pytest

from minivlmrl.hub.load import load_name


def test_a_module_and_a_file(tmp_path):
    """A file need not be where Python looks for modules; it is run once."""
    assert load_name("json:dumps") is json.dumps
    file = tmp_path / "own.py"
    file.write_text("import json\nWRITE = json.dumps\n\n\ndef double(x):\n    return 2 * x\n")
    assert load_name(f"{file}:WRITE") is json.dumps
    assert load_name(f"{file}:double")(4) == 8
    assert load_name(f"{file}:double") is load_name(f"{file}:double")


@pytest.mark.parametrize(("target", "cause"), [
    ("json:dumpz", "AttributeError"), ("jsonn:dumps", "ModuleNotFoundError"), ("gone.py:f", "FileNotFoundError"),
    ("FILE:other", "KeyError"), ("no name", "ValueError"),
])  # fmt: skip
def test_what_is_not_there_is_named(tmp_path, target, cause):
    (tmp_path / "own.py").write_text("")
    target = target.replace("FILE", str(tmp_path / "own.py"))
    with pytest.raises(ValueError, match=rf"^{target}: it cannot be loaded \({cause}: "):
        load_name(target)
