"""Run the sections, each in a process of its own, and write the page; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

import benchmarks.gpu
from benchmarks.gpu.sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "benchmarks" / "GPU.md"
LAST_LINES = 12  # of a section that failed


def title(device: str) -> str:
    """Device, date and versions, and the command."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"dry run on {os.cpu_count()} cores"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"
    return f"# GPU\n\n{name}, {date.today()}, {versions}: `python -m benchmarks.gpu {' '.join(sys.argv[1:])}`.\n"


def run(section: Section, device: str, seconds: float) -> tuple[bool, str]:
    """(Whether the section ended well, what it printed). One that takes longer than `seconds` is ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.sections", section.name, device]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
        return False, f"{said}\nended after {seconds:.0f} s"
    if done.returncode == 0:
        return True, done.stdout
    last = "\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:])
    return False, f"{done.stdout}\nexit code {done.returncode}:\n\n```text\n{last}\n```"


def page(
    sections: Sequence[Section],
    device: str,
    limit: float,
    answer: Callable[[Section, str, float], tuple[bool, str]] = run,
) -> Iterator[tuple[bool, str]]:
    """The parts of the page, each with whether it is as it should be. limit: seconds for all."""
    end = time.monotonic() + limit
    for section in sections:
        left = end - time.monotonic()
        head = f"\n## {section.title}\n\n"
        if left < 1:
            yield False, f"{head}not done: no time was left\n"
            continue
        started = time.monotonic()
        is_good, text = answer(section, device, min(section.seconds, left))
        state = "" if is_good else "**failed**\n\n"
        yield is_good, f"{head}{state}{text.strip()}\n\n({time.monotonic() - started:.0f} s)\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=benchmarks.gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(SECTIONS), help="these sections alone")
    parser.add_argument("--seconds", type=float, default=540, help="for all sections together")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = [section for name, section in SECTIONS.items() if name in (args.only or SECTIONS)]
    parts, failures = [title(device)], 0
    print(parts[0], flush=True)
    for is_good, text in page(chosen, device, args.seconds):
        parts.append(text)
        failures += not is_good
        print(text, flush=True)
        if device == "cuda":
            PAGE.write_text("".join(parts))  # what is known stays, however this ends
    print(f"{len(chosen) - failures} of {len(chosen)} sections are as they should be")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
