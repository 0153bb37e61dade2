"""A model of transformers that was trained in parallel is saved as the files that `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import nn

import autopar

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gloo


def llama(tied: bool) -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=x, labels=x).loss
    return loss


def _save(rank: int, folder: str, mesh: str, tied: bool) -> None:
    plain, model = llama(tied), autopar.parallelize(llama(tied), mesh, loss_fn=_loss)
    x = torch.arange(32).view(4, 8)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        (_loss(plain, x).backward() if one is plain else model.forward_backward(x))
        optimizer.step()
    weights = model.full_state_dict()  # on every rank: the ranks put their parts together
    if rank == 0:
        model.original.save_pretrained(folder, state_dict=weights)
    dist.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(plain)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_trained_model_is_saved_whole(two: Ranks, tmp_path: Path, mesh: str, tied: bool) -> None:
    two.run(_save, str(tmp_path), mesh, tied)
