"""Recurrent layers with dropout between them, a layer at a time: torch would draw of its own generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Tensor = torch.Tensor


class RecurrentMode(Protocol):
    """What is needed of the raising mode."""

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any: ...


def layer_by_layer(
    run: Callable[[Tensor, Any, list[Tensor]], Any], input: Tensor, hx: Any, weights: Any, num_layers: int,
    drop: Callable[[Tensor], Tensor],
) -> Any:  # fmt: skip
    """The results of recurrent layers, with dropout between them. run: a layer on its input, states and weights."""
    is_several = isinstance(hx, (tuple, list))
    each, own = len(hx[0] if is_several else hx) // num_layers, len(weights) // num_layers
    states: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        at = slice(layer * each, (layer + 1) * each)
        start = [state[at] for state in hx] if is_several else hx[at]
        input, *state = run(input, start, list(weights[layer * own : (layer + 1) * own]))
        states.append(tuple(state))
        if layer + 1 < num_layers:
            input = drop(input)
    return input, *(torch.cat(each) for each in zip(*states, strict=True))


def _by_layer(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm, torch.gru or torch.rnn_*, of a padded batch. NotImplemented without dropout, and for a packed one."""

    def raised(
        mode: RecurrentMode, input: Tensor, hx: Any, weights: Any, has_biases: Any, num_layers: Any, dropout: float,
        train: bool, bidirectional: bool, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        is_padded = isinstance(weights, (tuple, list)) and batch_first is not None
        if not is_padded or not train or dropout == 0.0 or num_layers == 1:
            return NotImplemented

        def run(x: Tensor, start: Any, part: list[Tensor]) -> Any:
            return function(x, start, part, has_biases, 1, 0.0, train, bidirectional, batch_first)

        return layer_by_layer(run, input, hx, weights, num_layers, lambda x: mode.dropout(x, dropout))

    return raised


RECURRENT: dict[Any, Callable[..., Any]] = {
    function: _by_layer(function) for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
