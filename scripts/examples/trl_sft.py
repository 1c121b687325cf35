"""TRL's SFTTrainer with offloaded optimizer state: pip install trl; python scripts/examples/trl_sft.py

Trains the same with SFTTrainer's own optimizer and compares the weights: the one clips by a norm in float64, the other in
float32, and all else is the same.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from offload.integrations.transformers import OffloadTrainerMixin

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class OffloadSFTTrainer(OffloadTrainerMixin, SFTTrainer):
    """The mixin goes first."""


def train(kind: Any, folder: str, **more: Any) -> Any:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(256)}, unk_token="0"))
    arguments = SFTConfig(
        folder,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-3,
        logging_steps=2,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    rows = [{"input_ids": list(range(start, start + 32))} for start in range(32)]
    trainer = kind(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **SIZES)),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2"),
        **more,
    )
    trainer.train()
    return trainer.model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ours = train(OffloadSFTTrainer, folder, offload_options={"mode": "wavefront"})
        torch.testing.assert_close(
            ours.state_dict(), train(SFTTrainer, folder).state_dict(), rtol=1e-4, atol=1e-6
        )
