"""The models of the examples and of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]

import models as zoo  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402
from mixtures import Kind, mixture_case  # noqa: E402
from models import Llama  # noqa: E402
from train_experts import MixtureGPT  # noqa: E402
from train_experts import loss_fn as mixture_loss  # noqa: E402

__all__ = ["GPT", "ROOT", "GPTConfig", "Kind", "Llama", "MixtureGPT", "mixture_case", "mixture_loss", "zoo"]
