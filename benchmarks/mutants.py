"""Break our own source on purpose, a line at a time: does a test see it?

    timeout 7200 .venv/bin/python -m benchmarks.reached     # once: which tests reach which statements
    timeout 10800 .venv/bin/python -m benchmarks.mutants --count 300 --seed 0 [--rooms rules schedules] [--record]

A mutant is one change of one place in a rule, a pass, a collective, a schedule, an executor or the code of checkpoints:
another comparison, another sign, a number one larger, a condition that always holds, a call or an entry of a table that
is gone. No file is changed: a process of its own, and all that it starts, imports the changed source and runs the tests
that reach its statement (`benchmarks.reached`), those that are about its file first: QUICK seconds of them, and if it
survives, up to `--most`. So the whole suite kills at least as many. What changes nothing that
anybody sees is a row of MUTANTS.md, with its reason, and is not counted. `--control` runs the tests of each mutant with
nothing changed, too, and leaves out what does not pass. Exits with 1 if fewer than GOAL are killed. `--unreached` names
in a minute the statements that no test reaches, in which every mutant survives.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

from benchmarks.reached import PRELOADED, ROOT, Reached, blocks, in_all_processes, quiet

GOAL, NOTHING = 0.95, "nothing"
QUICK, MOST = 20, 200  # seconds of tests that a mutant is shown to, as noted: first, and in all
FIRST = 8  # files of tests that are read and run before the others are
LIMIT_S, HANGS_S = 600, 1800  # of the tests of a mutant: CPU seconds, and by the clock, where others want the cores too
SHARE = 0.25  # of these, for the tests of the first round: what never ends costs no more than what survives
KNOWN = ROOT / "benchmarks" / "MUTANTS.md"
ROOMS: dict[str, tuple[str, ...]] = {
    "rules": ("passes/rules",),
    "passes": ("passes/collectives", "passes/sorts", "passes/recompute", "passes/groups", "passes/chunked_loss",
               "passes/precision", "passes/masks", "passes/lengths"),
    "schedules": ("passes/schedules", "passes/pipeline"),
    "runtime": ("runtime/executor", "runtime/pipeline", "runtime/ranks"),
    "layouts": ("autopar/ir",),
    "checkpoint": ("autopar/checkpoint",),
}  # fmt: skip
_NAMES = {0: "survived", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout", 4: "unread"}  # exit statuses
_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_UNSEEN = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.AnnAssign)  # words, types


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. at: the number of the node in the file, as `_places` counts them; kind: which change of it. is_first:
    whether it is shown to the quickest tests, or to those that are left, up to `most` seconds of tests in all."""

    room: str
    path: str
    at: int
    kind: str
    line: int
    is_first: bool = True
    most: int = MOST

    def tree(self) -> ast.Module:
        return changed((ROOT / self.path).read_text(), self)

    def tests(self) -> list[str]:
        return tests_of(self)

    def node(self, tree: ast.Module) -> Any:
        return next(node for at, node in enumerate(_places(tree)) if at == self.at)


def main() -> None:
    from benchmarks.records import Figure, Records, record_option  # with torch, which not all that `plant` is in wants

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no mutant after that")
    parser.add_argument("--most", type=int, default=MOST, help="seconds of tests that a mutant is shown to, as noted")
    parser.add_argument(
        "--unreached", action="store_true", help="say which statements no test reaches, and draw nothing"
    )
    parser.add_argument("--control", action="store_true", help="see that the tests pass first, with nothing changed")
    record_option(parser)
    options = parser.parse_args()
    if options.unreached:
        print(*unreached(options.rooms), sep="\n")
        return
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _reached()  # once, for all processes
    begun, counts, reasons = time.monotonic(), Counter[tuple[str, str]](), known()
    for mutant in drawn(options.rooms, options.count, options.seed):
        if time.monotonic() - begun > options.seconds:
            break
        start = time.monotonic()
        found, tests = judged(mutant, SHARE), len(mutant.tests())
        if found == "survived":
            mutant = replace(mutant, is_first=False, most=options.most)
            found, tests = judged(mutant), tests + len(mutant.tests())
        if (options.control or found == "unread") and judged(replace(mutant, kind=NOTHING)) != "survived":
            found = "no control"
        if found == "survived" and (mutant.path, shown(mutant)) in reasons:
            found = "equivalent"
        counts[mutant.room, found] += 1
        place, spent = f"{mutant.path}:{mutant.line}", time.monotonic() - start
        print(f"{found:10} {place}  {shown(mutant)}  {spent:.0f} s, {tests} tests", flush=True)
    total = Counter[str]()
    for (_, found), count in counts.items():
        total[found] += count
    killed = total["killed"] + total["timeout"] + total["unread"]
    share = killed / max(killed + total["survived"], 1)
    for room in options.rooms:
        of_room = {found: count for (where, found), count in counts.items() if where == room}
        print(f"{room}: {', '.join(f'{count} {found}' for found, count in sorted(of_room.items()))}")
    print(
        f"{killed} of {killed + total['survived']} mutants were killed ({share:.1%}), {total['equivalent']} equivalent"
    )
    case = f"{total.total()} mutants, seed {options.seed}, {total['equivalent']} of them equivalent"
    case += f", each shown to {options.most} s of tests" if options.most != MOST else ""
    Records("mutants", options.record).add(Figure(case, "killed", "share", share, goal=f">={GOAL}"))
    sys.exit(0 if share >= GOAL else 1)


def unreached(rooms: Sequence[str]) -> Iterator[str]:
    """The statements that no test reaches, of those in which something may be changed, with the number of changes."""
    notes = _reached()
    for path in dict.fromkeys(path for room in rooms for path in _files(room)):
        source = (ROOT / path).read_text()
        tree, lost = ast.parse(source), Counter[int]()
        marks = blocks(tree, path)
        for node in _places(tree):
            mark, block = marks[id(node)]
            if block is not None and _kinds(node) and not notes.is_reached(mark):
                lost[block.lineno] += len(_kinds(node))
        lines = source.splitlines()
        yield from (f"{path}:{line}  {count} changes  {lines[line - 1].strip()[:90]}" for line, count in lost.items())


def known() -> set[tuple[str, str]]:
    """The mutants of KNOWN: their file and what is done."""
    rows = [line.split(" | ") for line in KNOWN.read_text().splitlines() if line.startswith("| `")]
    return {(path.strip("| `"), text.strip("`").replace("\\|", "|")) for path, text, *_ in rows}


# -- what is changed -------------------------------------------------------------------------------------------------


def drawn(rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """As many mutants of each room, in an order of their own."""
    generator, found = random.Random(seed), list[Mutant]()
    for i, room in enumerate(rooms):
        every = [mutant for path in _files(room) for mutant in mutants_of(room, path)]
        wanted = count // len(rooms) + (i < count % len(rooms))
        found += generator.sample(every, min(wanted, len(every)))
    generator.shuffle(found)
    return found


def _files(room: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in ROOMS[room] for path in sorted((ROOT / folder).rglob("*.py"))]


def mutants_of(room: str, path: str) -> Iterator[Mutant]:
    """All changes of a file."""
    for at, node in enumerate(_places(ast.parse((ROOT / path).read_text()))):
        line = getattr(getattr(node, "target", node) if isinstance(node, ast.comprehension) else node, "lineno", 0)
        for kind in _kinds(node):
            yield Mutant(room, path, at, kind, line)


def _places(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a file that may be changed, in an order that is always the same."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop(0)
        yield node
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                is_word = name in ("annotation", "returns", "decorator_list", "keywords") or isinstance(child, _UNSEEN)
                if isinstance(child, ast.AST) and not is_word:
                    pending.append(child)


def _kinds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
        return ["compare"]
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS and not isinstance(node.left, ast.Constant):
        return ["sign"]
    if isinstance(node, ast.BoolOp):
        return ["and-or"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not"]
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return ["number"]
    if isinstance(node, (ast.If, ast.IfExp)):
        return ["always", "never"]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ["no call"]
    if isinstance(node, ast.AugAssign):
        return ["no change"]
    if isinstance(node, ast.Dict) and len(node.keys) > 1:
        return ["no entry"]
    return ["no filter"] if isinstance(node, ast.comprehension) and node.ifs else []


def changed(source: str, mutant: Mutant) -> ast.Module:
    """The file with its change."""
    tree = ast.parse(source)
    if mutant.kind == NOTHING:
        return tree
    node = mutant.node(tree)
    if mutant.kind == "compare":
        node.ops[0] = _OTHER[type(node.ops[0])]()
    elif mutant.kind == "sign":
        node.op = _SIGNS[type(node.op)]()
    elif mutant.kind == "and-or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif mutant.kind == "not":
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
    elif mutant.kind == "number":
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif mutant.kind in ("always", "never"):
        node.test = ast.Constant(mutant.kind == "always")
    elif mutant.kind == "no call":
        node.value = ast.Constant(None)
    elif mutant.kind == "no change":
        node.value, node.op = ast.Constant(0), ast.Add()
    elif mutant.kind == "no entry":
        at = mutant.at % len(node.keys)
        del node.keys[at], node.values[at]
    else:
        node.ifs = []
    return ast.fix_missing_locations(tree)


def shown(mutant: Mutant) -> str:
    """What is changed, in its statement, and how."""
    tree = mutant.node(ast.parse((ROOT / mutant.path).read_text()))
    line = (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
    return f"{mutant.kind} {ast.unparse(tree).splitlines()[0][:60]}: {line[:90]}"


# -- whether it is seen ----------------------------------------------------------------------------------------------


class Change(Protocol):
    """A file that is changed, and the tests that should see it."""

    @property
    def path(self) -> str: ...

    def tree(self) -> ast.Module: ...

    def tests(self) -> list[str]: ...


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module its changed source."""

    def __init__(self, change: Change) -> None:
        self.change, self.path = change, ROOT / change.path
        name = change.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.name = name if name.startswith("autopar.") else f"autopar.{name}"

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        folders = [str(self.path.parent)] if self.path.stem == "__init__" else None
        return importlib.util.spec_from_file_location(name, self.path, loader=self, submodule_search_locations=folders)

    def exec_module(self, module: ModuleType) -> None:
        code: CodeType = compile(self.change.tree(), str(self.path), "exec")
        exec(code, module.__dict__)


def judged(change: Change, share: float = 1.0) -> str:
    """ "killed", "survived", "timeout" of a change whose tests did not come to an end, or "unread" where pytest did not
    find them: their modules cannot be imported, or they are no more. share: how much of the limits they may take."""
    child = os.fork()
    if child == 0:
        os.setsid()
        seconds = int(share * LIMIT_S)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        os._exit(_run(change))
    begun = time.monotonic()
    while time.monotonic() - begun < share * HANGS_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end(child)  # what it started and left
            code = os.waitstatus_to_exitcode(status)
            return _NAMES.get(code, "killed")
        time.sleep(0.05)
    _end(child)
    os.waitpid(child, 0)
    return "timeout"


def _end(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _run(change: Change) -> int:
    """The exit status of the tests, in this process."""
    quiet()
    tests = change.tests()
    if not tests:
        return 0
    sys.meta_path.insert(0, _Finder(change))
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "changed.py")
        written.write_text(ast.unparse(change.tree()))
        in_all_processes(
            Path(folder), f"from benchmarks.mutants import plant; plant({change.path!r}, {str(written)!r})"
        )
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        first = set(list(files)[:FIRST])
        for is_first in (True, False):
            part = [test for test in tests if (test.partition("::")[0] in first) is is_first]
            try:
                code = int(pytest.main(["-x", "-p", "no:xdist", "-m", "not slow and not gpu", *part])) if part else 0
            except BaseException:
                return 1
            if code:
                return code
    return 0


def plant(path: str, written: str) -> None:
    """Give this process the changed source of a file."""
    sys.meta_path.insert(0, _Finder(Planted(path, Path(written))))


@dataclass(frozen=True, slots=True)
class Planted:
    """A change that another process wrote down."""

    path: str
    written: Path

    def tree(self) -> ast.Module:
        return ast.parse(self.written.read_text())

    def tests(self) -> list[str]:
        return []


@cache
def _reached() -> Reached:
    return Reached()


def tests_of(mutant: Mutant) -> list[str]:
    """The tests a mutant is shown to, the likeliest to see it first, for some seconds; in a second round those that the
    first had no time for. What runs as its module is imported is shown to all that reach anything in that module."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    marks = blocks(tree, mutant.path)
    mark, _ = marks[id(mutant.node(tree))]
    every = [each for each, _ in marks.values() if each]
    chosen, spent, most = defaultdict[str, list[str]](list), 0.0, QUICK if mutant.is_first else mutant.most
    for test in _reached().tests([mark] if mark else every, every):
        spent += _reached().seconds[test]
        if (0 if mutant.is_first else QUICK) < spent <= most:
            chosen[test.partition("::")[0]].append(test)
    return [test for of_file in chosen.values() for test in of_file]


if __name__ == "__main__":
    main()
