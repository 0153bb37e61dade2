"""Arguments for one call of every semantic op."""

from __future__ import annotations

import torch

from autopar.runtime.attention.attention_compared import compared_attention
from autopar.runtime.attention.attention_dropout import dropped_attention
from autopar.runtime.attention.attention_whole import attention

# of a recurrent network: h = tanh(h w + x)
STEP = (
    'v0 = autopar.einsum.default(h0, w0, "ab,bc->ac"); v1 = aten.add.Tensor(v0, x0); v2 = aten.tanh.default(v1); '
    "rows = [v2, v1]; states = [v2]"
)


def semantic_examples() -> dict[str, tuple[object, ...]]:
    """By the name of the op; small, in float32."""
    q, index = torch.randn(2, 4, 6, 8), torch.randint(0, 8, (2, 4, 6))
    out, lse = attention(q, q, q, None, True, 0.4)
    seed, drawn = torch.tensor([1, 2]), (3, 0.5, [2, 4, 6, 6], [2, 4, 6, 6], [0, 0, 0, 0])
    dropped, dropped_lse = dropped_attention(q, q, q, None, seed, True, 0.4, *drawn)
    pads, places = (torch.rand(2, 1, 6) < 0.7).index_fill_(2, torch.tensor([0]), True), torch.arange(6).view(1, 1, 6)
    compared = [places - 3], [places, pads]
    seen, seen_lse = compared_attention(q, q, q, *compared, "c0>r0 & c1", True, 0.4)
    speech = torch.randn(6, 3, 5).log_softmax(-1)
    ctc = (torch.randint(1, 5, (3, 2)), torch.tensor([6, 5, 4]), torch.tensor([2, 1, 2]), 0)
    x, w, window = torch.randn(2, 4, 12), torch.randn(6, 2, 3), ([2], [1], [2], [1], 2)
    return {
        "einsum": (torch.randn(2, 3), torch.randn(4, 3), "ab,cb->ac"),
        "attention": (q, q, q, None, True, 0.4),
        "attention_backward": (out, q, q, q, None, out, lse, True, 0.4),
        "compared_attention": (q, q, q, *compared, "c0>r0 & c1", True, 0.4),
        "compared_attention_backward": (out, q, q, q, *compared, seen, seen_lse, "c0>r0 & c1", True, 0.4),
        "checked_causal": (places, [places], [places], "c0<r0"),
        "dropped_attention": (q, q, q, None, seed, True, 0.4, *drawn),
        "dropped_attention_backward": (out, q, q, q, None, dropped, dropped_lse, seed, True, 0.4, *drawn),
        "rms_norm": (q, torch.randn(6, 8), 1e-5),
        "rms_norm_backward": (torch.randn_like(q), q, torch.randn(8), torch.rand(2, 4, 6, 1)),
        "logsumexp": (q,),
        "checked_index": (index, 8, None),
        "checked_values": (lse, -100.0, 100.0, "a reader"),
        "pick": (q, index),
        "pick_backward": (lse, index, 8),
        "cross_entropy_backward": (lse, q, lse, index, lse),
        "embedding": (torch.randn(8, 3), index),
        "embedding_backward": (torch.randn(2, 4, 6, 3), index, 8, -1),
        "expert_mm": (torch.randn(6, 3), torch.randn(8, 3, 2), index[0, 0]),
        "expert_mm_backward": (torch.randn(6, 3), torch.randn(6, 2), index[0, 0], 8),
        "ctc_loss": (speech, *ctc),
        "ctc_loss_backward": (torch.randn(3), speech, *ctc, False),
        "index_of_rows": (q, [None, None, index[:, :, 0] % 6], [-2, -1, 0]),
        "index_put_of_rows": (q, [None, index[:, 0] % 4], [-2, 0], torch.randn(2, 6, 6, 8), True),
        "dropout": (q, torch.tensor([1, 2]), 3, 0.5, [2, 4, 6, 8], [2, 4, 6, 8], [0, 0, 0, 0]),
        "dropout_of_rows": (
            torch.randn(6, 3),
            torch.tensor([1, 2]),
            3,
            2,
            0.5,
            torch.arange(6).flip(0),
            index[0, 0],
            [9, 3],
            [3],
            [0],
        ),
        "convolution": (x, w, *window),
        "convolution_input_backward": (torch.randn(2, 6, 7), w, [12], *window),
        "convolution_weight_backward": (torch.randn(2, 6, 7), x, [3], *window),
        "pad_rows": (x, 2, 1, -1),
        "running_sum": (x, 2, True),
        "chain": ([q[0, 0]], [torch.randn(5, 6, 8)], [torch.randn(8, 8)], STEP, True),
        "linear_scan": (torch.rand(2, 4, 12), x, torch.randn(2, 4, 1), 2, True),
        "in_groups": (x, False, torch.randn(1, 2, 1, 4, 12)),
        "in_microbatches": (x, 2),
        "running_average": (torch.rand(5), torch.randn(1, 1, 1, 5, 1), torch.tensor(7), 0.1),
        "random": (torch.tensor([1, 2]), 3, "normal", [2, 3], torch.float32, [2, 3], [2, 3], [0, 0]),
    }
