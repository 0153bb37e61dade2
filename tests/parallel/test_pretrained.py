"""A model of transformers that was trained in parallel is saved as the files that `from_pretrained` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import nn

import autopar
from autopar.errors import AutoparError

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


def _alone(rank: int, folder: str, mesh: str, zero: int) -> list[str]:
    """What is said to those who leave out the weights: `save_pretrained` itself would write this rank's parts."""
    model = autopar.parallelize(llama(True), mesh, loss_fn=_loss, zero=zero)
    model.forward_backward(torch.arange(32).view(4, 8))
    said = []
    for save in (lambda: model.save_pretrained(folder), lambda: model.original.save_pretrained(folder)):
        with pytest.raises((AttributeError, AutoparError)) as caught:
            save()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("dp=2", 1)])
def test_what_to_write_is_said(two: Ranks, tmp_path: Path, mesh: str, zero: int) -> None:
    for said in two.run(_alone, str(tmp_path), mesh, zero):
        for text in said:
            assert "`model.original.save_pretrained(folder, state_dict=weights)`" in text, text
    assert not list(tmp_path.glob("*.safetensors"))


def _save(rank: int, folder: str, run: str, mesh: str, tied: bool, options: dict[str, int]) -> None:
    plain, model = llama(tied), autopar.parallelize(llama(tied), mesh, loss_fn=_loss, **options)
    x = torch.arange(32).view(4, 8)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        (_loss(plain, x).backward() if one is plain else model.forward_backward(x))
        optimizer.step()
    weights = model.full_state_dict()  # on every rank: the ranks put their parts together
    # Every rank calls it, since it writes to the configuration, which the next step reads; rank 0 alone makes files.
    model.original.save_pretrained(folder, state_dict=weights, is_main_process=rank == 0, max_shard_size="8KB")
    autopar.save(run, model, optimizer, step=1)
    files = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 1, "one file, though more than 8 KB"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is type(plain)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    again = autopar.parallelize(on_meta("class", folder), "dp=2", loss_fn=_loss, weights=folder)
    torch.testing.assert_close(again.forward_backward(x), model.forward_backward(x), rtol=1e-5, atol=0)


def _exported(run: str, folder: Path, tied: bool) -> None:
    """A checkpoint of any mesh becomes those files on one device, without its mesh: the same values, bit by bit."""
    plain: Any = llama(tied)
    autopar.load(run, plain)
    plain.save_pretrained(folder / "exported", max_shard_size="8KB")
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("pp=2", {}), ("dp=2", {"zero": 1})])
def test_a_trained_model_is_saved_whole(
    two: Ranks, tmp_path: Path, mesh: str, options: dict[str, int], tied: bool
) -> None:
    two.run(_save, str(tmp_path), str(tmp_path / "run"), mesh, tied, options)
    _exported(str(tmp_path / "run"), tmp_path, tied)


def _checkpointed(rank: int) -> None:
    """`gradient_checkpointing_enable` puts hooks into a list of the model, beside torch's tables of them.

    transformers' loss is in float32.
    """
    plain = llama(False).double()
    model = autopar.parallelize(llama(False).double(), "dp=2", loss_fn=_loss)
    x = torch.arange(32).view(4, 8)
    for one in (plain, model.original):
        one.gradient_checkpointing_enable()
    loss = _loss(plain, x)
    loss.backward()
    torch.testing.assert_close(model.forward_backward(x).detach(), loss.detach(), rtol=1e-5, atol=0)
    for name, whole in model.full_gradients().items():
        torch.testing.assert_close(whole, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_of_transformers(two: Ranks) -> None:
    two.run(_checkpointed)


FLOWS: dict[str, Any] = {
    "class": lambda config: transformers.LlamaForCausalLM(config),
    "from_config": lambda config: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
}


def on_meta(flow: str, folder: str) -> nn.Module:
    """The model of a folder without values, as users of transformers get one."""
    if flow == "device_map":
        made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="meta")
        return made
    with torch.device("meta"):
        return FLOWS[flow](transformers.AutoConfig.from_pretrained(folder))


def _from_files(rank: int, folder: str, tied: bool) -> None:
    """Each flow on another mesh: loss, weights, and the frequencies that are in no file."""
    x = torch.arange(32).view(4, 8)
    for flow, mesh, options in (
        ("class", "tp=2", {}),
        ("device_map", "fsdp=2", {"zero": 3}),
        ("from_config", "pp=2", {}),
    ):
        bare = on_meta(flow, folder)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=bare.dtype)
        assert all(tensor.device.type == "meta" for tensor in (*bare.parameters(), *bare.buffers()))
        model = autopar.parallelize(bare, mesh, loss_fn=_loss, weights=folder, **options)
        bound = {"rtol": 2e-2, "atol": 0} if plain.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(model.forward_backward(x).detach(), _loss(plain, x).detach(), **bound)
        for name, value in plain.named_buffers():
            assert torch.equal(model.get_buffer(name), value), name
        weights = model.full_state_dict()
        for name, value in plain.state_dict().items() if rank == 0 else ():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_model_on_the_meta_device_reads_those_files_by_part(two: Ranks, tmp_path: Path, tied: bool) -> None:
    llama(tied).save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    two.run(_from_files, str(tmp_path), tied)
