"""A Hugging Face Transformers model trained with Accelerate: mixed bf16 and gradient accumulation."""

from __future__ import annotations

import torch
import transformers
from accelerate import Accelerator

VOCAB, LENGTH, BATCH, STEPS, PARTS = 1024, 128, 4, 4, 2


def main() -> None:
    """Train."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=PARTS)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=256, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.utils.data.TensorDataset(torch.randint(VOCAB, (BATCH * PARTS * STEPS * 64, LENGTH)))
    loader = torch.utils.data.DataLoader(data, BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch, (ids,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if batch + 1 == STEPS * PARTS:
            break


if __name__ == "__main__":
    main()
