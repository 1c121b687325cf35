"""Hugging Face Trainer with its optimizer's state in host memory: python scripts/examples/huggingface_trainer.py"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import offload
from offload.integrations.transformers import OffloadTrainer


def tiny_model() -> Any:
    """In place of ``AutoModelForCausalLM.from_pretrained(..., dtype=torch.float32)``."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))


def main() -> None:
    torch.manual_seed(0)
    model = tiny_model()
    masters = offload.cast_compute_weights(model, torch.bfloat16)  # Llama wants one dtype throughout
    text = torch.arange(32).repeat(16, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            weight_decay=0.1,
            max_grad_norm=1.0,  # by the optimizer, exactly
            logging_steps=2,
            save_steps=3,
            report_to=[],
        )
        trainer = OffloadTrainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in text],
            offload_options={"mode": "wavefront", "masters": masters},
        )
        trainer.train()
        print(trainer.optimizer.last_step)
        trainer.optimizer.close()


if __name__ == "__main__":
    main()
