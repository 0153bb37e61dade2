"""What README and pages tell a user to type: the first script runs, so do the blocks behind it, and commands parse."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import ROOT
from processes import Ranks

import autopar
from autopar.api import Options
from autopar.cli.commands import app
from autopar.ir.options import StepKeywords

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
USERS = [page for page in PAGES if page.parent.name != "ideas"]  # those quote the source, and test_ideas.py runs them
RUN = ("quickstart", "evaluation", "logging")  # pages whose blocks go on with the README's script
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^    (?:torchrun .*? -m )?autopar (.*)$", re.MULTILINE)
SPEC = re.compile(r'"dp=2,tp=2"')


def blocks(page: Path) -> list[str]:
    return PYTHON.findall(page.read_text())


def script() -> str:
    return blocks(ROOT / "README.md")[0]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with nothing but the README's script, where a user stands."""
    (tmp_path / "train.py").write_text(script())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("train", None)


def _main(rank: int, file: str) -> None:
    runpy.run_path(file)["main"]()


@pytest.mark.gloo
def test_the_first_script_runs_as_it_stands(four: Ranks, train: Path) -> None:
    four.run(_main, str(train / "train.py"))


def test_the_first_script_is_a_job_that_is_right(train: Path) -> None:
    made = runpy.run_path(str(train / "train.py"))["job"]()
    assert autopar.verify(made.model, "dp=2,tp=2", loss_fn=made.loss_fn, batch=made.batch).ok


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": page}
    found = blocks(ROOT / "docs" / f"{page}.md")
    assert any(SPEC.search(block) for block in found)
    for block in found:
        exec(compile(SPEC.sub('"dp=1"', block), page, "exec"), names)


@pytest.mark.parametrize("page", USERS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_of_a_page_is_that_of_this_version(page: Path) -> None:
    for block in blocks(page):
        for node in ast.walk(ast.parse(textwrap.dedent(block).replace(", ...)", ")"))):
            _check(node, page)


def _check(node: ast.AST, page: Path) -> None:
    """Raise what a piece of Python says that autopar has not."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar"):
        module = importlib.import_module(str(node.module))
        assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autopar":
        assert hasattr(autopar, node.attr) or importlib.import_module(f"autopar.{node.attr}"), node.attr
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in KEYWORDS:
        return
    unknown = {one.arg for one in node.keywords if one.arg} - KEYWORDS[ast.unparse(node.func)]
    assert not unknown, f"{page.name}:{node.lineno} {sorted(unknown)}"


def _keywords(function: Any, *more: Any) -> set[str]:
    return set(inspect.signature(function).parameters).union(*(kind.__annotations__ for kind in more))


KEYWORDS = {
    "autopar.parallelize": _keywords(autopar.parallelize, Options, StepKeywords),
    "autopar.prepare": _keywords(autopar.prepare, Options, StepKeywords),
    "autopar.compile": _keywords(autopar.compile, StepKeywords),
    "autopar.Job": _keywords(autopar.Job),
    "autopar.Checkpointer": _keywords(autopar.Checkpointer),
    "autopar.save": _keywords(autopar.save),
    "autopar.load": _keywords(autopar.load),
    "autopar.EMA": _keywords(autopar.EMA),
}


def commands() -> list[tuple[str, str]]:
    """The command lines of all pages, with the page of each: brackets opened, of alternatives the first."""
    found = []
    for page in PAGES:
        for line in COMMAND.findall(page.read_text()):
            line = re.split(r"\s#\s|\s{3,}(?:also|the|this|one|under|on)\b", line)[0]
            line = re.sub(r"\.\.\.|[][]", "", line)
            if not re.match(r"\w+\|", line):  # a line of all commands
                found.append((page.name, re.sub(r"(\S+?)\|\S+", r"\1", line)))
    return found


NUMBERS = {"N": "2", "S": "3", "R": "0", "K": "3", "SECONDS": "9", "ROWS": "8", "FILE.svg": "x.svg", "DIR": "folder"}


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:40])
def test_a_command_line_parses(page: str, line: str) -> None:
    words = [NUMBERS.get(word, word) for word in shlex.split(line)]
    command: Any = typer.main.get_command(app)
    name = ""
    while hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: there is no command {name}"
        command = command.commands[name]
    with suppress(typer.Exit):  # of --version
        command.make_context(name, words)


# A model whose layers are enough for the pages' stages, and what transformers keeps of a small Llama.
DEEP = """
import torch
from torch import nn
import autopar, train

class Deep(train.Net):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embed(tokens))))

def job():
    return autopar.Job(Deep(), train.loss_fn, train.batch(0), data=train.batch)
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
ELSEWHERE = ("--plan plan.toml", "--mesh auto")  # they take the GPUs that the page's plan is for
STANDS_FOR = {"TARGET": "deep.py:job", "VALUE": "norm.weight", "FILE": "page.html", "cuda": "cpu"}


def whole(page: Path) -> list[list[str]]:
    """The words of the commands of a page that are said whole: no brackets, nothing left out, this machine's."""
    typed = COMMAND.findall(page.read_text())
    lines = [re.split(r"\s#\s|\s{3,}(?:also|the|this|one|under|on)\b", line)[0] for line in typed]
    lines = [line for line in lines if not re.search(r"[][|]|\.\.\.|\bN\b", line)]
    return [
        [STANDS_FOR.get(word, word) for word in shlex.split(line)]
        for line in lines
        if not any(word in line for word in ELSEWHERE)
    ]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("page", [page for page in PAGES if whole(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, train: Path) -> None:
    """One behind the other in one folder, as they are typed."""
    (train / "deep.py").write_text(DEEP)
    (train / "Llama-3-8B").mkdir()
    (train / "Llama-3-8B" / "config.json").write_text(json.dumps(LLAMA))
    for words in whole(page):
        ran = subprocess.run(
            [sys.executable, "-m", "autopar", *words], capture_output=True, text=True, timeout=600, cwd=train
        )
        assert ran.returncode == 0, (words, ran.stderr)


def test_what_is_wrong_is_seen() -> None:
    with pytest.raises(Exception, match="No such option: --mash"):
        test_a_command_line_parses("x.md", "verify train.py:job --mash dp=2")
    with pytest.raises(AssertionError, match="no command verfy"):
        test_a_command_line_parses("x.md", "verfy train.py:job")
    with pytest.raises(AssertionError, match="zeros"):
        _check(ast.parse("autopar.parallelize(m, 'dp=2', zeros=1)").body[0].value, ROOT / "x.md")  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError):
        _check(ast.parse("autopar.paralelize").body[0].value, ROOT / "x.md")  # type: ignore[attr-defined]
    assert len(commands()) > 30 and sum(len(blocks(page)) for page in PAGES) > 20
