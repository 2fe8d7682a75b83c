"""Import of a user's functions from a training script, without running the training at its top level.

A *script* is a file whose top level trains, writes or starts something. Its module is lazy: asking it for a name
executes the statements that bind the name and the statements that these need, and nothing else. Every other file is
imported as usual. Within `definitions_only`, modules of the user that such a file imports are handled in the same way.
A run knows its script (`main_script`), and records and worker processes are read with it (`script_of_run`); other files
are recognised as scripts by the calls at their top level. This module uses only the standard library, because worker
processes import it before anything else.
"""

import __future__

import ast
import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import re
import symtable
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from covey.runtime.packages import OWN, is_own

TRAINS = re.compile(
    r"\w*Trainer|Study|launch|sweep|finetune|train|training|main|push_to_hub|save_model|save_pretrained"
    r"|(train|main|launch|finetune)_\w+|\w+_(train|training|main|launch)"
)
"""Names of functions and methods whose call at the top level means that the file trains. No definition needs them."""
RUNS = re.compile(
    TRAINS.pattern + r"|Fire|fit|learn|run|start|go|experiment|system|Popen|check_call|check_output|exec\w*|init"
    r"|(run|start|save|write|upload)\w*|\w+_run|dump|to_(csv|json|parquet|pickle)|makedirs|mkdir|rmtree|unlink|evaluate"
)
"""Names of functions and methods that may write or start something, in addition to `TRAINS`."""
HARMLESS = {"train_test_split"}
CHANGES = {"append", "add", "update", "extend", "insert", "setdefault", "remove", "discard", "pop", "sort", "register"}
"""Methods that fill a container; a function may read the container later."""
SET_UP = {("sys", "path"), ("os", "environ"), ("warnings", "filterwarnings"), ("warnings", "simplefilter")}
"""Settings that imports depend on; statements that change them are executed in a script, too."""

_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_loading = threading.local()


class RunsWhenLoaded(ImportError):
    """A function of a script cannot be imported: it needs a statement that trains, writes or starts something."""


class DefinitionsLoader(importlib.machinery.SourceFileLoader):
    """Loader of a `.py` file, lazily if it is a script; it writes no bytecode.

    Scripts are the run's own script, and any file with calls of the names `runs` at its top level.
    """

    runs = TRAINS

    def exec_module(self, module: ModuleType) -> None:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        flags = _future_flags(tree)
        is_script = str(Path(self.path).resolve()) == getattr(_loading, "script", None)
        if (first := first_run(tree, self.runs)) is None and not is_script:
            with definitions_only():
                exec(compile(source, self.path, "exec", flags, dont_inherit=True), vars(module))
            return
        script = _Script(module, tree, self.path, flags)
        module.__dict__.update(
            __getattr__=script.load,
            __dir__=script.names,
            __all__=script.shared(),
            __doc__=ast.get_docstring(tree),
            covey_script_line=first or 0,
        )


def load_file(name: str, path: Path | str) -> ModuleType:
    """Load the file as a module of this name into `sys.modules`; it is removed again if it raises."""
    loader = DefinitionsLoader(name, str(path))
    loader.runs = RUNS
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None and spec.loader is not None, "a loader is given"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what it defines can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def names_of_functions(module: ModuleType) -> list[str]:
    """Public functions and classes of a module, including those that a script has not executed yet."""
    script = getattr(vars(module).get("__getattr__"), "__self__", None)
    if isinstance(script, _Script):
        return sorted(script.callable)
    return sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


def script_line(module: ModuleType) -> int | None:
    """Line of a script's first statement that runs something, 0 if there is none; None for any other module."""
    return vars(module).get("covey_script_line")


@contextmanager
def definitions_only(named: str = "") -> Iterator[None]:
    """Context in which this thread imports the user's modules by `DefinitionsLoader`, and refuses to make trainers."""
    depth, before = getattr(_loading, "depth", 0), getattr(_loading, "named", "")
    _loading.depth, _loading.named = depth + 1, named
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        _loading.depth, _loading.named = depth, before


@contextmanager
def script_of_run(path: str | None) -> Iterator[None]:
    """Context in which this thread loads functions of a run with this `main_script`; None: it is not known."""
    before: str | None = getattr(_loading, "script", None)
    _loading.script = path
    try:
        yield
    finally:
        _loading.script = before


def main_script() -> str | None:
    """The user's file that this process runs as `__main__`; None for a command, a notebook or a library's program."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    of_covey = any(path.is_relative_to(Path(__file__).resolve().parents[2] / name) for name in OWN)
    return None if of_covey or str(path).startswith(_LIBRARIES) else str(path)


def refuse_while_loading(what: str) -> None:
    """Raise `RunsWhenLoaded` if a file is being imported for its functions; `what` names what would be run again."""
    if getattr(_loading, "depth", 0):
        raise RunsWhenLoaded(f"{what} while the file was imported for its functions. {ADVICE}")


ADVICE = (
    "Move what is needed into a file of its own, or put what runs under `if __name__ == '__main__':`, so that it can be"
    " imported without training."
)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the user's modules (not those of libraries) for `DefinitionsLoader`, only within `definitions_only`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not getattr(_loading, "depth", 0) or is_own(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader or spec.origin is None:
            return None
        if str(Path(spec.origin).resolve()).startswith(_LIBRARIES):
            return None
        spec.loader = DefinitionsLoader(fullname, spec.origin)
        if fullname == _loading.named:
            spec.loader.runs = RUNS
        return spec


_FINDER = _Finder()


class _Script:
    """Statements of a script, executed when a name is asked for."""

    def __init__(self, module: ModuleType, tree: ast.Module, path: str, flags: int):
        self.space, self.path, self.flags = vars(module), path, flags
        self.functions = _functions(tree)
        self.callable = [
            name
            for one in tree.body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not (name := one.name).startswith("_")
        ]
        nodes = [node for node in tree.body if not _is_main_guard(node)]
        imports = {alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in _aliases(node)}
        self.left = [_Statement(node, imports, self.functions) for node in nodes]

    def names(self) -> list[str]:
        return sorted({name for statement in self.left for name in statement.binds} | self.space.keys())

    def shared(self) -> list[str]:
        """Names that `from script import *` imports: public ones, bound by statements that run nothing."""
        quiet = [one for one in self.left if _first_call(one.node, RUNS, self.functions) is None]
        return sorted({name for one in quiet for name in one.binds if not name.startswith("_")})

    def load(self, name: str) -> Any:
        """Module `__getattr__`: execute what the name needs, in the order of the file."""
        if name.startswith("__"):
            raise AttributeError(name)
        needed = self._needed(name)
        for statement in needed:
            if (line := _first_call(statement.node, TRAINS, self.functions)) is not None:
                raise RunsWhenLoaded(f"{name!r} needs what line {line} of {self.path} runs. {ADVICE}")
        before, self.left = self.left, [statement for statement in self.left if statement not in needed]
        try:
            with definitions_only():
                for statement in needed:
                    tree = ast.Module([statement.node], [])
                    exec(compile(tree, self.path, "exec", self.flags, dont_inherit=True), self.space)
        except BaseException:
            self.left = before
            raise
        if name not in self.space:
            raise AttributeError(f"{self.path} has no {name!r} at its top level")
        return self.space[name]

    def _needed(self, name: str) -> list["_Statement"]:
        """Statements for a name, not executed yet: those that bind what is read, and those that complete it."""
        bound = {each for statement in self.left for each in statement.binds} | self.space.keys()
        stars = any(statement.is_star for statement in self.left)
        if name not in bound and not stars:
            return []
        wanted, found = {name}, set[_Statement]()
        while True:
            unknown = wanted - bound - set(dir(builtins))
            new = {
                statement
                for statement in set(self.left) - found
                if statement.binds & wanted
                or statement.changes & wanted
                or statement.is_set_up
                or (statement.is_star and unknown)
            }
            if not new:
                return [statement for statement in self.left if statement in found]
            found |= new
            wanted |= {each for statement in new for each in statement.reads}


class _Statement:
    """A statement at the top level, and the names that it binds, reads, and changes without binding them."""

    def __init__(self, node: ast.stmt, imports: set[str], functions: dict[str, ast.AST]):
        self.node = node
        table = symtable.symtable(ast.unparse(node), "statement", "exec")
        symbols = table.get_symbols()
        self.binds = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported() or one.is_namespace()}
        self.reads = {one.get_name() for one in symbols if one.is_referenced()} | {*_globals(table)}
        executed = [*_executed(node)]
        harmless = _first_call(node, RUNS, functions) is None
        changed = {name for one in executed for name in _changed(one, imports)} - self.binds
        self.changes = changed if harmless else set[str]()
        self.is_star = isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
        self.is_set_up = harmless and any(map(_is_set_up, executed))


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """Names of the module that functions and classes within a statement use."""
    for inner in table.get_children():
        yield from (one.get_name() for one in inner.get_symbols() if one.is_global())
        yield from _globals(inner)


def first_run(tree: ast.Module, names: "re.Pattern[str]" = RUNS) -> int | None:
    """Line of the first statement at the top level that calls one of these names."""
    functions = _functions(tree)
    lines = (_first_call(node, names, functions) for node in tree.body if not _is_main_guard(node))
    return next((line for line in lines if line is not None), None)


def _first_call(node: ast.AST, names: "re.Pattern[str]", functions: dict[str, ast.AST]) -> int | None:
    for one in _executed(node):
        if isinstance(one, ast.Call) and _runs(one, names, functions, frozenset()):
            return one.lineno
    return None


def _runs(call: ast.Call, names: "re.Pattern[str]", functions: dict[str, ast.AST], seen: frozenset[str]) -> bool:
    """True if a call has one of the names, or calls a function of the file whose body does."""
    path = _path(call.func)
    if not path or path[-1] in HARMLESS or path[:2] in SET_UP:
        return False
    name = path[-1]
    if names.fullmatch(name):
        return True
    if len(path) > 1 or name not in functions or name in seen:
        return False
    calls = (one for one in ast.walk(functions[name]) if isinstance(one, ast.Call))
    return any(_runs(one, TRAINS, functions, seen | {name}) for one in calls)


def _functions(tree: ast.Module) -> dict[str, ast.AST]:
    return {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The node and the nodes below it that are executed with it, without bodies of functions."""
    yield node
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and name == "body":
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from _executed(one)


def _aliases(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.asname or alias.name.partition(".")[0] for alias in node.names]


def _changed(node: ast.AST, imports: set[str]) -> Iterable[str]:
    """Names of objects that are assigned to in part, or filled by a method; modules are not filled."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
        owner: ast.expr = node
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        return [owner.id] if isinstance(owner, ast.Name) else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        path = _path(node.value.func)
        return path[:1] if len(path) > 1 and path[-1] in CHANGES and path[0] not in imports else []
    return []


def _is_set_up(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _path(node.value.func)[:2] in SET_UP
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(_path(one.value if isinstance(one, ast.Subscript) else one)[:2] in SET_UP for one in targets)


@functools.singledispatch
def _path(node: Any) -> tuple[str, ...]:
    """Names in `a.b.c`; the first is "" if the expression does not begin with a name."""
    return ("",)


@_path.register
def _(node: ast.Name) -> tuple[str, ...]:
    return (node.id,)


@_path.register
def _(node: ast.Attribute) -> tuple[str, ...]:
    return (*_path(node.value), node.attr)


def _is_main_guard(node: ast.stmt) -> bool:
    test = node.test if isinstance(node, ast.If) and not node.orelse else None
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    sides = [*ast.walk(test)]
    return any(isinstance(one, ast.Name) and one.id == "__name__" for one in sides) and any(
        isinstance(one, ast.Constant) and one.value == "__main__" for one in sides
    )


def _future_flags(tree: ast.Module) -> int:
    found = (one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__")
    return sum(getattr(__future__, alias.name).compiler_flag for one in found for alias in one.names)
