"""What a rank leaves in the store where ranks met, and what the others make of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.runtime.ranks.last_words import words_left, words_to_leave
from autopar.runtime.ranks.process_groups import default_group


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What rank 0 leaves is read as by rank 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_nobody_has_left(alone: None) -> None:
    assert words_left() is None


def test_a_script_that_came_to_its_end(alone: None) -> None:
    say = words_to_leave(default_group(), lambda: "after 5 training steps")
    say(), say()
    words = words_left()
    assert words is not None
    assert words.startswith("Rank 0 has left after 5 training steps. Every rank must make as many steps: give each as")


def test_an_error_that_ended_a_script_is_told(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError("no such file\nnor another"), raising=False)
    words_to_leave(default_group(), lambda: "after 0 training steps")()
    assert words_left() == "Rank 0 has left after 0 training steps, with ValueError: no such file."


def test_a_group_that_is_destroyed_says_so_itself(alone: None) -> None:
    said: list[str] = []
    words_to_leave(default_group(), lambda: said.append("asked") or "after 1 training step")
    dist.destroy_process_group()
    assert said == ["asked"] and words_left() is None  # there is no store left to ask


def test_words_of_an_earlier_group_are_no_news(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives a group that is made anew the store of the one before, which all ranks left."""
    words_to_leave(default_group(), lambda: "after 5 training steps")()
    assert words_left() is not None
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert words_left() is None
