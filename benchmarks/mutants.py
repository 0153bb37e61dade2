"""Break our own source on purpose, a line at a time: does a test see it?

    timeout 10800 .venv/bin/python -m benchmarks.mutants --count 300 --seed 0 [--rooms rules schedules] [--out FILE]

A mutant is one change of one place in a rule, a pass, a collective, a schedule, an executor or the code of checkpoints:
another comparison, another sign, a number one larger, a condition that always holds, a call or an entry of a table that
is gone. No file is changed: a process of its own imports the changed source and runs tests in one process: those that
name the module first, then those of its room. Tests that start other processes are left out, so the whole suite kills
more than is counted here. Survivors are printed with their place and change. Many of them change nothing that a test
could see (a limit of a search, a size of a cache, a shortcut): look at each. `--control` runs the tests of each room
with nothing changed first: they have to pass. Exits with 1 if fewer than GOAL are killed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
GOAL, NOTHING = 0.95, "nothing"
LIMIT_S, HANGS_S = 240, 1800  # of the tests of a mutant: CPU seconds, and by the clock, where others want the cores too
ROOMS: dict[str, tuple[str, ...]] = {
    "rules": ("passes/rules",),
    "passes": ("passes/collectives", "passes/sorts", "passes/recompute", "passes/groups", "passes/chunked_loss",
               "passes/precision", "passes/masks", "passes/lengths"),
    "schedules": ("passes/schedules", "passes/pipeline"),
    "runtime": ("runtime/executor", "runtime/pipeline", "runtime/ranks"),
    "layouts": ("autopar/ir",),
    "checkpoint": ("autopar/checkpoint",),
}  # fmt: skip
TESTS: dict[str, tuple[str, ...]] = {
    "rules": ("test_rules.py", "test_rowwise.py", "test_rules_opinfo.py", "test_rules_models.py", "test_context.py"),
    "passes": ("test_golden.py", "test_reshard.py", "test_solve.py", "test_zero.py", "test_recompute.py",
               "test_expert_loops.py", "test_coupled_microbatches.py", "test_rules_models.py"),
    "schedules": ("test_golden_pipeline.py", "test_schedules.py", "test_check_schedule.py", "test_pipeline.py",
                  "test_pipeline_weights.py", "test_pipeline_models.py"),
    "runtime": ("test_runtime_executor.py", "test_runtime_virtual.py", "test_transport.py", "test_pipeline.py"),
    "layouts": ("test_layout.py", "test_mesh.py", "test_text.py", "test_rewrite.py", "test_reshard.py"),
    "checkpoint": ("test_files.py", "test_checkpointer.py", "test_meshes.py"),
}  # fmt: skip
_OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGKILL)  # what the system ends a process with that had its CPU seconds
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
    """One change. at: the number of the node in the file, as `_places` counts them; kind: which change of it."""

    room: str
    path: str
    at: int
    kind: str
    line: int

    def tree(self) -> ast.Module:
        return changed((ROOT / self.path).read_text(), self)

    def tests(self) -> list[str]:
        return tests_of(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no mutant after that")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--control", action="store_true", help="see that the tests pass first, with nothing changed")
    options = parser.parse_args()
    import torch  # noqa: F401  each process begins with it

    for room in options.rooms if options.control else ():
        found = judged(Mutant(room, f"{ROOMS[room][0]}/__init__.py", 0, NOTHING, 1))
        if found != "survived":
            why = f"take more than {LIMIT_S} CPU seconds" if found == "timeout" else "do not pass as they are"
            sys.exit(f"the tests of {room} {why}")
        print(f"the tests of {room} pass", flush=True)
    begun, counts, survivors = time.monotonic(), Counter[tuple[str, str]](), list[str]()
    for mutant in drawn(options.rooms, options.count, options.seed):
        if time.monotonic() - begun > options.seconds:
            break
        start = time.monotonic()
        found = judged(mutant)
        counts[mutant.room, found] += 1
        text = f"{found:9} {mutant.path}:{mutant.line}  {shown(mutant)}  {time.monotonic() - start:.0f} s"
        print(text, flush=True)
        if found == "survived":
            survivors.append(text)
    done = sum(counts.values())
    killed = sum(count for (_, found), count in counts.items() if found != "survived")
    lines = [f"{killed} of {done} mutants were killed ({killed / max(done, 1):.1%})"]
    for room in options.rooms:
        of_room = {found: count for (where, found), count in counts.items() if where == room}
        lines.append(f"{room}: {', '.join(f'{count} {found}' for found, count in sorted(of_room.items()))}")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join([*lines, *survivors]) + "\n")
    sys.exit(0 if killed >= GOAL * done else 1)


# -- what is changed -------------------------------------------------------------------------------------------------


def drawn(rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """As many mutants of each room, in an order of their own."""
    generator, found = random.Random(seed), list[Mutant]()
    for i, room in enumerate(rooms):
        every = [
            mutant
            for folder in ROOMS[room]
            for path in sorted((ROOT / folder).rglob("*.py"))
            for mutant in mutants_of(room, str(path.relative_to(ROOT)))
        ]
        wanted = count // len(rooms) + (i < count % len(rooms))
        found += generator.sample(every, min(wanted, len(every)))
    generator.shuffle(found)
    return found


def mutants_of(room: str, path: str) -> Iterator[Mutant]:
    """All changes of a file."""
    for at, node in enumerate(_places(ast.parse((ROOT / path).read_text()))):
        for kind in _kinds(node):
            yield Mutant(room, path, at, kind, getattr(node, "lineno", 0))


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
    node: Any = next(node for at, node in enumerate(_places(tree)) if at == mutant.at)
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
    """The line and what is done to it."""
    text = (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
    return f"{mutant.kind}: {text[:90]}"


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


def judged(change: Change) -> str:
    """ "killed", "survived", or "timeout" of a change whose tests did not come to an end."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        os._exit(_run(change))
    begun = time.monotonic()
    while time.monotonic() - begun < HANGS_S:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return "survived" if code == 0 else "timeout" if code in _OUT_OF_TIME else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _run(change: Change) -> int:
    """The exit status of the tests, in this process."""
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(ROOT)
    sys.meta_path.insert(0, _Finder(change))
    import pytest

    arguments = ["-x", "-p", "no:xdist", "-m", "not slow and not gloo and not gpu", *change.tests()]
    try:
        return int(pytest.main(arguments))
    except BaseException:
        return 1


def tests_of(mutant: Mutant) -> list[str]:
    """The files of tests that judge a mutant: those that name its module, and those of its room."""
    stem = Path(mutant.path).stem
    word = re.compile(rf"\b{re.escape(stem)}\b")
    every = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "end_to_end" not in path.parts]
    named = [path for path in every if stem != "__init__" and word.search(path.read_text())]
    of_room = [path for name in TESTS[mutant.room] for path in every if path.name == name]
    return [str(path) for path in dict.fromkeys([*sorted(named, key=lambda path: path.stat().st_size)[:6], *of_room])]


if __name__ == "__main__":
    main()
