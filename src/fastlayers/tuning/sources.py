"""The code that a backend's times depend on, found by following names through every form of import.

Of this library that is what runs on the device: jitted functions with all that they refer to. What runs on the host
between them may be rewritten without making a measured time untrue; of the rule that chooses a kernel's parameters its
results count, see :mod:`fastlayers.tuning.staleness`. Of other distributions' backends it is everything that the target
reaches.

A definition is hashed as text without comments, docstrings and white space, each name of another definition replaced by
that one's hash: moving and renaming change nothing, nor does the order of a jitted function's parameters. Text, not a
syntax tree: each version of Python writes trees in its own way, and tables travel between versions. Nothing is
imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

LIBRARY = "fastlayers"
# Last words of the decorators of functions that are compiled for a device.
JITTED = ("jit", "kernel", "constexpr_function")
Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class Definition:
    """What one name of a module is bound to: the statements that bind it."""

    module: Module
    name: str
    nodes: tuple[ast.stmt, ...] = field(repr=False)

    @property
    def jitted(self) -> bool:
        """Whether a decorator compiles it for a device."""
        return any(_is_jitted(node) for node in self.nodes)

    @property
    def key(self) -> tuple[str, str]:
        """Module and name."""
        return self.module.name, self.name


@dataclass(eq=False)
class Module:
    """A module's source: what its names are bound to."""

    name: str
    source: str = field(repr=False)
    is_package: bool = False
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict, repr=False)
    # Local name -> module and the attribute of it; without an attribute the module itself.
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        tree = ast.parse(self.source)
        self._bind(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom):
            where = self.origin(node)
            self.imports |= {each.asname or each.name: (where, each.name) for each in node.names}
            return
        for each in node.names:
            name = each.name if each.asname else each.name.partition(".")[0]
            self.imports[each.asname or name] = (name, None)

    def origin(self, node: ast.ImportFrom) -> str:
        """Return the whole name of the module that a statement of this one imports from."""
        parent = self._parent(node.level) if node.level else ""
        return ".".join(filter(None, (parent, node.module)))

    def _parent(self, level: int) -> str:
        pieces = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        return ".".join(pieces[: len(pieces) - level + 1])

    def _bind(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for each in ast.walk(target):
                        if isinstance(each, ast.Name):
                            self.definitions.setdefault(each.id, []).append(node)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for part in ("body", "orelse", "finalbody"):
                    self._bind(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    self._bind(handler.body)

    @cached_property
    def comments(self) -> list[Span]:
        """Where comments are."""
        found = []
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                first = len(token.line[:column].encode())
                found.append((row, first, row, first + len(token.string.encode())))
        return found

    @cached_property
    def lines(self) -> list[bytes]:
        """The source, as the positions of syntax trees count it."""
        return self.source.encode().split(b"\n")


def dotted_path(node: ast.AST) -> tuple[str, ...]:
    """Return the names of ``a.b.c``; empty if the expression is something else."""
    if isinstance(node, ast.Attribute):
        before = dotted_path(node.value)
        return (*before, node.attr) if before else ()
    return (node.id,) if isinstance(node, ast.Name) else ()


def _is_jitted(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(dotted_path(d.func if isinstance(d, ast.Call) else d)[-1:] in [(j,) for j in JITTED] for d in decorators)


def _uses(
    node: ast.AST, formatted: bool = True, local: frozenset[str] = frozenset()
) -> Iterator[ast.Name | ast.Attribute]:
    """Yield every name and dotted name in an expression or statement that is not ``local`` to a function.

    Annotations say nothing about what runs; where names in ``formatted`` strings are depends on Python's version.
    """
    if isinstance(node, ast.JoinedStr) and not formatted:
        return
    if isinstance(node, ast.Name | ast.Attribute) and (path := dotted_path(node)):
        if path[0] not in local:
            yield node
        return
    if isinstance(node, ast.FunctionDef):
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        stored = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        local = local | {each.arg for each in arguments} | set(stored)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _uses(child, formatted, local)


def _installed(name: str) -> tuple[str, bool] | None:
    """Return the source of an installed module and whether it is a package; ``None`` if it has none in Python."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    return Path(found.origin).read_text(encoding="utf-8"), found.submodule_search_locations is not None


class Sources:
    """Modules as they are read, and the hashes of what they define.

    Parameters
    ----------
    read : callable, optional
        ``read(module)`` returns its source and whether it is a package, or ``None``; default: what is installed.
    """

    def __init__(self, read: Callable[[str], tuple[str, bool] | None] = _installed) -> None:
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._digests: dict[tuple[str, str], str] = {}
        self._used: dict[tuple[str, str], list[Definition]] = {}

    def module(self, name: str, beside: str = LIBRARY) -> Module | None:
        """Return a module of this library or of the distribution of ``beside``, parsed once; no other is looked at."""
        if name.partition(".")[0] not in (LIBRARY, beside.partition(".")[0]):
            return None
        if name not in self._modules:
            found = self._read(name)
            self._modules[name] = Module(name, *found) if found is not None else None
        return self._modules[name]

    def kernel_hash(self, target: str) -> str:
        """Return the hash of the code behind ``"package.module:Class"``."""
        where, _, name = target.partition(":")
        module = self.module(where, where)
        if module is None:
            return hashlib.sha256().hexdigest()[:12]
        distribution = where.partition(".")[0]
        self._digests = {}  # anew for each target: in a circle of definitions a hash depends on where it was entered
        roots = [found] if (found := self._named(module, name)) is not None else _all(module)
        parts = {self._digest(each) for each in self._counting(roots, distribution)}
        return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]

    def _counting(self, roots: list[Definition], distribution: str) -> Iterator[Definition]:
        """Yield what is hashed of what ``roots`` reach."""
        seen: set[tuple[str, str]] = set()
        waiting = list(roots)
        while waiting:
            each = waiting.pop()
            if each.key in seen:
                continue
            seen.add(each.key)
            root = each.module.name.partition(".")[0]
            if each.jitted or (distribution != LIBRARY and root == distribution):
                yield each
            waiting += self._used_by(each)

    def _used_by(self, definition: Definition) -> list[Definition]:
        """Return what a definition refers to."""
        if definition.key not in self._used:
            paths = dict.fromkeys(dotted_path(use) for node in definition.nodes for use in _uses(node))
            found = {each.key: each for path in paths if (each := self._resolve(definition.module, path)) is not None}
            self._used[definition.key] = list(found.values())
        return self._used[definition.key]

    def _named(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        """Return what a name of a module is bound to, through imports."""
        if name in module.definitions:
            return Definition(module, name, tuple(module.definitions[name]))
        if name in module.imports and (module.name, name) not in seen:
            where, attribute = module.imports[name]
            other = self.module(where, module.name) if attribute is not None else None
            if other is not None and attribute is not None:
                return self._named(other, attribute, seen | {(module.name, name)})
        return None

    def _resolve(self, module: Module, path: tuple[str, ...]) -> Definition | None:
        """Return the definition that a dotted name in ``module`` begins with, through modules on the way."""
        if not path:
            return None
        if (found := self._named(module, path[0])) is not None:
            return found
        if path[0] not in module.imports:
            return None
        where, attribute = module.imports[path[0]]
        name = f"{where}.{attribute}" if attribute is not None else where
        for piece in path[1:]:
            inside = self.module(name, module.name)
            if inside is None:
                return None
            if (found := self._named(inside, piece)) is not None:
                return found
            name = f"{name}.{piece}"
        return None

    def _digest(self, definition: Definition) -> str:
        if definition.key not in self._digests:
            self._digests[definition.key] = "recursive"  # what a definition that reaches itself finds
            # The name that is assigned to is no part of what is assigned.
            values = [
                node.value if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None else node
                for node in definition.nodes
            ]
            pieces = [self._text(definition.module, value) for value in values]
            self._digests[definition.key] = hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:16]
        return self._digests[definition.key]

    def _text(self, module: Module, node: ast.stmt | ast.expr, local: frozenset[str] = frozenset()) -> str:
        """Return a statement's text as it is hashed."""
        if isinstance(node, ast.FunctionDef) and _is_jitted(node):
            return self._kernel_text(module, node)
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda each: each.lineno).lineno
        end, end_column = node.end_lineno or first, node.end_col_offset or 0
        cuts: list[tuple[Span, bytes]] = [(span, b"") for span in module.comments if first <= span[0] <= end]
        if node.lineno == first:
            cuts.append(((first, 0, first, node.col_offset), b""))
        for each in ast.walk(node):
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(each) is not None:
                cuts.append((_span(each.body[0]), b""))
        for use in _uses(node, False, local):
            found = self._resolve(module, dotted_path(use))
            if found is not None and found.nodes != (node,):
                cuts.append((_span(use), self._digest(found).encode()))
        lines = module.lines[first - 1 : end]
        if not any(span[0] == end and span[1] >= end_column for span, _ in cuts):
            lines[-1] = lines[-1][:end_column]
        for (row, column, last, stop), new in sorted(set(cuts), reverse=True):
            kept = lines[row - first][:column] + new + lines[last - first][stop:]
            lines[row - first : last - first + 1] = [kept, *[b""] * (last - row)]
        text = "".join(b"\n".join(lines).decode().split())
        name = getattr(node, "name", None)  # its own name is no part of what it does
        return text.replace(f"def{name}(", "def(", 1).replace(f"class{name}", "class", 1) if name else text

    def _kernel_text(self, module: Module, node: ast.FunctionDef) -> str:
        """Return a jitted function's text: options, parameters in any order, body; who launches it fixes the order."""
        options = [each.value for d in node.decorator_list for each in ast.walk(d) if isinstance(each, ast.Constant)]
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        stored = (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        local = frozenset({each.arg for each in arguments} | set(stored))
        parameters = [f"{a.arg}:{ast.unparse(a.annotation) if a.annotation else ''}" for a in arguments]
        values: list[ast.expr] = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        parts = [*sorted(map(str, options)), *sorted(parameters)]
        texts = [self._text(module, value) for value in values] + [self._text(module, each, local) for each in body]
        return "\n".join(parts + texts)


def _span(node: ast.AST) -> Span:
    span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
    return span


def _all(module: Module) -> list[Definition]:
    return [Definition(module, name, tuple(nodes)) for name, nodes in module.definitions.items()]


@lru_cache(maxsize=1)
def installed() -> Sources:
    """Return the sources of what is installed, read once a process."""
    return Sources()
