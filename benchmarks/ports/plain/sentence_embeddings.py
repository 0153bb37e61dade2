"""Train sentence embeddings: pairs of texts, the other rows as negatives, similarities of held-out pairs."""

import tempfile
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast, get_linear_schedule_with_warmup

WORDS = [
    "a",
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "sun",
    "rain",
    "red",
    "blue",
    "big",
    "small",
]


def backbone():
    folder = tempfile.mkdtemp()
    Path(folder, "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
    config = BertConfig(vocab_size=5 + len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def pairs(count, start):
    text = [[WORDS[(start + i * step) % len(WORDS)] for step in range(1, 6)] for i in range(count)]
    return [(" ".join(words), " ".join(words[::-1])) for words in text]


def main():
    torch.manual_seed(0)
    transformer = Transformer(backbone())
    model = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu").to(torch.get_default_dtype())
    train_loss = MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
    rows, log = pairs(16, 0), []
    for start in range(0, 16, 4):
        batch = rows[start : start + 4]
        model.train()
        features = [model.tokenize(list(texts)) for texts in zip(*batch, strict=True)]
        loss = train_loss(features, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        log.append(loss.item())
    left, right = (model.encode(list(texts), convert_to_tensor=True) for texts in zip(*pairs(5, 3), strict=True))
    log += model.similarity_pairwise(left, right).tolist()
    torch.save(model.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
