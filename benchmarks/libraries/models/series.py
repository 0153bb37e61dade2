"""Time series and tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries.case import ROWS, Case, Table, sequence

NEURAL = (
    "NHITS",
    "NBEATS",
    "MLP",
    "DLinear",
    "NLinear",
    "TCN",
    "GRU",
    "LSTM",
    "TiDE",
    "PatchTST",
    "iTransformer",
    "FEDformer",
    "Autoformer",
    "Informer",
    "VanillaTransformer",
    "TFT",
    "TimesNet",
    "TSMixer",
    "BiTCN",
    "KAN",
    "DeepAR",
    "DilatedRNN",
    "RMoK",
    "SOFTS",
    "TimeMixer",
    "xLSTM",
)


def _neural(name: str) -> Case:
    from neuralforecast import models
    from neuralforecast.losses.pytorch import MAE

    many = {"n_series": 2} if name in ("iTransformer", "TSMixer", "SOFTS", "TimeMixer", "RMoK") else {}
    small: dict[str, Any] = {
        "NHITS": {"mlp_units": 3 * [[16, 16]]},
        "NBEATS": {"mlp_units": 3 * [[16, 16]]},
        "MLP": {"hidden_size": 16},
        "TCN": {"encoder_hidden_size": 8},
        "GRU": {"encoder_hidden_size": 8},
        "LSTM": {"encoder_hidden_size": 8},
        "TiDE": {"hidden_size": 16},
        "PatchTST": {"hidden_size": 16, "n_heads": 2, "linear_hidden_size": 16},
        "iTransformer": {"hidden_size": 16, "n_heads": 2},
        "TFT": {"hidden_size": 8},
        "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8},
        "FEDformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 8, "modes": 4},
        "DeepAR": {"lstm_hidden_size": 8},
        "Autoformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "Informer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "VanillaTransformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "BiTCN": {"hidden_size": 8},
    }.get(name, {})
    loss = {} if name == "DeepAR" else {"loss": MAE()}
    model = getattr(models, name)(h=8, input_size=16, **many, **small, **loss)
    width = (2,) if many else (1,)
    batch = {
        "insample_y": torch.randn(ROWS, 16, *width),
        "insample_mask": torch.ones(ROWS, 16, *width),
        "futr_exog": None,
        "hist_exog": None,
        "stat_exog": None,
    }
    if name == "DeepAR":
        batch["insample_y"], batch["insample_mask"] = torch.randn(ROWS, 24, 1), torch.ones(ROWS, 24, 1)
    return Case(_Window(model), {key: value for key, value in batch.items() if value is not None})


class _Window(nn.Module):
    """A model of neuralforecast on a window of its loader, without the exogenous columns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, insample_y: Tensor, insample_mask: Tensor) -> Any:
        none = {"futr_exog": None, "hist_exog": None, "stat_exog": None}
        return self.model({"insample_y": insample_y, "insample_mask": insample_mask, **none})


TSAI = (
    "InceptionTime",
    "ResNet",
    "FCN",
    "XceptionTime",
    "TCN",
    "LSTM_FCN",
    "TST",
    "TSTPlus",
    "OmniScaleCNN",
    "mWDN",
    "ResCNN",
    "MLP",
    "GRU",
    "gMLP",
    "XCM",
    "TSPerceiver",
    "PatchTST",
    "TSiT",
    "RNN_FCNPlus",
)


def _tsai(name: str) -> Case:
    import importlib

    from tsai.models import all as everything

    del importlib
    cls = getattr(everything, name)
    options: dict[str, Any] = {"c_in": 3, "c_out": 4, "seq_len": 32}
    if name in ("InceptionTime", "ResNet", "FCN", "XceptionTime", "TCN", "ResCNN", "GRU"):
        options.pop("seq_len")
    if name == "PatchTST":
        options = {
            "c_in": 3,
            "c_out": 3,
            "seq_len": 32,
            "pred_dim": 8,
            "patch_len": 8,
            "stride": 4,
            "d_model": 16,
            "n_heads": 2,
        }
    return Case(cls(**options), (torch.randn(ROWS, 3, 32),))


def _tabular(package: str, kind: str) -> Case:
    numbers, classes = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS, 3))
    if package == "rtdl_revisiting_models":
        import rtdl_revisiting_models as rtdl

        if kind == "mlp":
            return Case(rtdl.MLP(d_in=6, d_out=2, n_blocks=2, d_block=16, dropout=0.1), (numbers,))
        if kind == "resnet":
            return Case(
                rtdl.ResNet(
                    d_in=6,
                    d_out=2,
                    n_blocks=2,
                    d_block=16,
                    d_hidden=None,
                    d_hidden_multiplier=2.0,
                    dropout1=0.1,
                    dropout2=0.0,
                ),
                (numbers,),
            )
        options = {**rtdl.FTTransformer.get_default_kwargs(1), "d_block": 16, "attention_n_heads": 2}
        return Case(
            rtdl.FTTransformer(n_cont_features=6, cat_cardinalities=[5, 5, 5], d_out=2, **options), (numbers, classes)
        )
    if package == "tab-transformer-pytorch":
        from tab_transformer_pytorch import FTTransformer, TabTransformer

        cls = FTTransformer if kind == "ft" else TabTransformer
        return Case(
            cls(categories=(5, 5, 5), num_continuous=6, dim=16, dim_out=1, depth=1, heads=2), (classes, numbers)
        )
    if package == "rtdl_num_embeddings":
        import rtdl_num_embeddings as rtdl_num

        inner: nn.Module
        if kind == "periodic":
            inner = rtdl_num.PeriodicEmbeddings(6, 8, lite=False)
        elif kind == "linear":
            inner = rtdl_num.LinearReLUEmbeddings(6, 8)
        else:
            inner = rtdl_num.PiecewiseLinearEmbeddings(
                rtdl_num.compute_bins(torch.randn(64, 6), n_bins=4), 8, activation=False, version="B"
            )
        return Case(nn.Sequential(inner, nn.Flatten(), nn.Linear(48, 2)), (numbers,))
    if package == "tabm":
        import tabm

        return Case(
            tabm.TabM.make(n_num_features=6, cat_cardinalities=[5, 5, 5], d_out=2, k=4, d_block=16, n_blocks=2),
            (numbers, classes),
        )
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(6)
    return Case(TabNet(6, 2, n_d=4, n_a=4, n_steps=2, group_attention_matrix=groups), (numbers,))


def _tcn() -> Case:
    from pytorch_tcn import TCN

    return Case(TCN(num_inputs=4, num_channels=[8, 8], kernel_size=3), (torch.randn(ROWS, 4, 16),))


def _itransformer() -> Case:
    from iTransformer import iTransformer

    model = iTransformer(
        num_variates=4,
        lookback_len=16,
        dim=32,
        depth=1,
        heads=4,
        dim_head=8,
        pred_length=(4, 8),
        num_tokens_per_variate=1,
        use_reversible_instance_norm=True,
    )
    return Case(model, (sequence(16, 4), (sequence(4, 4), sequence(8, 4))), _itransformed)


def _itransformed(model: nn.Module, x: Tensor, targets: Any) -> Any:
    return model(x, targets=targets)


def _ncps(kind: str) -> Case:
    from ncps.torch import LTC, CfC
    from ncps.wirings import AutoNCP

    model = CfC(4, 8) if kind == "cfc" else LTC(4, AutoNCP(8, 2))
    return Case(model, (sequence(4, 4),))


TABLE: Table = {
    "neuralforecast": {name: partial(_neural, name) for name in NEURAL},
    "tsai": {name: partial(_tsai, name) for name in TSAI},
    "rtdl_revisiting_models": {
        kind: partial(_tabular, "rtdl_revisiting_models", kind) for kind in ("mlp", "resnet", "ft")
    },
    "tab-transformer-pytorch": {kind: partial(_tabular, "tab-transformer-pytorch", kind) for kind in ("tab", "ft")},
    "rtdl_num_embeddings": {
        kind: partial(_tabular, "rtdl_num_embeddings", kind) for kind in ("periodic", "linear", "piecewise")
    },
    "tabm": {"tabm": partial(_tabular, "tabm", "")},
    "pytorch-tabnet": {"tabnet": partial(_tabular, "pytorch-tabnet", "")},
    "pytorch-tcn": {"tcn": _tcn},
    "iTransformer": {"forecast": _itransformer},
    "ncps": {kind: partial(_ncps, kind) for kind in ("cfc", "ltc")},
}
