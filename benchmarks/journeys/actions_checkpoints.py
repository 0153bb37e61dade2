"""Checkpoints: torch.save, torch.distributed.checkpoint and its state-dict functions, to another mesh and back."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import autopar
from autopar.errors import AutoparError
from benchmarks.journeys.actions import action
from benchmarks.journeys.models import build
from benchmarks.journeys.side import Side, parallel


@action("ready")
def torch_save(side: Side) -> None:
    """Each rank saves what it has, and loads it."""
    state: dict[str, Any] = {"model": side.model.state_dict()}
    if side.optimizer is not None:
        state["optimizer"] = side.optimizer.state_dict()
    torch.save(state, side.path_of_rank("saved.pt"))
    _disturb(side)
    state = torch.load(side.path_of_rank("saved.pt"), weights_only=False)
    side.model.load_state_dict(state["model"])
    side.mark()
    if side.optimizer is not None:
        side.optimizer.load_state_dict(state["optimizer"])


@action("ready", to_plain=st.booleans())
def autopar_save(side: Side, to_plain: bool) -> None:
    """autopar.save and autopar.load, through the plain module too. A run goes on as if there had been none: the plain
    side does nothing (torch's own load gives a state of NAdam the dtype of its parameter)."""
    if not side.is_parallel:
        side.mark()
        return
    path = side.new_path("autopar")
    autopar.save(path, side.model, side.optimizer, step=3)
    if to_plain:
        plain = build(side.setup).model
        assert autopar.load(path, plain).step == 3
        autopar.save(path, plain, step=4)
        assert autopar.load(path, side.model).step == 4
    _disturb(side)
    assert autopar.load(path, side.model, side.optimizer, step=3).step == 3
    side.mark()


@action("ready")
def dcp_of_the_model(side: Side) -> None:
    """torch.distributed.checkpoint, of state_dict()."""
    state = side.model.state_dict()
    dcp.save(state, checkpoint_id=side.new_path("dcp"), no_dist=not side.is_parallel)
    _disturb(side)
    state = side.model.state_dict()
    dcp.load(state, checkpoint_id=side.last_path, no_dist=not side.is_parallel)
    side.mark()
    side.model.load_state_dict(state)


@action("ready", "optimizer", "stateful")
def dcp_of_both(side: Side) -> None:
    """The same with an optimizer, by torch's get_state_dict and set_state_dict."""
    weights, states = get_state_dict(side.model, side.optimizer)
    dcp.save({"m": weights, "o": states}, checkpoint_id=side.new_path("dcp"), no_dist=not side.is_parallel)
    _disturb(side)
    weights, states = get_state_dict(side.model, side.optimizer)
    loaded = {"m": weights, "o": states}
    dcp.load(loaded, checkpoint_id=side.last_path, no_dist=not side.is_parallel)
    side.mark()
    set_state_dict(side.model, side.optimizer, model_state_dict=loaded["m"], optim_state_dict=loaded["o"])


@action("ready", torn=True, offload=st.booleans())
def whole_model_state_of_torch(side: Side, offload: bool) -> dict[str, Tensor]:
    """get_model_state_dict with full_state_dict, and back in."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=offload and side.is_parallel)
    state = get_model_state_dict(side.model, options=gather)
    if offload:
        gather = StateDictOptions(full_state_dict=True, broadcast_from_rank0=side.is_parallel)
    state = {name: value.clone() for name, value in state.items()}
    kept = [(value, value.detach().clone()) for value in (*side.model.parameters(), *side.model.buffers())]
    _disturb(side)
    try:
        set_model_state_dict(side.model, dict(state), options=gather)  # which writes into the dict
    except AutoparError:  # of a fused weight, after others were loaded: the journey goes on from where it was
        with torch.no_grad():
            for value, before in kept:
                value.copy_(before)
        raise
    return {} if offload else state


@action("ready", "optimizer", "stateful", "!foreign")
def whole_optimizer_state_of_torch(side: Side) -> dict[str, Any]:
    """get_optimizer_state_dict with full_state_dict, and back in."""
    gather = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(side.model, side.optimizer, options=gather)
    assert side.optimizer is not None
    set_optimizer_state_dict(side.model, side.optimizer, copy.deepcopy(state), options=gather)
    return dict(state["state"])


@action("ready", "optimizer")
def optimizer_state_round_trip(side: Side) -> None:
    assert side.optimizer is not None
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


@action("ready", "exact", "optimizer", "!gpt")
def plain_optimizer_state(side: Side) -> None:
    """The states of a plain model's optimizer, as a run on one device saved them."""
    assert side.optimizer is not None and side.make is not None
    plain = build(side.setup)
    other = side.make(plain.model)
    for i, p in enumerate(plain.model.parameters()):
        p.grad = torch.full_like(p, 0.01 * (i + 1)) if p.requires_grad else None
    other.step()
    side.optimizer.load_state_dict(other.state_dict())


@action(
    "ready", "!foreign", torn=True, to=st.integers(0, 7), way=st.sampled_from(["by hand", "dcp", "whole", "broadcast"])
)
def move(side: Side, to: int, way: str) -> None:
    """On another mesh of as many ranks, with weights, optimizer states and the random state."""
    random = parallel(side).random_state.state_dict() if side.is_parallel else None
    optimizer, make = side.optimizer, side.make
    has_states = optimizer is not None and bool(optimizer.state)
    saved = _saved(side, way, has_states)
    if way == "dcp":
        dcp.save(saved, checkpoint_id=side.new_path("move"), no_dist=not side.is_parallel)
    elif way == "by hand":
        side.new_path("move.pt")
        if side.is_writer:
            torch.save(saved["m"], side.last_path)
        if side.is_parallel and dist.is_initialized():
            dist.barrier()
        saved["m"] = torch.load(side.last_path)
    side.mark()
    side.renew(side.other_mesh(to))
    if random is not None:
        parallel(side).random_state.load_state_dict(random)
    side.mark()
    if make is not None:
        made = side.use(make)
        assert optimizer is not None
        for group in made.param_groups if "initial_lr" in optimizer.param_groups[0] else ():
            group["initial_lr"] = group["lr"]  # by a scheduler, which torch's loaders want to be there before
    side.mark()
    _load(side, saved, way, has_states)


def _saved(side: Side, way: str, has_states: bool) -> dict[str, Any]:
    """What goes to the other mesh."""
    options = StateDictOptions(full_state_dict=way != "dcp", cpu_offload=way == "broadcast" and side.is_parallel)
    if way == "by hand":
        state: dict[str, Any] = parallel(side).full_state_dict() if side.is_parallel else side.model.state_dict()
        saved: dict[str, Any] = {"m": state}
    else:
        saved = {"m": get_model_state_dict(side.model, options=options)}
    if has_states:
        saved["o"] = get_optimizer_state_dict(side.model, side.optimizer, options=options)
    return saved


def _load(side: Side, saved: dict[str, Any], way: str, has_states: bool) -> None:
    """The same into a new model and its new optimizer."""
    broadcast = way == "broadcast" and side.is_parallel
    options = StateDictOptions(full_state_dict=way != "dcp", broadcast_from_rank0=broadcast)
    if way == "dcp":
        saved = _saved(side, way, has_states)
        dcp.load(saved, checkpoint_id=side.last_path, no_dist=not side.is_parallel)
    if way == "by hand":
        side.model.load_state_dict(saved["m"])
    else:
        set_model_state_dict(side.model, saved["m"], options=options)
    side.mark()
    if has_states:
        set_optimizer_state_dict(side.model, side.optimizer, saved["o"], options=options)


def _disturb(side: Side) -> None:
    """Other weights, so that loading nothing is seen."""
    with torch.no_grad():
        for p in side.each(side.model.parameters()):
            p.add_(1.0)
    side.mark()
