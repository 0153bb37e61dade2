"""Speech and music."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Case, Table, convolutions, sequence
from benchmarks.libraries.models.vision_more import _own

TIME = 1000


def _audio(name: str) -> Case:
    from torchaudio import models

    if name == "conformer":
        model = models.Conformer(input_dim=16, num_heads=2, ffn_dim=32, num_layers=1, depthwise_conv_kernel_size=3)
        return Case(model, (sequence(12, 16), torch.full((ROWS,), 12)))
    if name == "emformer":
        model = models.Emformer(16, 2, 32, 1, segment_length=4, right_context_length=1)
        return Case(model, (sequence(9, 16), torch.full((ROWS,), 8)))
    if name == "convtasnet":
        model = models.ConvTasNet(
            num_sources=2,
            enc_kernel_size=16,
            enc_num_feats=16,
            msk_num_feats=8,
            msk_num_hidden_feats=16,
            msk_num_layers=2,
            msk_num_stacks=2,
        )
        return Case(model, (torch.randn(ROWS, 1, TIME),))
    if name == "deepspeech":
        return Case(models.DeepSpeech(16, n_hidden=16, n_class=8), (torch.randn(ROWS, 1, 8, 16),))
    if name == "wav2letter":
        return Case(models.Wav2Letter(num_classes=8, input_type="mfcc", num_features=13), (torch.randn(ROWS, 13, 32),))
    if name == "wavernn":
        model = models.WaveRNN(
            upsample_scales=[2, 2],
            n_classes=8,
            hop_length=4,
            n_rnn=8,
            n_fc=8,
            n_res_block=1,
            n_freq=8,
            n_hidden=8,
            n_output=8,
            kernel_size=3,
        )
        return Case(model, (torch.randn(ROWS, 1, 16), torch.randn(ROWS, 1, 8, 6)))
    if name == "hdemucs":
        model = models.HDemucs(sources=["a", "b"], channels=8, nfft=256, depth=3)
        return Case(model, (torch.randn(ROWS, 2, 2048),))
    model = models.wav2vec2_model(
        "layer_norm", [(16, 10, 5), (16, 8, 4)], False, 16, 0.1, 7, 2, 1, 2, 0.1, 32, 0.1, 0.1, False, 0.0, 8
    )
    return Case(model, (torch.randn(ROWS, TIME),))


def _feature(name: str) -> Case:
    from torchaudio import transforms

    options: dict[str, Any] = {
        "MelSpectrogram": {"sample_rate": 8000, "n_fft": 128, "n_mels": 8},
        "MFCC": {"sample_rate": 8000, "n_mfcc": 4, "melkwargs": {"n_fft": 128, "n_mels": 8}},
        "Spectrogram": {"n_fft": 64},
    }[name]

    class Classified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.features = convolutions(nn.Conv1d, 1), getattr(transforms, name)(**options)

        def forward(self, x: Tensor) -> Any:
            return self.features(self.before(x))

    return Case(Classified(), (torch.randn(ROWS, 1, 512),))


def _ctc() -> Case:
    class Recognised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 6)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            scores = self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), labels.shape[1])
            return F.ctc_loss(scores, labels, *lengths)

    return Case(Recognised(), (sequence(12, 8), torch.randint(1, 6, (ROWS, 4))), _own)


ASTEROID = ("ConvTasNet", "DPRNNTasNet", "DPTNet", "LSTMTasNet", "DeMask", "SuDORMRFNet")


def _asteroid(name: str) -> Case:
    from asteroid import models

    options: dict[str, Any] = {
        "ConvTasNet": {
            "n_src": 2,
            "n_filters": 16,
            "n_blocks": 2,
            "n_repeats": 1,
            "bn_chan": 8,
            "hid_chan": 16,
            "skip_chan": 8,
        },
        "DPRNNTasNet": {
            "n_src": 2,
            "n_filters": 16,
            "bn_chan": 8,
            "hid_size": 8,
            "chunk_size": 20,
            "n_repeats": 1,
            "hop_size": 10,
        },
        "DPTNet": {"n_src": 2, "n_filters": 16, "ff_hid": 8, "chunk_size": 20, "n_repeats": 1, "n_heads": 2},
        "LSTMTasNet": {"n_src": 2, "n_filters": 16, "rnn_type": "lstm", "hid_size": 8},
        "DeMask": {"hidden_dims": (16,), "n_filters": 64, "kernel_size": 64, "stride": 32},
        "SuDORMRFNet": {"n_src": 2, "bn_chan": 8, "num_blocks": 1, "upsampling_depth": 2, "n_filters": 16},
    }[name]
    long = 4000 if name.startswith("DC") else TIME
    return Case(getattr(models, name)(**options), (torch.randn(ROWS, 1, long),))


def _asteroid_loss() -> Case:
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    model = ConvTasNet(n_src=2, n_filters=16, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8)
    return Case(model, (torch.randn(ROWS, 1, TIME), torch.randn(ROWS, 2, TIME)), partial(_separated, loss))


def _separated(loss: Any, model: nn.Module, x: Tensor, sources: Tensor) -> Any:
    return loss(model(x), sources)


def _speech(name: str) -> Case:
    if name == "ecapa":
        from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

        model = ECAPA_TDNN(
            16,
            channels=[16, 16, 16, 16, 48],
            kernel_sizes=[5, 3, 3, 3, 1],
            dilations=[1, 2, 3, 4, 1],
            attention_channels=8,
            lin_neurons=16,
            res2net_scale=4,
            se_channels=8,
        )
        return Case(model, (sequence(16, 16),))
    if name == "xvector":
        from speechbrain.lobes.models.Xvector import Xvector

        return Case(
            Xvector(device="cpu", in_channels=16, tdnn_channels=[16, 16, 16, 16, 32], lin_neurons=16),
            (sequence(20, 16),),
        )
    if name == "crdnn":
        from speechbrain.lobes.models.CRDNN import CRDNN

        model = CRDNN(
            input_shape=[None, None, 16], cnn_blocks=1, cnn_channels=(8,), rnn_layers=1, rnn_neurons=8, dnn_neurons=16
        )
        return Case(model, (sequence(16, 16),))
    if name == "conformer":
        from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
        from speechbrain.nnet.attention import RelPosEncXL

        class Encoded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.places = ConformerEncoder(1, 32, 32, 4, kernel_size=7), RelPosEncXL(32)

            def forward(self, x: Tensor) -> Any:
                return self.inner(x, pos_embs=self.places(x))[0]

        return Case(Encoded(), (sequence(12, 32),))
    if name == "transformer":
        from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

        return Case(_Firsts(TransformerEncoder(1, 4, 32, d_model=32)), (sequence(12, 32),))
    from speechbrain.nnet.RNN import LiGRU

    return Case(_Firsts(LiGRU(hidden_size=8, input_size=16)), (sequence(6, 16),))


class _Firsts(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


def _conformer() -> Case:
    from conformer import Conformer

    model = Conformer(dim=32, depth=1, dim_head=8, heads=4, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=7)
    return Case(model, (sequence(12, 32),))


def _torchlibrosa() -> Case:
    import torchlibrosa

    class Logmel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(512, 512)
            self.spectrogram = torchlibrosa.Spectrogram(n_fft=128, hop_length=32)
            self.logmel = torchlibrosa.LogmelFilterBank(sr=8000, n_fft=128, n_mels=8)

        def forward(self, x: Tensor) -> Any:
            return self.logmel(self.spectrogram(self.before(x)))

    return Case(Logmel(), (torch.randn(ROWS, 512),))


AUDIO = ("conformer", "emformer", "convtasnet", "deepspeech", "wav2letter", "wavernn", "hdemucs", "wav2vec2")

TABLE: Table = {
    "torchaudio": {
        **{name: partial(_audio, name) for name in AUDIO},
        **{name: partial(_feature, name) for name in ("MelSpectrogram", "MFCC", "Spectrogram")},
        "ctc": _ctc,
    },
    "asteroid": {**{name: partial(_asteroid, name) for name in ASTEROID}, "pit_loss": _asteroid_loss},
    "speechbrain": {name: partial(_speech, name) for name in ("ecapa", "xvector", "crdnn", "conformer", "transformer")},
    "conformer": {"block": _conformer},
    "torchlibrosa": {"logmel": _torchlibrosa},
}
