"""A Hugging Face Trainer: a tiny GPT-2 that learns to go on counting, from sentences of different lengths.

    python -m yeto_torch.run --learners 2 total_steps=80 -- examples/huggingface.py

Needs transformers and accelerate; downloads nothing. An argument is the number of passes over the data; without one
the fleet decides.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from yeto_torch import YetoOuterOptimizer
from yeto_torch.integrations.huggingface import YetoCallback

WORDS, LENGTH = 32, 16  # vocabulary, of which 0 is the padding; longest sentence
learner = int(os.environ["YETO_LEARNER_ID"])
epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
out = Path(os.environ.get("YETO_RUN_DIR", "."), f"learner-{learner}")


def sentence(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """n, n + 1, n + 2, ...: 8 to 16 words, padded to 16."""
    start, count = torch.randint(8, 16, (2,), generator=generator).tolist()
    words = torch.zeros(LENGTH, dtype=torch.long)
    words[:count] = 1 + (torch.arange(count) + start) % (WORDS - 1)
    mask = (words > 0).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


generator = torch.Generator().manual_seed(learner)  # every learner has its own data
data = [sentence(generator) for _ in range(512)]

config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = YetoOuterOptimizer(optimizer, model, fragments=4)  # 1: waits for the fleet, takes over its weights

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=str(out),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=data,
    optimizers=(optimizer, None),  # 2
    callbacks=[YetoCallback(optimizer)],  # 3: ends with the fleet, counts the tokens that are not padding
)
trainer.train()
trainer.save_model(str(out))  # the final parameters

model.eval()
likely = model(torch.arange(5, 13).unsqueeze(0)).logits[0, -1].argmax().item()
print(f"final model, after 5 6 7 8 9 10 11 12 comes {likely}; {optimizer.stats.merges} broadcasts taken over")
