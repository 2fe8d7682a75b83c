"""Hooks of mkdocs that make the site self-contained.

Pages link to files of the repository as one reads them there (`../examples/lora.py`). On the site every such file is a
page of its own: Markdown as it is, anything else as a block of code; images are copied. Formulas become MathML, which
browsers draw without a script.
"""

import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$", re.DOTALL)
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]*")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}
IMAGES = (".png", ".svg")


def place(path):
    """The page, below `docs_dir`, of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith((".md", *IMAGES)) else f"repository/{path}.md"


def linked(path):
    """(link, file of the repository) of the links in a page that lead to files."""
    text = CODE.sub("", (ROOT / path).read_text())
    for link in LINK.findall(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if "://" not in link and (ROOT / target).is_file():
            yield link, target


def on_files(files, config):
    """Add a page for every file outside of docs/ that pages lead to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        for _, target in linked(waiting.pop()):
            if target in known or target.startswith("docs/"):
                continue
            known.add(target)
            source = ROOT / target
            if source.suffix in IMAGES:
                files.append(File.generated(config, place(target), abs_src_path=str(source)))
                continue
            content = source.read_text()
            if source.suffix == ".md":
                waiting.append(target)
            else:
                fence = f"````{LANGUAGES.get(source.suffix, 'text')}\n{content}\n````"
                content = f"---\nsearch:\n  exclude: true\n---\n# {source.name}\n\n`{target}`\n\n{fence}\n"
            file = File.generated(config, place(target), content=content)
            file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links to the pages of the files, and draw formulas."""
    uri = page.file.src_uri
    path = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
    if not path.endswith(".md") or not (ROOT / path).is_file():
        return markdown

    def moved(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if "://" in match[1] or not (ROOT / target).is_file():
            return match[0]
        return posixpath.relpath(place(target), posixpath.dirname(uri) or ".")

    parts = CODE.split(markdown)
    parts[::2] = [FORMULA.sub(drawn, LINK.sub(moved, part)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html, page, config, files):
    """Let names of metrics and settings in tables break after _ and / instead of anywhere."""
    return CELL.sub(lambda cell: NAME.sub(lambda name: re.sub(r"([_/])(?=\w)", r"\1<wbr>", name[0]), cell[0]), html)


def drawn(match):
    """A formula as MathML."""
    latex = (match[1] or match[2]).strip()
    latex = re.sub(r"\\text\{([^{}]*)\}", lambda found: rf"\mathrm{{{found[1].replace(' ', '~')}}}", latex)
    if match[1]:
        return f'<div style="overflow-x: auto">{convert(latex, display="block")}</div>'
    return convert(latex)
