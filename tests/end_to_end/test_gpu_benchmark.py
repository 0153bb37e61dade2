"""`benchmarks.gpu` works before there is a GPU: every section, at tiny sizes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import page, run, title
from benchmarks.gpu.sections import SECTIONS, Section

# that make process groups or processes of their own, or say something in the environment
IN_PROCESSES = ("nccl", "peers", "kernels", "offload", "trainers")
COMMANDS = {"tests": ("-m", "pytest"), "demo": ("-m", "autopar", "run"), "dropout": ("-m", "benchmarks.dropout")}


@pytest.mark.parametrize("name", sorted(set(SECTIONS) - {*IN_PROCESSES, *COMMANDS}))
def test_a_section_runs_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    SECTIONS[name].run("cpu")
    torch.set_num_threads(threads)
    assert len(capsys.readouterr().out.split()) > 5, "a section says what it found"


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["nccl", *map(slow, (*IN_PROCESSES[1:], *COMMANDS))])
def test_a_section_runs_in_a_process(name: str) -> None:
    is_good, text = run(SECTIONS[name], "cpu", 600)
    assert is_good and len(text.split()) > 3, text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_is_a_command(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command says is shown, and its failure ends the section."""
    asked = []

    def called(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, len(asked) - 1, "42 tokens")

    monkeypatch.setattr(subprocess, "run", called)
    SECTIONS[name].run("cpu")
    assert asked[0][0] == sys.executable and tuple(asked[0][1:])[: len(COMMANDS[name])] == COMMANDS[name]
    assert "42 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        SECTIONS[name].run("cpu")


def test_what_fails_is_reported_and_the_others_go_on() -> None:
    broken = Section("no such section", "Broken", 60, lambda device: None)
    parts = list(
        page([broken, SECTIONS["reads"]], "cpu", 60, lambda s, d, t: run(s, d, t) if s is broken else (True, "fine"))
    )
    assert [is_good for is_good, _ in parts] == [False, True]
    assert "**failed**" in parts[0][1] and "KeyError" in parts[0][1] and "fine" in parts[1][1]


def test_what_takes_too_long_is_ended_and_what_has_no_time_is_named() -> None:
    is_good, text = run(SECTIONS["demo"], "cpu", 0.2)
    assert not is_good and "ended after" in text
    ((is_good, text),) = page([SECTIONS["demo"]], "cpu", 0)
    assert not is_good and "no time was left" in text


def test_the_page_says_where_and_when() -> None:
    assert torch.__version__ in title("cpu") and "dry run" in title("cpu")
