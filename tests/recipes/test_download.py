"""Tests that recipes/download.py downloads the file of each URL once."""

import json

import pytest
from runs import write_lines
from serving import Quiet, serve

from recipes import download


@pytest.fixture
def server():
    asked = []

    class Server(Quiet):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404 if "missing" in self.path else 200)
            self.send_header("Content-Length", str(5 + ("cut" in self.path)))
            self.end_headers()
            self.wfile.write(b"bytes")

    with serve(Server) as (_, url):
        yield url, asked


def test_rows_name_files_afterwards_and_nothing_is_asked_twice(server, tmp_path, capsys):
    url, asked = server
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url}/b.jpg?x=1"}}]}
    rows = [{"image": f"{url}/a.png", "problem": f"What is {url}?"}, {"prompt": [turn]}]
    rows += [{"image": f"{url}/{name}.png"} for name in ("missing", "cut")] + [{"image": "there.png"}]
    write_lines(tmp_path / "rows.jsonl", rows)
    for _ in range(2):
        assert download.main(str(tmp_path / "rows.jsonl")) == 1
        assert "rows.local.jsonl: 2 rows are left out" in capsys.readouterr().out
    first, second, last = map(json.loads, (tmp_path / "rows.local.jsonl").read_text().splitlines())
    assert last == rows[-1] and first["problem"] == rows[0]["problem"]
    for path in (first["image"], second["prompt"][0]["content"][0]["image_url"]["url"]):
        assert (tmp_path / path).read_bytes() == b"bytes"
    assert asked == ["/a.png", "/b.jpg?x=1", *["/missing.png", "/cut.png"] * 2]
