"""Fields of the configs as their source declares them: names, types, defaults and help without importing torch.

The command line checks names and prints help with them at once, while `transformers.TrainingArguments` takes seconds
to import.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path

FOREIGN = {"transformers": "transformers.training_args"}
"""Modules of other packages, and the module in which their base classes are defined."""

METHODS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig"}


@dataclass(frozen=True)
class DeclaredField:
    name: str
    type: str  # as a user would write it, without None: `list` for `list[str] | None`
    default: str  # as source; "unset" for None, and where there is none
    help: str


@dataclass(frozen=True)
class FieldGroup:
    """A class with fields."""

    name: str
    title: str  # first line of its docstring
    fields: tuple[DeclaredField, ...]


@functools.cache
def field_groups(method: str) -> tuple[FieldGroup, ...]:
    """Classes of a method's config, in the order in which Python looks up their attributes.

    Raises:
        OSError: the source is not there, as in programs that some packagers make.
    """
    groups = tuple(_groups(f"covey.config.{method}", METHODS[method]))
    described = {field.name: field.help for group in reversed(groups) for field in group.fields if field.help}
    return tuple(
        replace(group, fields=tuple(replace(one, help=described.get(one.name, "")) for one in group.fields))
        for group in groups
    )


def field_names(method: str) -> list[str]:
    """Names of all fields of a method's config. Raises OSError as `field_groups`."""
    return list(dict.fromkeys(field.name for group in field_groups(method) for field in group.fields))


def _groups(module: str, name: str) -> Iterator[FieldGroup]:
    tree = _parsed(FOREIGN.get(module, module))
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if node is None:
        return
    title = (ast.get_docstring(node) or name).strip().split("\n")[0]
    yield FieldGroup(name, title, tuple(_fields(node)))
    imported = {
        alias.asname or alias.name: (found.module, alias.name)
        for found in tree.body
        if isinstance(found, ast.ImportFrom) and found.module
        for alias in found.names
    }
    for base in node.bases:
        match base:
            case ast.Attribute(value=ast.Name(id=theme), attr=attribute) if theme in imported:
                yield from _groups(".".join(imported[theme]), attribute)
            case ast.Name(id=own):
                yield from _groups(*imported.get(own, (module, own)))


@functools.cache
def _parsed(module: str) -> ast.Module:
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)  # of the package alone: with its module, the package would be imported
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"there is no source of {module}")
    path = Path(spec.submodule_search_locations[0], *rest.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _fields(node: ast.ClassDef) -> Iterator[DeclaredField]:
    named: dict[str, str] = {}  # values that defaults name
    for statement, following in pairwise([*node.body, ast.Pass()]):
        if not isinstance(statement, ast.FunctionDef):
            for inner in ast.walk(statement):
                match inner:
                    case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=constant)):
                        named[name] = repr(constant)
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                types = dict.fromkeys(_types(annotation))
                if "ClassVar" in types:
                    continue
                text = ""
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    text = str(following.value.value)
                default, described = _default(value)
                help = " ".join((text or described).split())
                yield DeclaredField(name, " | ".join(types), named.get(default, default), help)


def _types(annotation: ast.expr) -> Iterator[str]:
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from [*_types(left), *_types(right)]
        case ast.Subscript(value=ast.Name(id="Optional" | "Union"), slice=inner):
            for part in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                yield from _types(part)
        case ast.Subscript(value=value):
            yield from _types(value)
        case ast.Constant(value=None):
            return
        case _:
            yield ast.unparse(annotation).rpartition(".")[2]


def _default(value: ast.expr | None) -> tuple[str, str]:
    """The default as source, and the help in the metadata, of `5`, `limited(5, ...)` or `field(default=5, ...)`."""
    described = ""
    if isinstance(value, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        metadata = keywords.get("metadata")
        if isinstance(metadata, ast.Dict):
            pairs = zip_longest(metadata.keys, metadata.values)
            texts = [text for key, text in pairs if isinstance(key, ast.Constant) and key.value == "help"]
            described = next((str(text.value) for text in texts if isinstance(text, ast.Constant)), "")
        value = value.args[0] if value.args else keywords.get("default")
    unset = value is None or (isinstance(value, ast.Constant) and value.value is None)
    return "unset" if unset or value is None else ast.unparse(value), described
