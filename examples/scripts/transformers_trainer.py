"""A Hugging Face Transformers model with random weights, trained by its Trainer.

``transformers_trainer.py gpt2|llama|mixtral|bert|vit [--steps N]``; needs ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset

VOCAB, LENGTH, PIXELS = 1024, 128, 64
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip


class RandomData(Dataset[Any]):
    """Random tokens, or random images."""

    def __init__(self, *, images: bool) -> None:
        self.images = images

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.images:
            return {"pixel_values": torch.randn(3, PIXELS, PIXELS), "labels": 0}
        ids = torch.randint(VOCAB, (LENGTH,))
        return {"input_ids": ids, "labels": ids}


def model_of(name: str) -> Any:
    """The model of a family, with random weights."""
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=256, n_layer=2, n_head=4)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_DECODER, num_local_experts=4))
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
        )
        return transformers.BertForMaskedLM(config)
    config = transformers.ViTConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, image_size=PIXELS
    )
    return transformers.ViTForImageClassification(config)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("gpt2", "llama", "mixtral", "bert", "vit"))
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=4, bf16=True, report_to="none",
            save_strategy="no", logging_steps=10_000, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        data = RandomData(images=options.model == "vit")
        transformers.Trainer(model=model_of(options.model), args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
