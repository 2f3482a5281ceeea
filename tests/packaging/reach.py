"""What of a source tree runs from its roots: definitions that others read, beginning with a few that someone starts.

A definition is a function, a class, or what a statement of a module binds; a method belongs to its class. One reads
another by a name that its module binds or imports, by a dotted name through modules, as ``"package.module:Name"``, or
as an attribute of a package whose ``_PUBLIC`` has it. A class whose methods read a name reads it. Annotations read
nothing, but for fields of classes and what stands in ``Annotated``: what is only named there is never made. Two that
read each other are reached only if something else reads one of them.

Whose method ``x.name`` is, a tree does not say: a method counts as read where anything that is reached has an
attribute, a keyword or a string of its name, or puts a name together that begins like it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fastlayers.tuning.sources import Module, dotted_path

DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Key = tuple[str, str]  # a module and a name of it; "" is what the module does when it is imported
# Last words of decorators that hand a function to something that calls it.
REGISTERS = {"command", "callback"}


@dataclass(eq=False)
class Source(Module):
    """A module: what its names are bound to, what it imports, and what runs when it is imported."""

    modules: set[str] = field(default_factory=set, init=False)
    body: list[ast.stmt] = field(default_factory=list, init=False)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        super()._import(node)
        where = [self.origin(node)] if isinstance(node, ast.ImportFrom) else []
        self.modules |= {*where, *(".".join([*where, each.name]) for each in node.names)}

    def _bind(self, body: Iterable[ast.stmt]) -> None:
        """Note what statements bind, also those of loops, but not what is there for types alone; and what runs."""
        for node in body:
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                    continue
                self._bind(getattr(node, "body", []))
                self._bind(getattr(node, "orelse", []) + getattr(node, "finalbody", []))
                for handler in getattr(node, "handlers", []):
                    self._bind(handler.body)
            else:
                super()._bind([node])
            if not isinstance(node, DEFINED):
                self.body.append(node)

    @cached_property
    def public(self) -> set[str]:
        """What a package's ``_PUBLIC`` has for others."""
        maps = [getattr(node, "value", None) for node in self.definitions.get("_PUBLIC", [])]
        keys = [key for each in maps if isinstance(each, ast.Dict) for key in each.keys]
        return {key.value for key in keys if isinstance(key, ast.Constant)}

    def compared_strings(self) -> set[str]:
        """Return the strings that conditions of the module compare with: ``"__main__"`` of one that is run by name."""
        tests = [each for node in self.body if isinstance(node, ast.If) for each in ast.walk(node.test)]
        return {each.value for each in tests if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def running(node: ast.AST, in_class: bool = False) -> Iterator[ast.AST]:
    """Yield a statement's nodes without the annotations of functions and variables, which run nothing."""
    if isinstance(node, ast.arg):
        if node.annotation is not None and "Annotated[" in ast.unparse(node.annotation):
            yield from running(node.annotation)
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "returns" or (name == "annotation" and not in_class):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from running(child, isinstance(node, ast.ClassDef))


class Tree:
    """Modules by name, and what their definitions read."""

    def __init__(self, modules: Mapping[str, tuple[str, bool]]) -> None:
        self.modules = {name: Source(name, *found) for name, found in modules.items()}
        self.attributes: dict[Key, set[str]] = {}
        self._reads: dict[Key, set[Key]] = {}

    def named(self, module: str, name: str, seen: frozenset[Key] = frozenset()) -> Key | None:
        """Return the definition that a name of a module is, through imports and public names of packages."""
        source = self.modules.get(module)
        if source is None or (module, name) in seen:
            return None
        if name in source.definitions:
            return module, name
        if name in source.imports:
            where, attribute = source.imports[name]
            if attribute is None:
                return (where, "") if where in self.modules else None
            found = self.named(where, attribute, seen | {(module, name)})
            return found or ((f"{where}.{attribute}", "") if f"{where}.{attribute}" in self.modules else None)
        return self._public(source, name)

    def _public(self, source: Source, name: str) -> Key | None:
        """Return what a package's ``_PUBLIC`` says of a name."""
        if name in source.public:
            for node in source.definitions["_PUBLIC"]:
                value = getattr(node, "value", None)
                for key, where in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(where, ast.Constant):
                        return self.named(str(where.value), name)
        return None

    def resolve(self, module: str, path: Sequence[str]) -> Iterator[Key]:
        """Yield the definitions that a dotted name passes on its way: the first one, or modules and what is in them."""
        found = self.named(module, path[0]) if path else None
        for piece in path[1:]:
            if found is None or found[1]:
                break
            yield found
            inside = f"{found[0]}.{piece}"
            found = self.named(found[0], piece) or ((inside, "") if inside in self.modules else None)
        if found is not None:
            yield found

    def reads(self, key: Key) -> set[Key]:
        """Return what a definition reads; of a module, what its statements do and what it imports."""
        if key not in self._reads:
            module, name = key
            source = self.modules[module]
            found: set[Key] = {(each, "") for each in source.modules if each in self.modules} | {(module, "")}
            parents = module.split(".")
            found |= {
                (".".join(parents[:n]), "") for n in range(1, len(parents)) if ".".join(parents[:n]) in self.modules
            }
            nodes = source.definitions[name] if name else source.body
            self.attributes[key] = set()
            if not name:
                found |= {(module, made) for made, bound in source.definitions.items() if any(map(registered, bound))}
            for node in nodes:
                skipped = public_map(node)
                for each in () if skipped else running(node, isinstance(node, ast.ClassDef)):
                    found |= self._read_by(module, each, self.attributes[key])
            self._reads[key] = found - {key}
        return self._reads[key]

    def _read_by(self, module: str, node: ast.AST, attributes: set[str]) -> set[Key]:
        found: set[Key] = set()
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
            found |= set(self.resolve(module, dotted_path(node)))
            if isinstance(node.value, ast.Call):  # import_module("package.module").name
                given = [each.value for each in node.value.args if isinstance(each, ast.Constant)]
                where = [each for each in given if isinstance(each, str) and each in self.modules]
                found |= {each for name in where if (each := self.named(name, node.attr)) is not None}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found |= set(self.resolve(module, [node.id]))
        elif isinstance(node, ast.keyword) and node.arg:
            attributes.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            attributes |= {node.value} if node.value.isidentifier() else set()
            if node.value in self.modules:
                found.add((node.value, ""))
            elif (target := re.fullmatch(r"([\w.]*):(\w+)", node.value)) is not None:
                # Of a string with a variable in front: of each module whose name ends so.
                ends = [each for each in self.modules if target[1] and each.endswith(target[1])]
                found |= {each for module in ends if (each := self.named(module, target[2])) is not None}
        return found

    def reached(self, roots: Iterable[Key], without: Collection[Key] = ()) -> set[Key]:
        """Return all that roots read, and what that reads, but for what only ``without`` read."""
        seen, waiting = set[Key](), list(roots)
        while waiting:
            key = waiting.pop()
            if key not in seen and key not in without:
                seen.add(key)
                waiting += self.reads(key)
        return seen

    def made(self) -> Iterator[Key]:
        """Yield every function and class without an underscore."""
        for module, source in self.modules.items():
            for name, nodes in source.definitions.items():
                if not name.startswith("_") and any(isinstance(n, DEFINED) and not is_type(n) for n in nodes):
                    yield module, name

    def unread_methods(self, reached: set[Key]) -> set[tuple[str, str, str]]:
        """Return methods without an underscore of reached classes, as module, class and name, that nothing reads."""
        read = set[str]().union(*(self.attributes[key] for key in reached))
        found = set()
        for module, name in reached:
            for node in self.modules[module].definitions.get(name, ()):
                for each in node.body if isinstance(node, ast.ClassDef) and not is_type(node) else ():
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
                        pieces = each.name.split("_")
                        starts = {"_".join(pieces[:count]) + "_" for count in range(1, len(pieces))}
                        if not read & {each.name, *starts}:
                            found.add((module, name, each.name))
        return found


def is_type(node: ast.AST) -> bool:
    """Say whether a class is a ``Protocol``: what it names is made elsewhere."""
    bases = [
        dotted_path(base.value if isinstance(base, ast.Subscript) else base) for base in getattr(node, "bases", ())
    ]
    return any(base[-1:] == ("Protocol",) for base in bases)


def registered(node: ast.stmt) -> bool:
    """Say whether a decorator hands a function to something that calls it."""
    decorators = getattr(node, "decorator_list", [])
    return any(dotted_path(each.func if isinstance(each, ast.Call) else each)[-1:] in [(r,) for r in REGISTERS]
               for each in decorators)  # fmt: skip


def public_map(node: ast.stmt) -> bool:
    """Say whether a statement only lists what a package has for others, which reads none of it."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(each, ast.Name) and each.id in ("_PUBLIC", "__all__") for each in targets)
