"""Note which tests reach which statements of our source: what a mutant is shown to.

    timeout 7200 .venv/bin/python -m benchmarks.reached [tests/passes tests/ir ...] [--limit 10] [--out FILE]

Each file of tests runs in a process of its own, with every statement of the rooms of `benchmarks.mutants` preceded by a
mark in memory that all processes share, so what the ranks and commands do that a test starts is noted, too. A line a
test: its name, its seconds, what it reached. Lines are appended: of a test that is there twice the last one counts.
A statement is known by its words and its function, not by its number, so that edits elsewhere leave the notes true.
"""

from __future__ import annotations

import argparse
import ast
import base64
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRELOADED = (  # in the process that forks
    "pytest", "torch._dynamo", "torch.distributed.checkpoint", "hypothesis", "transformers.models.llama.modeling_llama",
)  # fmt: skip
NOTES = ROOT / "build" / "reached.txt"
SLOTS = 1 << 18  # a mark's place is its hash: of 20,000 marks few share one, and share their tests then
MARKS, HOOK = "AUTOPAR_MARKS", "import {module}; {module}.install()"
Block = ast.stmt | ast.Lambda


# -- marks -----------------------------------------------------------------------------------------------------------


def blocks(tree: ast.Module, path: str) -> dict[int, tuple[str, Block | None]]:
    """Of every node, by its id: the mark of the statement or lambda that it runs with, "" where it runs at import."""
    found: dict[int, tuple[str, Block | None]] = {}

    def walk(node: ast.AST, function: str, mark: str, block: Block | None) -> None:
        if isinstance(node, (ast.stmt, ast.Lambda)) and function:
            mark, block = f"{path}:{function}:{_head(node)}", node
        found[id(node)] = mark, block
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for name, value in ast.iter_fields(node):
            inside = f"{function}.{getattr(node, 'name', 'lambda')}" if is_function and name == "body" else function
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    if isinstance(node, ast.Lambda) and name == "body":
                        text = f"{path}:{inside}:{ast.unparse(child)}"
                        walk(child, inside, text, node)
                    else:
                        walk(child, inside, mark, block)

    walk(tree, "", "", None)
    return found


def _head(node: Block) -> str:
    body = {name: [] for name in ("body", "orelse", "finalbody", "handlers", "cases") if isinstance(node, ast.stmt)}
    if not any(hasattr(node, name) for name in body):
        return ast.unparse(node)
    return ast.unparse(ast.copy_location(type(node)(**{**dict(ast.iter_fields(node)), **body}), node)) + _first(node)


def _first(node: ast.AST) -> str:
    body = getattr(node, "body", None)
    return ast.unparse(body[0])[:80] if isinstance(body, list) and body else ""


def slot(mark: str) -> int:
    return zlib.crc32(mark.encode()) % SLOTS


class _Marked(ast.NodeTransformer):
    """Puts a mark before every statement of a function, and into every lambda."""

    def __init__(self, marks: dict[int, tuple[str, Block | None]]) -> None:
        self.marks = marks

    def visit(self, node: ast.AST) -> Any:
        for name in ("body", "orelse", "finalbody"):
            value = getattr(node, name, None)
            if isinstance(value, list):
                lines: list[ast.AST] = []
                for child in value:
                    mark, block = self.marks.get(id(child), ("", None))
                    if block is child and not _is_words(child):
                        lines.append(ast.parse(f"_marks[{slot(mark)}] = 1").body[0])
                    lines.append(child)
                setattr(node, name, lines)
        if isinstance(node, ast.Lambda):
            mark = self.marks[id(node.body)][0]
            noted = ast.parse(f"(_marks.__setitem__({slot(mark)}, 1), None)[1]", mode="eval").body
            node.body = ast.Subscript(ast.Tuple([noted, node.body], ast.Load()), ast.Constant(1), ast.Load())
        self.generic_visit(node)
        return node


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def marked(source: str, path: str) -> ast.Module:
    tree = ast.parse(source)
    _Marked(blocks(tree, path)).visit(tree)
    return ast.fix_missing_locations(tree)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives every module of the rooms with marks."""

    def __init__(self, marks: mmap.mmap) -> None:
        self.marks = marks

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(("autopar.ir", "autopar.checkpoint", "autopar.passes", "autopar.runtime")):
            return None
        base = ROOT / name.replace(".", "/").removeprefix(
            "autopar/" if name.startswith(("autopar.passes", "autopar.runtime")) else ""
        )
        if base.is_dir():
            file, folders = base / "__init__.py", [str(base)]
        else:
            file, folders = base.with_suffix(".py"), None
        return importlib.util.spec_from_file_location(name, file, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        file = str(module.__spec__.origin)  # type: ignore[union-attr]
        module.__dict__["_marks"] = self.marks
        exec(_code(file), module.__dict__)


@cache
def _code(file: str) -> Any:
    return compile(marked(Path(file).read_text(), str(Path(file).relative_to(ROOT))), file, "exec")


def install() -> None:
    """Mark what this process imports, in the file that MARKS names."""
    with open(os.environ[MARKS], "r+b") as file:
        sys.meta_path.insert(0, _Finder(mmap.mmap(file.fileno(), SLOTS)))


# -- notes -----------------------------------------------------------------------------------------------------------


class _Notes:
    """The plugin that notes what each test reached. What the imports and fixtures of a file reach counts for all of its
    tests. What does not pass is left out."""

    def __init__(self, path: str, out: Path, limit: float) -> None:
        file = open(path, "r+b")  # noqa: SIM115
        self.marks, self.out, self.shared = mmap.mmap(file.fileno(), SLOTS), out, defaultdict[str, set[int]](set)
        self.limit = limit + time.process_time()
        self.start, self.passes, self.at_import = 0.0, True, set[int]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The first case of each test, then the second ones: what is most unlike comes before the limit."""
        rounds = Counter[str]()
        order = []
        for item in items:
            order.append(rounds[item.originalname])
            rounds[item.originalname] += 1
        items[:] = [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]

    def pytest_collection_finish(self) -> None:
        self.at_import = self.reached()

    def pytest_runtest_logstart(self) -> None:
        self.marks[:] = bytes(SLOTS)
        self.start, self.passes = time.monotonic(), True
        if time.process_time() > self.limit:
            os._exit(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passes = self.passes and report.passed

    def pytest_runtest_call(self, item: Any) -> None:
        self.shared[item.nodeid.partition("::")[0]] |= self.reached()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if not self.passes:
            return
        found = self.reached() | self.shared[nodeid.partition("::")[0]] | self.at_import
        bits = bytearray(SLOTS // 8)
        for at in found:
            bits[at // 8] |= 1 << at % 8
        text = base64.b85encode(zlib.compress(bytes(bits))).decode()
        with self.out.open("a") as file:
            file.write(json.dumps([nodeid, round(time.monotonic() - self.start, 3), text]) + "\n")

    def reached(self) -> set[int]:
        data = self.marks[:]
        found, at = set(), data.find(1)
        while at >= 0:
            found.add(at)
            at = data.find(1, at + 1)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", nargs="*", type=Path, default=[ROOT / "tests"])
    parser.add_argument("--out", type=Path, default=NOTES)
    parser.add_argument("--limit", type=float, default=1e9, help="CPU seconds of a file, after which it is left")
    options = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    for folder in ("autopar/ir", "autopar/checkpoint", "passes", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            _code(str(path))
    gc.collect()
    gc.freeze()
    options.out.parent.mkdir(exist_ok=True)
    for path in options.tests:
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            start = time.monotonic()
            _noted(file, options.out, options.limit)
            print(f"{file}  {time.monotonic() - start:.0f} s", flush=True)


def _noted(file: Path, out: Path, limit: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder, "marks")
        marks.write_bytes(bytes(SLOTS))
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        os.environ[MARKS] = str(marks)
        in_all_processes(Path(folder), HOOK.format(module="benchmarks.reached"))
        install()
        import pytest

        quiet()
        try:
            pytest.main(
                ["-p", "no:xdist", "-m", "not slow and not gpu", str(file)], plugins=[_Notes(str(marks), out, limit)]
            )
        finally:
            os._exit(0)


def in_all_processes(folder: Path, line: str) -> None:
    """Have every Python that this process starts run a line first."""
    (folder / "sitecustomize.py").write_text(f"{line}\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])


def quiet() -> None:
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)


# -- what they say ---------------------------------------------------------------------------------------------------


class Reached:
    """Notes, read: the tests of a mark."""

    def __init__(self, path: Path = NOTES) -> None:
        self.seconds: dict[str, float] = {}
        self._bits: dict[str, int] = {}
        for line in path.read_text().splitlines():
            name, seconds, text = json.loads(line)
            self.seconds[name] = seconds
            self._bits[name] = int.from_bytes(zlib.decompress(base64.b85decode(text)), "little")

    def is_reached(self, mark: str) -> bool:
        return any(bits >> slot(mark) & 1 for bits in self._bits.values())

    def tests(self, marks: Iterable[str], file: Iterable[str]) -> list[str]:
        """The tests that reach one of some marks, those that are about the file of these first: of what they reach it
        is the largest share, and they are quick. A golden test of a pass comes before the models that happen to need
        the pass. Each further case of a test counts for less than the one before."""
        wanted, own = _bits_of(marks), _bits_of(file)
        found = [name for name, bits in self._bits.items() if bits & wanted]
        worth = {}
        for name in found:
            worth[name] = (self._bits[name] & own).bit_count() / self._bits[name].bit_count() / (1 + self.seconds[name])
        cases = Counter[str]()
        for name in sorted(found, key=lambda name: -worth[name]):
            cases[name.partition("[")[0]] += 1
            worth[name] /= cases[name.partition("[")[0]]
        return sorted(found, key=lambda name: -worth[name])


def _bits_of(marks: Iterable[str]) -> int:
    bits = 0
    for mark in marks:
        bits |= 1 << slot(mark)
    return bits


if __name__ == "__main__":
    main()
