"""Lightning, automatic and manual optimization, against a plain loop over the same micro-batches."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from tests.integrations.plain import (
    SMALL,
    Net,
    assert_same_weights,
    assert_trained,
    in_steps,
    loss_of,
    make_ids,
    plain_loop,
)

lightning = pytest.importorskip("lightning")
from lightning.fabric.utilities.optimizer import _optimizer_to_device  # noqa: E402

from offload.integrations.lightning import OffloadMixin, OffloadMonitor  # noqa: E402

BATCHES, EPOCHS = 10, 2


class Module(OffloadMixin, lightning.LightningModule):
    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self.net = Net(seed).to(dtype)
        self.options = {"mode": "wavefront", "flush_denormals": False, "config": SMALL, **options}

    def training_step(self, ids: Tensor, index: int) -> Tensor | None:
        return loss_of(self.net, ids)

    def configure_optimizers(self) -> Any:
        return self.offload_adamw(**self.options)


class Manual(Module):
    """Steps of four batches, the last of each epoch of two, one of them dropped by hand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, ids: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        last = (index + 1) % 4 == 0 or index + 1 == BATCHES
        loss = loss_of(self.net, ids) / 4
        if last:
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with optimizer.accumulate():
                self.manual_backward(loss)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.cat(make_ids(BATCHES, rows=2)), batch_size=2)


def make_trainer(folder: Path, **arguments: Any) -> Any:
    arguments = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        **arguments,
    }
    return lightning.Trainer(
        default_root_dir=folder,
        logger=arguments.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def optimizer_of(trainer: Any) -> Any:
    return trainer.optimizers[0]


def expected_weights(
    dtype: torch.dtype, accumulation: int, max_norm: float | None, epochs: int = EPOCHS
) -> dict[str, Tensor]:
    return plain_loop(
        Net().to(dtype),
        in_steps(make_ids(BATCHES, rows=2), accumulation) * epochs,
        lambda model, ids, _: loss_of(model, ids) / accumulation,
        max_norm=max_norm,
    )


@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (4, None), (4, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_automatic_optimization_is_a_plain_loop(
    tmp_path: Path, dtype: torch.dtype, accumulation: int, max_norm: float | None
) -> None:
    module = Module(dtype)
    trainer = make_trainer(tmp_path, accumulate_grad_batches=accumulation, gradient_clip_val=max_norm)
    trainer.fit(module, loader())
    assert_same_weights(module, expected_weights(dtype, accumulation, max_norm), prefix="net.")
    assert_trained(module.net, Net().to(dtype))
    if accumulation == 1:
        assert optimizer_of(trainer).last_step.early_tiles > 0
    optimizer_of(trainer).close()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_manual_optimization_is_a_plain_loop(tmp_path: Path, max_norm: float | None) -> None:
    module = Manual(max_grad_norm=max_norm)
    trainer = make_trainer(tmp_path)
    trainer.fit(module, loader())
    assert_same_weights(module, expected_weights(torch.float32, 4, max_norm), prefix="net.")
    wrapper = module.optimizers()
    assert wrapper.last_step.step == 3 * EPOCHS
    wrapper.close()
    assert optimizer_of(trainer).closed
    with pytest.raises(offload.ClosedError):
        optimizer_of(trainer).step()


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    straight = Module(torch.bfloat16)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(straight, loader())
    state = copy.deepcopy(optimizer_of(trainer).state_dict()["state"])
    optimizer_of(trainer).close()

    first = Module(torch.bfloat16)
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    optimizer_of(trainer).close()
    resumed = Module(torch.bfloat16, seed=1)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    for weight, expected in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(weight, expected)
    for index, entry in optimizer_of(trainer).state_dict()["state"].items():
        assert all(torch.equal(entry[name], value) for name, value in state[index].items())
    optimizer_of(trainer).close()


def test_state_that_lightning_moves_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning assigns every entry a copy on the root device before it trains, and after it loads."""
    model = Net()
    with offload.AdamW(model.named_parameters(), mode="wavefront", config=SMALL) as optimizer:
        before = {p: dict(entry) for p, entry in optimizer.state.items()}
        with caplog.at_level(logging.WARNING, logger="offload"):
            _optimizer_to_device(optimizer, torch.device("meta"))
        for parameter, entry in optimizer.state.items():
            assert all(entry[name] is tensor for name, tensor in before[parameter].items())
        assert caplog.text.count("moves optimizer state to meta") == 1
        entry = optimizer.state[model.head.weight]
        with pytest.raises(offload.StateError, match="copy_"):
            entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        with pytest.raises(offload.StateError, match="copy_"):
            del entry["exp_avg"]


@pytest.mark.gpu
def test_fit_on_a_gpu_keeps_state_on_the_host(tmp_path: Path) -> None:
    module = Module(torch.bfloat16)
    trainer = make_trainer(tmp_path, accelerator="gpu", max_epochs=1)
    trainer.fit(module, loader())
    optimizer = optimizer_of(trainer)
    tensors = [value for entry in optimizer.state.values() for value in entry.values()]
    assert tensors
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    optimizer.close()


def test_a_batch_that_training_step_skips_is_skipped(tmp_path: Path) -> None:
    class Skipping(Module):
        def training_step(self, ids: Tensor, index: int) -> Tensor | None:
            return super().training_step(ids, index) if index != 3 else None

    module = Skipping()
    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, loader())
    kept = [ids for index, ids in enumerate(make_ids(BATCHES, rows=2)) if index != 3]
    expected = plain_loop(Net(), in_steps(kept, 1), lambda model, ids, _: loss_of(model, ids))
    assert_same_weights(module, expected, prefix="net.")
    optimizer_of(trainer).close()


def test_the_monitor_logs_each_step_once(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    trainer = make_trainer(
        tmp_path, accumulate_grad_batches=4, max_epochs=1, logger=logger, callbacks=[OffloadMonitor()]
    )
    trainer.fit(Module(), loader())
    logged = [row for row in logger.experiment.metrics if "offload/grad_norm" in row] or _rows(logger)
    assert [float(row["offload/step"]) for row in logged] == [1, 2, 3]
    assert all(float(row["offload/seconds/kernel"]) > 0 for row in logged)
    optimizer_of(trainer).close()


def _rows(logger: Any) -> list[dict[str, str]]:
    import csv

    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("offload/step")]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}, "algorithm='value'"),
        ({}, {"max_grad_norm": 1.0}, "gradient_clip_val"),
        ({}, {"accumulation_steps": 2}, "accumulate_grad_batches"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(offload.ConfigError, match=message):
        make_trainer(tmp_path, **arguments).fit(Module(**options), loader())


def test_an_optimizer_that_does_not_clip_alike_is_refused(tmp_path: Path) -> None:
    class ByHand(Module):
        def configure_optimizers(self) -> Any:
            self.optimizer = offload.AdamW(self.named_parameters(), **self.options)
            return self.optimizer

    module = ByHand()
    with pytest.raises(offload.ConfigError, match=r"gradient_clip_val is 0\.5"):
        make_trainer(tmp_path, gradient_clip_val=0.5).fit(module, loader())
    module.optimizer.close()


def test_without_the_mixin_lightnings_clipping_raises(tmp_path: Path) -> None:
    class Bare(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            return loss_of(self.net, ids)

        def configure_optimizers(self) -> Any:
            self.optimizer = offload.AdamW(self.named_parameters(), config=SMALL)
            return self.optimizer

    module = Bare()
    with pytest.raises(offload.GradientError, match="max_grad_norm="):
        make_trainer(tmp_path, gradient_clip_val=0.5).fit(module, loader())
    module.optimizer.close()
