"""Serve a local web page to ask a model and its base about a picture, and read both answers side by side."""

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
    """Serve the page and the answers, but no files. Requests from other web sites are refused."""

    page = b""
    lock = Lock()  # generate only one answer at a time
    answers: list[Callable]  # one function (prompt, image, show) per model

    def begin(self, kind: str) -> bool:
        port = self.connection.getsockname()[1]
        hosts = [f"127.0.0.1:{port}", f"localhost:{port}"]
        origins = [f"http://{host}" for host in hosts]
        is_own_page = self.headers.get("Origin") in (None, *origins)
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
                length = int(self.headers["Content-Length"])
                asked = json.loads(self.rfile.read(length))
                image = asked["image"]
                if image and not image.startswith("data:image/"):
                    raise UserError("only a picture that was dropped on the page is read, and no file")
                ask = self.answers[asked["model"]]
                with self.lock:
                    ask(asked["prompt"], image, self.show)
        except ConnectionError as error:
            self.log_error("the page was closed: %s", error)
        except Exception as error:
            self.show(in_one_line(error))

    def show(self, text: str):
        self.wfile.write(text.encode())
        self.wfile.flush()


def load(config: RunConfig) -> Callable:
    """Load a model, and return a function (prompt, image, show) that answers a prompt."""
    world = process_group.setup(torch.get_num_threads(), config.timeout, config.uses_fsdp)
    model, processor = build_model(config, world)

    def ask(prompt: str, image: str | None, show: Callable):
        images = [image] if image else []
        asked = argparse.Namespace(prompt=prompt, image=images, video=[], system=None)
        row = build_row(asked, config.data)
        answer(model, processor, config, world, row, 0, show)

    return ask


def main(arguments: list[str]):
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser("minivlmrl serve", description=description, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder of the model, or its repository id on the Hub")
    parser.add_argument("--base", help="folder or id of a second model, asked with the same prompt template")
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1; defaults to 8000")
    options, overrides = parser.parse_known_args(arguments)
    configs = {options.model: inference_config(options, overrides)}
    if options.base:  # the base gets the same prompt template as the model
        trained = configs[options.model]
        dtype = read_config(find_folder(options.base)).torch_dtype
        base = replace(trained.model, path=options.base, dtype=dtype)
        configs[options.base] = replace(trained, model=base, adapter=LoRAOptions())
    Handler.answers = [load(config) for config in configs.values()]
    names = json.dumps([*configs]).replace("<", r"\u003c")
    Handler.page = PAGE.replace("MODELS", names).encode()
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]} in a browser; Ctrl-C ends", flush=True)
        server.serve_forever()
