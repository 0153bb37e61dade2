"""All actions: importing the files that hold them fills the table."""

from __future__ import annotations

import importlib

FILES = ("steps", "optimizers", "by_hand", "values", "checkpoints", "changes", "hooks", "partners", "ranks", "module")


def load_actions() -> None:
    """Import every file of actions."""
    for name in FILES:
        importlib.import_module(f"benchmarks.journeys.actions_{name}")
