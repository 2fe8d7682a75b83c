"""Recognition, by their source, of overridden methods that do not change behaviour."""

import ast
import inspect
import textwrap
from typing import Any

READS = frozenset(["print", "len", "type", "isinstance", "repr", "str", "min", "max", "sum", "range", "time"])
NOTES = frozenset(["debug", "info", "warning", "error", "log", "append", "write", "time", "perf_counter", "monotonic"])
"""Names of functions and methods that an override may call next to `super()` without changing behaviour."""


def passes_through(function: Any, name: str) -> bool:
    """True for a method that returns what `super().name(...)` returns for its own arguments, and changes neither.

    Such an override times, logs or adapts a signature. In doubt False.
    """
    function = getattr(function, "__func__", function)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef):
        return False
    nodes = list(ast.walk(definition))

    def is_super(node: ast.AST | None) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=called)):
                return called == name
        return False

    results = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and is_super(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    given = {one.arg for one in ast.walk(definition.args) if isinstance(one, ast.arg)}
    kept = (results | given) - {"self"}
    returns = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not returns or not all(is_super(one) or (isinstance(one, ast.Name) and one.id in results) for one in returns):
        return False
    for node in nodes:
        match node:
            case ast.Call() if is_super(node):
                passed = [*node.args, *(one.value for one in node.keywords)]
                plain = (one.value if isinstance(one, ast.Starred) else one for one in passed)
                if not all(isinstance(one, ast.Name) and one.id in given for one in plain):
                    return False
            case ast.Call(func=ast.Name(id=called)):
                if called not in READS | {"super"}:
                    return False
            case ast.Call(func=ast.Attribute(attr=called)):
                if called not in NOTES:
                    return False
            case ast.Assign(targets=targets) if not is_super(node.value):
                if any(isinstance(one, ast.Name) and one.id in kept for one in targets):
                    return False
            case ast.Delete() | ast.FunctionDef() | ast.Lambda() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                if node is not definition:
                    return False
            case (
                ast.Subscript(value=ast.Name(id=changed), ctx=ast.Store())
                | ast.Attribute(value=ast.Name(id=changed), ctx=ast.Store())
            ):
                if changed in kept:
                    return False
            case ast.AugAssign(target=ast.Name(id=changed)) if changed in kept:
                return False
    return True
