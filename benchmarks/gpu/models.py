"""The models of the examples and of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import models as zoo  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402
from models import Llama  # noqa: E402

__all__ = ["GPT", "GPTConfig", "Llama", "zoo"]
