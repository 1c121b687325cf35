"""TRL's SFTTrainer with a tiny random Llama, against a plain loop over the same micro-batches. TRL is not in CI."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from offload.integrations.transformers import OffloadTrainerMixin  # noqa: E402
from tests.integrations.plain import assert_same_weights, assert_trained, in_steps, plain_loop  # noqa: E402
from tests.integrations.test_transformers import (  # noqa: E402
    ACCUMULATION,
    BATCH,
    FIRST_COUNTED,
    OPTIONS,
    batches,
    examples,
    make_llama,
)

STEPS = 5


class OffloadSFTTrainer(OffloadTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
    """As docs/integrations.md has it, with examples in their order."""

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """SFTTrainer's own never holds all logits, and adds them in another order."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def loss(model: nn.Module, batch: dict[str, Tensor], step: Any) -> Tensor:
    """Divided by the number of labels in the whole step."""
    number = sum(part["labels"][:, FIRST_COUNTED:].numel() for part in step)
    return loss_of(model(batch["input_ids"]), batch["labels"], number)


def make_trainer(model: Any, folder: Path, mode: str, max_norm: float) -> Any:
    words = tokenizers.models.WordLevel({str(n): n for n in range(128)}, unk_token="0")
    args = trl.SFTConfig(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=max_norm,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    rows = [{"input_ids": example["input_ids"].tolist()} for example in examples()]
    return OffloadSFTTrainer(
        model=model,
        args=args,
        compute_loss_func=loss_of,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(words), eos_token="1", pad_token="2"
        ),
        offload_options={**OPTIONS, "mode": mode},
    )


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["wavefront", "hybrid"])
def test_final_weights_are_those_of_a_plain_loop(mode: str, max_norm: float, tmp_path: Path) -> None:
    """Bit for bit; a rate that falls to zero, accumulation, a short last step, and clipping."""
    model = make_llama()
    initial, plain = copy.deepcopy(model), copy.deepcopy(model)
    trainer = make_trainer(model, tmp_path, mode, max_norm)
    decayed = set(trainer.get_decay_parameter_names(model))
    trainer.train()
    assert trainer.optimizer.optimizer.plan.mode == mode
    trainer.optimizer.optimizer.close()
    by_step = [step for _ in range(2) for step in in_steps(batches(), ACCUMULATION)]
    expected = plain_loop(
        plain,
        by_step[:STEPS],
        loss,
        decay=lambda name: 0.1 if name in decayed else 0.0,
        max_norm=max_norm or None,
        schedule=lambda step: 1 - step / STEPS,
    )
    assert_same_weights(model, expected)
    assert_trained(model, initial)
