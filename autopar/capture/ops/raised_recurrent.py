"""Recurrent layers with dropout between them, a layer at a time: torch would draw of its own generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class RecurrentMode(Protocol):
    """What is needed of the raising mode."""

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any: ...


def _by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm, torch.gru or torch.rnn_*, of a padded batch. NotImplemented without dropout, and for a packed one."""

    def raised(
        mode: RecurrentMode, input: Tensor, hx: Any, weights: Any, has_biases: Any, num_layers: Any, dropout: float,
        train: bool, bidirectional: bool, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        is_padded = isinstance(weights, (tuple, list)) and batch_first is not None
        if not is_padded or not train or dropout == 0.0 or num_layers == 1:
            return NotImplemented
        is_several = isinstance(hx, (tuple, list))
        directions, own = 2 if bidirectional else 1, len(weights) // num_layers
        states: list[tuple[Tensor, ...]] = []
        for layer in range(num_layers):
            at = slice(layer * directions, (layer + 1) * directions)
            start = [state[at] for state in hx] if is_several else hx[at]
            part = list(weights[layer * own : (layer + 1) * own])
            input, *state = function(input, start, part, has_biases, 1, 0.0, train, bidirectional, batch_first)
            states.append(tuple(state))
            if layer + 1 < num_layers:
                input = mode.dropout(input, dropout)
        return input, *(torch.cat(each) for each in zip(*states, strict=True))

    return raised


RECURRENT: dict[Any, Callable[..., Any]] = {
    function: _by_layer(function) for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
