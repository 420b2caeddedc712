"""Test that recipes/download.py downloads the file of each URL once, and that no server response ends the script."""

import gzip
import io
import json
import socket
from contextlib import contextmanager
from threading import Thread

import PIL.Image
import pytest

from recipes import download
from tests.helpers.runs import write_lines

file = io.BytesIO()
PIL.Image.new("RGB", (9, 9), "red").save(file, "png")
PNG = file.getvalue()


@contextmanager
def answering(answer):
    """Serve answer(path), which need not be HTTP, and close the connection; yield the address and requested paths."""
    listener = socket.create_server(("127.0.0.1", 0))
    requested = []

    def work():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the listener was closed
            with connection:
                requested.append(connection.recv(2**16).split()[1].decode())
                connection.sendall(answer(requested[-1]))

    Thread(target=work, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", requested
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def http(body, head=b"200 OK", *headers):
    return b"\r\n".join((b"HTTP/1.1 " + head, *headers, b"", body))


def png(path):
    """Answer with an image, an error for a path with "missing", or too few bytes for a path with "cut"."""
    length = len(PNG) + ("cut" in path)
    return http(PNG, b"404 Gone" if "missing" in path else b"200 OK", b"Content-Length: %d" % length)


def test_rows_name_files_afterwards_and_nothing_is_asked_twice(tmp_path, capsys):
    with answering(png) as (url, requested):
        turn = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url}/b.jpg?x=1"}}]}
        rows = [{"image": f"{url}/a.png", "problem": f"What is {url}?\u2028\x85"}, {"prompt": [turn]}]
        rows += [{"image": f"{url}/{name}.png"} for name in ("missing", "cut")] + [{"image": "there.png"}]
        write_lines(tmp_path / "rows.jsonl", rows)
        text = (tmp_path / "rows.jsonl").read_text().replace("\\u2028", "\u2028")  # as with ensure_ascii=False
        (tmp_path / "rows.jsonl").write_text(text)
        for _ in range(2):
            assert download.main([str(tmp_path / "rows.jsonl")]) == 1
            assert "rows.local.jsonl: rows left out: 2" in capsys.readouterr().out
    first, second, last = map(json.loads, (tmp_path / "rows.local.jsonl").read_text().strip("\n").split("\n"))
    assert last == rows[-1] and first["problem"] == rows[0]["problem"]
    for path in (first["image"], second["prompt"][0]["content"][0]["image_url"]["url"]):
        assert (tmp_path / path).read_bytes() == PNG
    assert requested == ["/a.png", "/b.jpg?x=1", *["/missing.png", "/cut.png"] * 2]


HOSTILE = {
    "nothing": b"",
    "not HTTP": b"SSH-2.0-OpenSSH\r\n",
    "many headers": http(PNG, b"200 OK", *[b"A: a"] * 200),
    "a cut chunk": http(b"ff\r\nab", b"200 OK", b"Transfer-Encoding: chunked"),
    "a redirection to nowhere": http(b"", b"302 Found", b"Location: http://[::bad"),
    "a redirection to a file": http(b"", b"302 Found", b"Location: file:///etc/passwd"),
    "a redirection to itself": http(b"", b"302 Found", b"Location: /a.png"),
    "a page": http(b"<!DOCTYPE html><title>gone</title>"),
    "compressed": http(gzip.compress(PNG), b"200 OK", b"Content-Encoding: gzip"),
    "an error": http(PNG, b"500 Internal"),
}


@pytest.mark.parametrize("answer", HOSTILE)
def test_no_answer_ends_the_download(tmp_path, capsys, answer):
    with answering(lambda path: HOSTILE[answer]) as (url, _):
        write_lines(tmp_path / "rows.jsonl", [{"image": f"{url}/a.png"}, {"image": "there.png"}])
        status = download.main([str(tmp_path / "rows.jsonl")])
    assert status == 1 and capsys.readouterr().out.endswith("rows.local.jsonl: rows left out: 1\n")
    assert (tmp_path / "rows.local.jsonl").read_text() == '{"image": "there.png"}\n'
    assert not list((tmp_path / "rows.files").iterdir())


@pytest.mark.parametrize(
    "line", ["[" * 10**5, "{", '{"image": "http://[x/a.png"}', '{"a": "\\ud800"}', '{"b": "http://"}']
)
def test_no_line_ends_the_download(tmp_path, capsys, line):
    (tmp_path / "rows.jsonl").write_text(f'{line}\n\n{{"c": 1}}\n')
    assert download.main([str(tmp_path / "rows.jsonl")]) == 1
    assert (tmp_path / "rows.local.jsonl").read_text() == '{"c": 1}\n'
    assert "rows.jsonl:1: left out (" in capsys.readouterr().out


@pytest.mark.parametrize("limit, value, expected", [
    ("LARGEST", 9, "over 9 bytes"), ("LONGEST", -1, "took over -1 seconds")
])  # fmt: skip
def test_a_slow_or_large_download_ends(monkeypatch, limit, value, expected):
    monkeypatch.setattr(download, limit, value)
    with answering(png) as (url, _), pytest.raises(ValueError, match=expected):
        download.read(f"{url}/a.png")


def test_a_video_is_kept(tmp_path):
    for content in (b"\0\0\0\x18ftypmp42", b"\x1aE\xdf\xa3webm", b"RIFF\0\0\0\0AVI LIST", PNG):
        download.check_media("http://x", content)
