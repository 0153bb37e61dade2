"""Networks on graphs, and equivariant ones: a batch is 12 dense graphs, or one graph whose nodes are the rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries.case import ROWS, Case, Table

NODES = 12
CONVOLUTIONS = (
    "GCNConv",
    "GATConv",
    "GATv2Conv",
    "SAGEConv",
    "GINConv",
    "GraphConv",
    "TransformerConv",
    "ChebConv",
    "TAGConv",
    "SGConv",
    "ARMAConv",
    "LEConv",
    "ClusterGCNConv",
    "GENConv",
    "FeaStConv",
    "ResGatedGraphConv",
)


class _Graph(nn.Module):
    """Two layers on one fixed graph: features of the nodes are the batch."""

    edges: Tensor

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        ends = torch.randint(0, NODES, (2, 40), generator=torch.Generator().manual_seed(1))
        self.register_buffer("edges", torch.cat([ends, ends.flip(0)], 1).unique(dim=1))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x, self.edges).relu(), self.edges)


def _geometric(name: str) -> Case:
    from torch_geometric import nn as geometric

    def layer(i: int, o: int) -> nn.Module:
        if name == "GINConv":
            return geometric.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o)))
        more = {"K": 2} if name == "ChebConv" else {}
        return getattr(geometric, name)(i, o, **more)

    return Case(_Graph(layer(8, 16), layer(16, 4)), (torch.randn(NODES, 8),))


def _dense(name: str) -> Case:
    from torch_geometric import nn as geometric

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
            self.conv = geometric.DenseGINConv(inner) if name == "DenseGINConv" else getattr(geometric, name)(8, 16)

        def forward(self, x: Tensor, near: Tensor) -> Any:
            return self.conv(x, near)

    return Case(Dense(), (torch.randn(ROWS, 6, 8), torch.randint(0, 2, (ROWS, 6, 6)).float()))


def _diff_pool() -> Case:
    from torch_geometric.nn import DenseSAGEConv, dense_diff_pool

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.assign, self.embed = DenseSAGEConv(8, 3), DenseSAGEConv(8, 16)

        def forward(self, x: Tensor, near: Tensor) -> Any:
            return dense_diff_pool(self.embed(x, near), near, self.assign(x, near))

    return Case(Pooled(), (torch.randn(ROWS, 6, 8), torch.randint(0, 2, (ROWS, 6, 6)).float()))


def _egnn(kind: str) -> Case:
    from egnn_pytorch import EGNN, EGNN_Network

    if kind == "layer":
        return Case(EGNN(dim=16), (torch.randn(ROWS, 6, 16), torch.randn(ROWS, 6, 3)))
    model = EGNN_Network(num_tokens=8, num_positions=6, dim=16, depth=1)
    return Case(model, (torch.randint(0, 8, (ROWS, 6)), torch.randn(ROWS, 6, 3)))


def _e3nn(kind: str) -> Case:
    from e3nn import nn as e3
    from e3nn import o3

    irreps = o3.Irreps("4x0e + 2x1o")
    if kind == "linear":
        return Case(o3.Linear(irreps, irreps), (torch.randn(ROWS, irreps.dim),))
    if kind == "tensor_product":
        return Case(
            o3.FullyConnectedTensorProduct(irreps, irreps, irreps),
            (torch.randn(ROWS, irreps.dim), torch.randn(ROWS, irreps.dim)),
        )
    if kind == "norm":
        return Case(
            nn.Sequential(o3.Linear(irreps, irreps), e3.NormActivation(irreps, torch.sigmoid)),
            (torch.randn(ROWS, irreps.dim),),
        )
    if kind == "harmonics":
        return Case(_Harmonics(), (torch.randn(ROWS, 3),))
    return Case(e3.FullyConnectedNet([8, 16, 4], torch.tanh), (torch.randn(ROWS, 8),))


class _Harmonics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from e3nn import o3

        self.turn = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))
        self.harmonics = o3.SphericalHarmonics("0e + 1o + 2e", normalize=True)

    def forward(self, x: Tensor) -> Any:
        return self.harmonics(self.turn(x))


TABLE: Table = {
    "torch-geometric": {
        **{name: partial(_geometric, name) for name in CONVOLUTIONS},
        **{name: partial(_dense, name) for name in ("DenseGCNConv", "DenseSAGEConv", "DenseGINConv")},
        "diff_pool": _diff_pool,
    },
    "egnn-pytorch": {kind: partial(_egnn, kind) for kind in ("layer", "network")},
    "e3nn": {kind: partial(_e3nn, kind) for kind in ("linear", "tensor_product", "norm", "harmonics", "net")},
}
