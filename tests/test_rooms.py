"""The house: imports point one way, a public class name has one meaning, no file or class is too long."""

from __future__ import annotations

import ast
import collections
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import hora

PACKAGE = pathlib.Path(hora.__file__).parent

Graph = dict[str, set[str]]


def modules() -> dict[str, tuple[pathlib.Path, ast.Module]]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (path, ast.parse(path.read_text()))
    return found


def imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Of a module, also those inside of functions; not those for type checkers alone."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def graph() -> Graph:
    known = modules()
    edges: Graph = {name: set() for name in known}
    for name, (path, tree) in known.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in imports(tree):
            if isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & known.keys()
                continue
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets = (f"{source}.{alias.name}" for alias in node.names)
            edges[name] |= {target if target in known else source for target in targets} & known.keys() - {name}
    return edges


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """What is left once everything that imports nothing of the rest has been taken away, again and again."""
    left = {name: set(targets) for name, targets in edges.items()}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    return [[name, *sorted(targets & left.keys())] for name, targets in left.items()]


def test_no_module_imports_itself_by_way_of_others_even_lazily() -> None:
    assert cycles(graph()) == []


def test_no_room_imports_itself_by_way_of_others() -> None:
    rooms: Graph = collections.defaultdict(set)
    for name, targets in graph().items():
        for target in targets:
            here, there = [*name.split(".")[1:2], "hora"][0], [*target.split(".")[1:2], "hora"][0]
            if here != there:
                rooms[here].add(there)
    assert cycles(rooms) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) != []
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_public_class_names_are_unique_across_the_package() -> None:
    homes = collections.defaultdict(list)
    for name, (_, tree) in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


MAX_FILE, MAX_CLASS = 450, 350  # lines: a file is read in one sitting


def test_no_file_and_no_class_is_too_long() -> None:
    long = []
    for name, (path, tree) in modules().items():
        num_lines = len(path.read_text().splitlines())
        if num_lines > MAX_FILE:
            long.append(f"{name}: {num_lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_CLASS:
                long.append(f"{name}.{node.name}: {size} lines")
    assert long == []


def test_the_files_that_architecture_names_exist_by_their_full_paths() -> None:
    text = (PACKAGE.parents[1] / "ARCHITECTURE.md").read_text()
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")} | {"tests/test_rooms.py"}
    named = set(re.findall(r"[a-z_]+(?:/[a-z_]+)*\.py", text))
    assert len(named) > 20
    assert named - files == set()
