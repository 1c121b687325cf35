"""Hugging Face Trainer with a tiny random Llama, against a plain loop over the same micro-batches."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.integrations.plain import (
    SMALL,
    assert_same_weights,
    assert_trained,
    in_steps,
    make_ids,
    plain_loop,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from offload.integrations.transformers import OffloadTrainer  # noqa: E402

EXAMPLES, BATCH, ACCUMULATION, EPOCHS = 22, 2, 4, 2
"""Eleven batches: the last step of each epoch has three."""

OPTIONS = {"mode": "wavefront", "flush_denormals": False, "config": SMALL}


def make_llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def examples() -> list[dict[str, Tensor]]:
    return [{"input_ids": ids[0], "labels": ids[0]} for ids in make_ids(EXAMPLES)]


class InOrder(OffloadTrainer):
    """Examples come in their order."""

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class StockInOrder(transformers.Trainer):
    _get_train_sampler = InOrder._get_train_sampler


def make_trainer(
    model: nn.Module,
    folder: Path,
    *,
    kind: Any = InOrder,
    offload_options: dict[str, Any] | None = None,
    optimizers: Any = (None, None),
    **arguments: Any,
) -> Any:
    arguments = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    args = transformers.TrainingArguments(str(folder), **arguments)
    more = (
        {"offload_options": {**OPTIONS, **(offload_options or {})}}
        if issubclass(kind, OffloadTrainer)
        else {}
    )
    return kind(model=model, args=args, train_dataset=examples(), optimizers=optimizers, **more)


def batches() -> list[dict[str, Tensor]]:
    ids = torch.stack([example["input_ids"] for example in examples()])
    return [{"input_ids": rows, "labels": rows} for rows in ids.split(BATCH)]


FIRST_COUNTED = int("_loss_shifts_labels" in inspect.getsource(transformers.Trainer))
"""Newer Trainers do not count the first label of a row, which nothing predicts."""


def loss(model: nn.Module, batch: dict[str, Tensor], step: Any) -> Tensor:
    """Trainer divides by the number of labels in the whole step."""
    return model(
        **batch, num_items_in_batch=sum(part["labels"][:, FIRST_COUNTED:].numel() for part in step)
    ).loss


def expected_weights(
    model: nn.Module, *, max_norm: float | None, steps: int | None = None
) -> dict[str, Tensor]:
    by_step = [step for _ in range(EPOCHS) for step in in_steps(batches(), ACCUMULATION)]
    total = len(by_step)
    return plain_loop(
        model,
        by_step[:steps],
        loss,
        decay=lambda name: 0.0 if "norm" in name else 0.1,
        max_norm=max_norm,
        schedule=lambda step: (total - step) / total,
    )


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_a_plain_loop(tmp_path: Path, dtype: torch.dtype, max_grad_norm: float) -> None:
    """Groups, clipping, accumulation with a short last step, linear schedule: equal bits."""
    model = make_llama(dtype)
    trainer = make_trainer(model, tmp_path, max_grad_norm=max_grad_norm)
    trainer.train()
    assert_same_weights(model, expected_weights(make_llama(dtype), max_norm=max_grad_norm or None))
    assert_trained(model, make_llama(dtype))
    assert (trainer.optimizer.last_step.early_tiles > 0) is (max_grad_norm == 0.0)
    trainer.optimizer.close()


def test_an_fp32_model_trains_in_bf16_with_its_own_masters(tmp_path: Path) -> None:
    model, reference = make_llama(), make_llama()
    fp32 = {name: weight.detach().clone() for name, weight in reference.named_parameters()}
    masters = offload.cast_compute_weights(model, torch.bfloat16)
    trainer = make_trainer(model, tmp_path, offload_options={"masters": masters})
    trainer.train()
    first = trainer.optimizer.state[model.lm_head.weight]["master"]
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert not torch.equal(first, first.bfloat16().float())
    torch.testing.assert_close(first, fp32["lm_head.weight"], rtol=0, atol=1e-2)
    trainer.optimizer.close()


def test_stock_trainer_differs_by_the_rounding_of_its_norm(tmp_path: Path) -> None:
    """Torch takes the norm in FP32; ours is a float64 sum. Coefficients differ by an ulp, weights by a few."""
    model, other = make_llama(), make_llama()
    ours = make_trainer(model, tmp_path)
    ours.train()
    stock = make_trainer(other, tmp_path, kind=StockInOrder, optim="adamw_torch_fused")
    stock.train()
    for (name, weight), reference in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, reference, rtol=1e-4, atol=1e-6, msg=name)
    norms = [
        [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]
        for trainer in (ours, stock)
    ]
    assert norms[0] == pytest.approx([float(norm) for norm in norms[1]], rel=1e-5)
    ours.optimizer.close()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bf16 with masters"])
def test_resume_is_bit_identical(tmp_path: Path, kind: str) -> None:
    """Saved after the second of six steps, in mid-epoch, with dropout's random numbers and a shuffled order."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32

    def prepare() -> tuple[Any, Any]:
        model = make_llama(dtype)
        options = {}
        if kind == "bf16 with masters":
            options["masters"] = offload.cast_compute_weights(model, torch.bfloat16)
        trainer = make_trainer(
            model, tmp_path, kind=OffloadTrainer, offload_options=options, save_strategy="steps", save_steps=2
        )
        return model, trainer

    model, trainer = prepare()
    trainer.train()
    state = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    trainer.optimizer.close()
    resumed_model, resumed = prepare()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == trainer.state.global_step == 6
    for (name, weight), expected in zip(resumed_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    for index, entry in resumed.optimizer.state_dict()["state"].items():
        assert entry.keys() == state[index].keys()
        assert all(torch.equal(entry[name], value) for name, value in state[index].items())
    resumed.optimizer.close()


def test_a_checkpoint_without_optimizer_state_is_not_taken_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_llama()
    trainer = make_trainer(
        model, tmp_path, save_strategy="steps", save_steps=2, save_only_model=True, max_steps=2
    )
    trainer.train()
    trainer.optimizer.close()
    again = make_trainer(make_llama(), tmp_path, max_steps=3)
    with caplog.at_level(logging.WARNING, logger="offload"):
        again.train(resume_from_checkpoint=True)
    assert "no optimizer.pt" in caplog.text
    again.optimizer.close()


def test_logs_have_the_norm_and_the_stages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(make_llama(), tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO, logger="offload"):
        trainer.train()
    assert "Trainer's own clipping is off" in caplog.text
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["offload/step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] == line["offload/grad_norm"] > 0.5 for line in lines)
    assert all(line["offload/seconds/kernel"] > 0 for line in lines)
    trainer.optimizer.close()


def test_the_norm_of_a_step_before_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As among ranks with ``overlap_forward``, where a norm is known a step later: none stands under a wrong number."""
    original = offload.AdamW.last_step.fget
    reports: dict[int, offload.StepReport] = {}

    def last_step(optimizer: offload.AdamW) -> offload.StepReport | None:
        report = original(optimizer)
        if report is not None:
            reports[report.step] = report
        return report and reports.get(report.step - 1, report)

    trainer = make_trainer(make_llama(), tmp_path, max_steps=4, max_grad_norm=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(offload.AdamW, "last_step", property(last_step))
        trainer.train()
        trainer.optimizer.close()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    norms = {step: report.grad_norm for step, report in reports.items()}
    assert len(set(norms.values())) == 4
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("grad_norm") for line in lines] == [norms[1], None, None, None]
    assert [line.get("grad_norm_before") for line in lines] == [None, norms[1], norms[2], norms[3]]
    assert [line["offload/step"] for line in lines] == [1, 1, 2, 3]


def test_an_optimizer_of_the_user_must_clip_alike(tmp_path: Path) -> None:
    model = make_llama()
    with offload.AdamW(model.named_parameters(), max_grad_norm=1.0, config=SMALL) as optimizer:
        trainer = make_trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=1)
        with pytest.raises(offload.ConfigError, match=r"max_grad_norm is 0\.5"):
            trainer.train()
        trainer = make_trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=1, max_grad_norm=1.0)
        trainer.train()
        assert optimizer.last_step.grad_norm > 0


def test_any_torch_optimizer_keeps_trainers_own_clipping(tmp_path: Path) -> None:
    """`CPUOffloadOptimizer` leaves gradients where they are."""
    models = [make_llama(), make_llama()]
    bases = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    wrapper = offload.CPUOffloadOptimizer(bases[0], mode="chunked-sync", config=SMALL)
    for model, optimizer in zip(models, (wrapper, bases[1]), strict=True):
        make_trainer(model, tmp_path, kind=StockInOrder, optimizers=(optimizer, None), max_steps=2).train()
    for weight, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(weight, expected)
    wrapper.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"optim": "sgd"}, "optim='sgd'"), ({"optim_args": "amsgrad=True"}, "optim_args='amsgrad=True'")],
)
def test_another_optimizer_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(offload.ConfigError, match=message):
        make_trainer(make_llama(), tmp_path, **arguments).train()


def test_loss_scaling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make_llama(), tmp_path)
    monkeypatch.setattr(trainer.accelerator, "scaler", torch.amp.GradScaler("cpu"))
    with pytest.raises(offload.ConfigError, match="bf16"):
        trainer.train()


def test_options_that_contradict_the_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match="set learning_rate there"):
        make_trainer(make_llama(), tmp_path, offload_options={"lr": 1.0})
