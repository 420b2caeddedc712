"""Hooks for mkdocs: README as start page, pages for notebooks and linked code, and the menu.

The menu comes from docs/README.md, and the list of code files from docs/developer_guide.md.
Formulas become MathML, which browsers show without scripts and network.
"""

import html
import json
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
BADGE = re.compile(r"!\[([^]]*)\]\(https?://[^)]+\)")  # picture on another server, shown as its text
LINK = re.compile(r"(\]\(|^\[\w+\]: )([^)\s#]+)(?=[#)\s])", re.MULTILINE)
FORMULA = re.compile(r'(?<=class="arithmatex">)\s*\\([(\[])(.+?)\\[)\]]\s*(?=<)', re.DOTALL)
START, INDEX = "README.md", "docs/README.md"
STEP = "docs/scripts/step.py"  # writes docs/step.html
TESTS = {  # files without a test file of the same name
    "minivlmrl/data/messages.py": "tests/rows/test_refused.py",
    "minivlmrl/data/rows.py": "tests/data/test_loader.py",
    "minivlmrl/model/logprobs.py": "tests/model/test_decoder.py",
}
PAGE = re.compile(r"\[([^]]+)\]\(([\w/]+\.(?:md|html|ipynb))\)")
# first in the search: pages that explain options
FOUND_FIRST = {"data.md", "many_gpus.md", "memory.md", "metrics.md", "policy_gradients.md", "preferences.md"}
UNSEARCHED = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"  # header of a page outside the search
NAMES = {"vLLM"}  # lower-case names
MOVED = {  # former page: its successor
    "gpu": "results",
    "support": "results",
    "reading_list": "developer_guide",
    "notes/vllm": "use",
    "vectors": "library",
    "notes/bugs_of_others": "museum",
}
LANGUAGES = {
    "": "text",  # LICENSE
    ".csv": "text",
    ".py": "python",
    ".txt": "text",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".sh": "bash",
}


def site_path(path: str) -> str:
    """Convert a repository path to a site path: docs/data.md to data.md, train.py to code/train.py.md."""
    if path in (START, INDEX, STEP):
        return {START: "index.md", INDEX: "pages.md", STEP: "step.html"}[path]
    if path.startswith("docs/") and not (
        path.startswith(("docs/scripts/", "docs/exercises/")) or (ROOT / path).is_dir()
    ):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    path = path.removeprefix(".")  # MkDocs leaves out .github/
    return f"code/{path}" if path.endswith(".md") else f"code/{path}.md"


def links(text: str, path: str) -> list[str]:
    """List the files and folders that a page links to, as repository paths."""
    found = [posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for _, target in LINK.findall(text)]
    return [target for target in found if (ROOT / target).exists()]


def moved(text: str, path: str) -> str:
    """Convert repository links in a page to site links."""

    def replace(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / target).exists():
            return match[0]
        return match[1] + posixpath.relpath(site_path(target), posixpath.dirname(site_path(path)) or ".")

    # lines of code: #L82 on GitHub, #__codelineno-0-82 on the site
    return re.sub(r"(?<=\.py\.md)#L(?=\d)", "#__codelineno-0-", LINK.sub(replace, text))


def written(path: str) -> str:
    """Write a page, folder or code file as Markdown with repository links."""
    source = ROOT / path
    if source.is_dir():
        names = sorted(entry.name for entry in source.iterdir() if entry.suffix in (".py", ".yaml", ".md", ".json"))
        return "\n".join(
            [f"{UNSEARCHED}# {path}/\n", *(f"- [{name}]({source.name}/{name})" for name in names if name[0] != "_")]
        )
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return BADGE.sub(r"\1", text)
    if source.suffix == ".ipynb":
        return notebook(text)
    fence, about = "`" * 4, ""
    if path in (files := reading_list()):
        number, test = [*files].index(path) + 1, test_of(path)
        link = posixpath.relpath(test, posixpath.dirname(path))
        about = f"File {number} of {len(files)} of the reading list: {files[path]}. Tested by [{test}]({link}).\n\n"
    code = f"{fence}{{.{LANGUAGES[source.suffix]} title='{path}' linenums='1'}}\n{text}\n{fence}\n"
    before = "---\nhide: [toc]\n---\n" if about else UNSEARCHED  # tests contain the same words as the code
    return f"{before}\n# {source.name}\n\n{about}{code}"


def notebook(text: str) -> str:
    """Convert notebook cells and outputs to Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        source = BADGE.sub(r"\1", source)
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            image = data.get("image/png")
            printed = "".join(data["text/plain"]).rstrip()
            parts.append(f"![output](data:image/png;base64,{image})" if image else f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def menu_words(name: str) -> str:
    """Shorten a link text for the menu: "Coming from TRL, EasyR1 or verl" to "Coming from TRL"."""
    words = name.partition(",")[0]
    return words if words.split()[0] in NAMES else words[0].upper() + words[1:]


def test_of(path: str) -> str:
    """Return a code file's test file: tests/losses/test_grpo.py for minivlmrl/losses/grpo.py."""
    file = Path(path)
    return TESTS.get(path, f"tests/{file.parent.name}/test_{file.name}")


def reading_list() -> dict[str, str]:
    """Read the reading list in docs/developer_guide.md: {path: description, such as "image file -> patches"}."""
    text = (ROOT / "docs" / "developer_guide.md").read_text()
    table = re.findall(r"^\| \[[\w/]+\.py\]\(\.\./(\S+)\) \| (.+?) \|", text, re.MULTILINE)
    return dict(table)


def on_config(config):
    """Build the menu."""
    index = (ROOT / INDEX).read_text(encoding="utf-8")
    sections = re.findall(r"^\*\*(.+?)\*\*\n\n((?:[- ] ?.*\n)+)", index, re.MULTILINE)
    config.nav = [{"Home": "index.md"}, {"All pages": "pages.md"}]
    config.nav += [
        {title: [{menu_words(name): site_path(f"docs/{file}")} for name, file in PAGE.findall(text)]}
        for title, text in sections
    ]
    files = {path.removeprefix("minivlmrl/"): site_path(path) for path in reading_list()}
    config.nav += [{"Code": [{name: path} for name, path in files.items()]}]
    return config


def on_pre_build(config):
    """Write docs/step.html, unless the file is newer than minimal.py and the script."""
    page, sources = ROOT / "docs" / "step.html", (ROOT / "minimal.py", ROOT / STEP)
    if not page.exists() or page.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        subprocess.run([sys.executable, "-m", "docs.scripts.step"], cwd=ROOT, check=True)


def on_files(files, config):
    """Add start page, index, notebooks and linked code."""
    for file in [file for file in files if file.src_uri == "README.md" or file.src_uri.endswith(".ipynb")]:
        files.remove(file)
    notebooks = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.ipynb")]
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting, made = [START, INDEX, *notebooks, *pages], set()
    listed = reading_list()
    while waiting:
        path = waiting.pop()
        is_ours = path in (START, INDEX) or path.endswith(".ipynb") or site_path(path).startswith("code/")
        if path not in made and is_ours:
            files.append(File.generated(config, site_path(path), content=moved(written(path), path)))
        if path not in made and (path.endswith(".md") or (ROOT / path).is_dir()):
            waiting += links(written(path), path)
        waiting += [test_of(path)] * (path in listed)
        made.add(path)
    return files


def on_post_build(config):
    """Redirect former addresses."""
    for old, new in MOVED.items():
        file = Path(config.site_dir) / f"{old}.html"
        target = posixpath.relpath(f"{new}.html", posixpath.dirname(old) or ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">moved</a>\n')


def on_page_markdown(markdown, page, config, files):
    """Rewrite links in docs/ pages; generated pages already have site links."""
    if page.file.src_uri in FOUND_FIRST:
        page.meta["search"] = {"boost": 8}
    if page.file.generated_by:
        return markdown
    return moved(markdown, f"docs/{page.file.src_uri}")


def on_page_content(content, page, config, files):
    """Convert formulas from LaTeX to MathML, with thin spaces around "log", and add lines of code to the anchors."""

    def replace(match):
        formula = convert(html.unescape(match[2]).strip(), display="block" if match[1] == "[" else "inline")
        return formula.replace("<mi>log</mi>", '<mo lspace="0.17em" rspace="0.17em">log</mo>')

    page.present_anchor_ids |= {*re.findall(r'id="(__codelineno-0-\d+)"', content)}  # mkdocs overlooks lines of code
    return FORMULA.sub(replace, content)


def on_post_page(output, page, config):
    """Load the `offline` plugin's script from this site instead of another server."""
    local = posixpath.relpath("site/worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", local)
