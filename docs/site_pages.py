"""Site pages: makes the pages of the site that nobody writes by hand, and checks the site that was
built (mkdocs calls it).

    README.md                  -> index.md
    examples/*.py              -> examples/*.md, the docstring as text and the program below it
    tests/public_names.txt     -> api.md and api/*.md, a page for each package; mkdocstrings fills in the docstrings

`check` runs when the pages are written: nothing on a page may be loaded from elsewhere, and every
public name must be there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "public_names.txt"
WIDE = "---\nhide: [navigation]\n---\n\n"
"""The head of a page without a menu beside it."""
INTEGRATIONS = (
    "tiermem.integrations.huggingface.TiermemTrainer",
    "tiermem.integrations.huggingface.TiermemMixin",
    "tiermem.integrations.accelerate.prepare",
    "tiermem.integrations.peft.merge_and_unload",
    "tiermem.integrations.lightning.TiermemStrategy",
)
"""Names that users import from modules of their own, beside those of the record."""

# ---- what mkdocs calls ---------------------------------------------------------------------------


def on_config(config: Any) -> None:
    """Puts the made pages into the menu, below the pages that lead to them."""
    below: dict[str, Any] = {
        "api.md": [f"api/{package}.md" for package in (*packages(), "tiermem.integrations")]
    }
    below["examples.md"] = sorted(each for each in made_pages() if each.startswith("examples/"))
    config["nav"] = _with_pages(config["nav"], below)


def _with_pages(entries: Any, below: Mapping[str, list[str]]) -> Any:
    if isinstance(entries, dict):
        return {title: _with_pages(inside, below) for title, inside in entries.items()}
    if isinstance(entries, list):
        return [_with_pages(each, below) for each in entries]
    titles = {"api.md": "Packages", "examples.md": "Examples"}
    return {titles[entries]: [entries, *below[entries]]} if entries in below else entries


def on_files(files: Any, config: Any) -> Any:
    """Adds the made pages."""
    from mkdocs.structure.files import File

    for name, text in made_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lets links to programs and to the README, which a repository shows, lead to their pages."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\]\((examples/\w+)\.py\)", r"](\1.md)", markdown)


def on_post_build(config: Any) -> None:
    """Raises PluginError for a page that loads something from elsewhere, and for a public name that
    has no place."""
    from mkdocs.exceptions import PluginError

    problems = check(Path(config["site_dir"]))
    if problems:
        raise PluginError("\n".join(problems))


# ---- pages ---------------------------------------------------------------------------------------


def made_pages() -> dict[str, str]:
    """Every page that is made, by its path in docs/."""
    first = WIDE + (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    pages = {"index.md": first, "api.md": index_of_names()}
    for package in packages():
        pages[f"api/{package}.md"] = "\n".join(page_of_package(package))
    pages["api/tiermem.integrations.md"] = "# tiermem.integrations\n\n" + "\n".join(
        map(asked, INTEGRATIONS)
    )
    for file in sorted((ROOT / "docs" / "examples").glob("*.py")):
        pages[f"examples/{file.stem}.md"] = page_of_example(file)
    return pages


def page_of_example(file: Path) -> str:
    """The docstring of a program, then the program without it."""
    source = file.read_text("utf-8")
    [said, *_] = ast.parse(source).body
    text = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = text.partition("\n")
    code = "\n".join(source.splitlines()[said.end_lineno :]).strip()
    return (
        f"# {title.rstrip('.')}\n\n{rest.strip()}\n\n```python "
        f'title="docs/examples/{file.name}"\n{code}\n```\n'
    )


# ---- names ---------------------------------------------------------------------------------------


class Name(NamedTuple):
    """A public name: how users write it, where its docstring is, and, of a second name, the
    first."""

    written: str
    home: str
    same_as: str = ""


@functools.cache
def recorded() -> tuple[str, ...]:
    """The lines of tests/public_names.txt about Python."""
    return tuple(
        RECORD.read_text("utf-8").partition("[python]\n")[2].partition("\n[")[0].split("\n")
    )


@functools.cache
def packages() -> tuple[str, ...]:
    """The packages that have public names, the shortest name first."""
    found = {line for line in recorded() if re.fullmatch(r"tiermem[\w.]*", line)}
    modules = sorted(name for name in found if inspect.ismodule(resolve(name)))
    return tuple(
        name
        for name in modules
        if any(written.startswith(f"{name}.") for written in written_names())
    )


@functools.cache
def written_names() -> tuple[str, ...]:
    """Every name of a function, class, member or value, without its parameters."""
    names = (re.match(r"[\w.]*", line) for line in recorded())
    found = dict.fromkeys(name[0] for name in names if name and name[0])
    return tuple(name for name in found if not inspect.ismodule(resolve(name)))


def resolve(name: str) -> Any:
    """The object that a dotted name stands for; a member without a value of its own is its class's
    field: None."""
    parts = name.split(".")
    place: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            place = (
                inspect.getattr_static(place, part)
                if inspect.isclass(place)
                else getattr(place, part)
            )
        except AttributeError:
            try:
                place = importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return None
    return place


def names_of(package: str) -> Iterator[Name]:
    """The functions, classes and values of a package, in order."""
    heads = {
        name.removeprefix(f"{package}.").partition(".")[0]
        for name in written_names()
        if is_in(name, package)
    }
    others = {
        line.partition(" is ")[0]: line.partition(" is ")[2]
        for line in recorded()
        if re.match(r"[\w.]+ is ", line)
    }
    for head in sorted(heads):
        written = f"{package}.{head}"
        found = resolve(written)
        yield Name(written, home_of(found, written), others.get(written, ""))


def is_in(name: str, package: str) -> bool:
    """Whether a name belongs to a package and to none inside it."""
    inside = [each for each in packages() if name.startswith(f"{each}.")]
    return bool(inside) and max(inside, key=len) == package


def home_of(found: Any, written: str) -> str:
    """Where a function or class is defined; other values have the name that is written."""
    module = getattr(found, "__module__", "")
    return (
        f"{module}.{found.__qualname__}"
        if module.startswith("tiermem") and hasattr(found, "__qualname__")
        else written
    )


def first_sentences(package: str) -> str:
    """The first paragraph of a package's docstring, on one line."""
    return " ".join((inspect.getdoc(resolve(package)) or "").partition("\n\n")[0].split())


def index_of_names() -> str:
    """The page that lists the packages."""
    lines = [
        "# Names\n",
        "Every public name and its docstring. A name that is not here may change at any time.\n",
    ]
    for package in packages():
        said = first_sentences(package)
        lines.append(f"- [{package}](api/{package}.md): {said.partition(': ')[2] or said}")
    lines.append(
        "- [tiermem.integrations](api/tiermem.integrations.md): other libraries' training loops "
        "over sharded models"
    )
    return "\n".join([*lines, ""])


def page_of_package(package: str) -> Iterator[str]:
    """A package: what it is, then its names. mkdocstrings replaces the lines that begin with
    `:::`."""
    said = first_sentences(package)
    said = said.partition(": ")[2] or said
    yield f"# {package}\n\n{said[:1].upper()}{said[1:]}\n"
    for name in names_of(package):
        if name.same_as:
            yield (
                f"## {name.written} {{ #{name.written} }}\n\nThe same as "
                f"[{name.same_as}][{name.home}].\n"
            )
            continue
        found = resolve(name.written)
        has_members = inspect.isclass(found) and not issubclass(found, BaseException)
        if name.home != name.written:
            yield f"[](){{ #{name.written} }}\n"
        yield asked(name.home, name.written, has_members)


def asked(home: str, heading: str | None = None, has_members: bool = True) -> str:
    """The lines that mkdocstrings replaces by a docstring."""
    without = "" if has_members else "      members: false\n"
    return f"::: {home}\n    options:\n      heading: {heading or home}\n{without}"


# ---- checks of the built site --------------------------------------------------------------------


def check(site: Path) -> list[str]:
    """What is wrong with a built site, a sentence each."""
    pages = {file: file.read_text("utf-8") for file in site.rglob("*.html")}
    problems = [
        f"{file.relative_to(site)}: loads {address}"
        for file, text in pages.items()
        for address in loaded_from_elsewhere(text)
    ]
    anchors = {each for text in pages.values() for each in re.findall(r'\bid="([^"]+)"', text)}
    return problems + [
        f"{name}: a public name without a place in the site" for name in missing_names(anchors)
    ]


def loaded_from_elsewhere(page: str) -> list[str]:
    """Addresses of other hosts that a browser would load by itself: scripts, styles, pictures,
    frames. Links are none."""
    tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", page)
    found = [re.search(r'\b(?:src|href)="((?:https?:)?//[^"]+)"', tag) for tag in tags]
    return [
        each[1]
        for each, tag in zip(found, tags, strict=True)
        if each and 'rel="canonical"' not in tag
    ]


def missing_names(anchors: set[str]) -> list[str]:
    """The public names that no anchor stands for, without functions that other packages add to a
    class."""
    own = [
        name
        for name in written_names()
        if not anchors & set(places_of(name)) and is_our_own(resolve(name))
    ]
    # their packages may not be installed
    return own + [name for name in INTEGRATIONS if name not in anchors]


def is_our_own(found: Any) -> bool:
    return not inspect.isfunction(found) or found.__module__.startswith("tiermem")


def places_of(name: str) -> Sequence[str]:
    """The anchors that a name may have: as it is written, and below the home of what it belongs
    to."""
    owner, _, member = name.rpartition(".")
    holder = resolve(owner)
    if inspect.isclass(holder):
        return (name, *(f"{home_of(cls, owner)}.{member}" for cls in holder.__mro__))
    return name, home_of(resolve(name), name)


def without_docstring() -> list[str]:
    """The public names that nothing describes: functions and classes without a docstring, and
    fields and members without one of their own whose class does not name them."""
    found = []
    for name in written_names():
        owner, value = resolve(name.rpartition(".")[0]), resolve(name)
        if not is_our_own(value) or name.endswith(".model_config"):  # pydantic's
            continue
        if is_described_by_itself(value):
            is_described = bool(inspect.getdoc(value))
        else:
            is_described = inspect.isclass(owner) and name.rpartition(".")[2] in words_of(owner)
        found += [] if is_described else [name]
    return found


def is_described_by_itself(value: Any) -> bool:
    kinds = (property, classmethod, staticmethod)
    return inspect.isclass(value) or inspect.isfunction(value) or isinstance(value, kinds)


@functools.cache
def words_of(cls: type) -> frozenset[str]:
    """The words of a class's docstring, and the fields that have a docstring of their own."""
    words = set(re.findall(r"\w+", inspect.getdoc(cls) or ""))
    described = getattr(cls, "model_fields", {})  # of a class that is made, not written
    words |= {name for name, field in described.items() if field.description}
    for each in (base for base in cls.__mro__ if base.__module__.startswith("tiermem")):
        try:
            source = textwrap.dedent(inspect.getsource(each))
        except OSError:  # made, not written: it has the fields' descriptions alone
            continue
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
        for statement, after in itertools.pairwise(body):
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                words |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(words)
