"""Serve a page on this machine: drop a picture, ask, and read answers by a model and its base side by side."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

import torch

from minivlmrl.config.options import LoRAOptions, RunConfig
from minivlmrl.data.download import find_folder
from minivlmrl.distributed import process_group
from minivlmrl.errors import UserError, in_one_line
from minivlmrl.extras.answers.chat import answer, build_row, inference_config
from minivlmrl.model.checkpoint import read_config
from minivlmrl.run.setup import build_model

PAGE = r"""<!doctype html><html lang="en"><meta charset="utf-8"><title>minivlmrl</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui; } body { margin: auto; max-width: 1000px; padding: 16px; }
label { display: block; border: 2px dashed gray; padding: 16px; text-align: center; cursor: pointer; }
img { max-width: 100%; max-height: 300px; } form { display: flex; gap: 8px; margin: 12px 0; }
textarea { flex: 1; font: inherit; min-width: 0; } h2 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 12px; }
section { border: 1px solid gray; padding: 12px; min-width: 0; } p { white-space: pre-wrap; overflow-wrap: anywhere; } i { opacity: .6; }</style>
<label>Drop a picture here, or click to choose one<input type="file" accept="image/*" hidden><br><img alt="" hidden></label>
<form><textarea rows="2" placeholder="Your question" required></textarea><button>Ask</button></form><main></main><script>
const find = (name) => document.querySelector(name), reader = new FileReader();
const add = (parent, name, text = "") => parent.appendChild(Object.assign(document.createElement(name), {textContent: text}));
let image = null;  // data URI
const places = MODELS.map((name) => {
  const section = add(find("main"), "section");
  return add(section, "h2", name) && add(section, "p");
});
reader.onload = () => { image = find("img").src = reader.result; find("img").hidden = false; };
find("input").onchange = (event) => reader.readAsDataURL(event.target.files[0]);
find("label").ondragover = (event) => event.preventDefault();
find("label").ondrop = (event) => { event.preventDefault(); reader.readAsDataURL(event.dataTransfer.files[0]); };
async function ask(place, model) {
  const answer = await fetch("/", {method: "POST", body: JSON.stringify({model, prompt: find("textarea").value, image})});
  const parts = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = "", part; !(part = await parts.read()).done;) {
    text += part.value, place.replaceChildren();
    for (const piece of text.split(/(<think>[^]*?(?:<\/think>|$))/)) add(place, piece.startsWith("<think>") ? "i" : "span", piece);
  }
}
find("form").onsubmit = (event) => {
  event.preventDefault();
  places.forEach((place, model) => { place.textContent = "…"; ask(place, model).catch((error) => { place.textContent = error; }); });
};</script></html>"""  # noqa: E501


class Handler(BaseHTTPRequestHandler):
    """Serve the page and answers, but no file; refuse requests from other web sites."""

    page, lock = b"", Lock()  # one answer at a time
    answers: list[Callable]  # functions (prompt, image, show)

    def begin(self, kind: str) -> bool:
        hosts = [f"{name}:{self.connection.getsockname()[1]}" for name in ("127.0.0.1", "localhost")]
        is_own_page = self.headers.get("Origin") in (None, *(f"http://{host}" for host in hosts))
        is_allowed = self.path == "/" and self.headers.get("Host") in hosts and is_own_page
        self.send_response(200 if is_allowed else 403)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()
        return is_allowed

    def do_GET(self):
        if self.begin("text/html"):
            self.wfile.write(self.page)

    def do_POST(self):
        try:
            if self.begin("text/plain"):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not (asked["image"] or "data:image/").startswith("data:image/"):
                    raise UserError("only a picture that was dropped on the page is read, and no file")
                with self.lock:
                    self.answers[asked["model"]](asked["prompt"], asked["image"], self.show)
        except ConnectionError as error:
            self.log_error("the page was closed: %s", error)
        except Exception as error:
            self.show(in_one_line(error))

    def show(self, text: str):
        self.wfile.write(text.encode())
        self.wfile.flush()


def load(config: RunConfig) -> Callable:
    """Load a model, and return a function (prompt, image, show) for answers."""
    world = process_group.setup(torch.get_num_threads(), config.timeout, config.uses_fsdp)
    model, processor = build_model(config, world)

    def ask(prompt: str, image: str | None, show: Callable):
        asked = argparse.Namespace(prompt=prompt, image=[*filter(None, [image])], video=[], system=None)
        answer(model, processor, config, world, build_row(asked, config.data), 0, show)

    return ask


def main(arguments: list[str]):
    parser = argparse.ArgumentParser("minivlmrl serve", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder of the model, or its repository id on the Hub")
    parser.add_argument("--base", help="folder or id of a second model, asked with the same prompt template")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1; defaults to 8000")
    options, overrides = parser.parse_known_args(arguments)
    configs = {options.model: inference_config(options, overrides)}
    if options.base:  # asked with the model prompt template
        own = {"path": options.base, "dtype": read_config(find_folder(options.base)).torch_dtype}
        trained = configs[options.model]
        configs[options.base] = replace(trained, model=replace(trained.model, **own), adapter=LoRAOptions())
    Handler.answers = [load(config) for config in configs.values()]
    Handler.page = PAGE.replace("MODELS", json.dumps([*configs]).replace("<", r"\u003c")).encode()
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]} in a browser; Ctrl-C ends", flush=True)
        server.serve_forever()
