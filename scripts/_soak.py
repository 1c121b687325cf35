"""The world of `soak.py`: a small model, an optimizer of random make, its reference, and everything that may befall them.

Whatever happens is drawn from one random generator, so a seed names a run (but for what threads do to each other).
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _reference import Recorder, Reference, hyper_by_name, memory_order, random_delays
from torch import Tensor, nn

import offload
from offload import assembly, config
from offload.transfer.host import LaneTransport

MODES = [mode for mode in config.MODES if mode != "auto"]
WIDTH = 24
TIMEOUT_S = 300.0
"""Compiling on a machine that is busy otherwise takes minutes."""


class Model(nn.Module):
    """Layers with FP32 norms, a weight used twice, a scalar, a transposed weight, an expert that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 3), nn.Tanh(), nn.Linear(2 * WIDTH + 3, WIDTH)
            )
            for _ in range(3)
        )
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shared.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH**0.5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor, *, with_expert: bool) -> Tensor:
        """`late` takes part from the beginning, whoever steps it."""
        x = self.shared(x)
        for layer in self.layers:
            x = x + self.scale * layer(x)
        if with_expert:
            x = x + torch.tanh(self.expert(x))
        return self.late(self.shared(x)).float().square().mean()


class Mishaps:
    """Failures of copies, armed for one transfer that is still to come."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def arm(self, lane: str, transfers: int) -> None:
        """The transfer after `transfers` more of `lane` fails."""
        self._left = {lane: transfers}

    def disarm(self) -> None:
        """Nothing fails any more."""
        self._left = {}

    def fail(self, lane: str, _: int) -> BaseException | None:
        """For `LaneTransport`."""
        if lane not in self._left:
            return None
        self._left[lane] -= 1
        if self._left[lane] >= 0:
            return None
        self.disarm()
        return OSError("the link is down, on purpose")


class World:
    """One model from its first step to its last, through many optimizers.

    Args:
        random_: draws everything.
        tally: counts what happened.
        kernel_cache: see `offload.OffloadConfig.kernel_cache_dir`.
    """

    def __init__(self, random_: random.Random, tally: Counter[str], kernel_cache: str | None = None) -> None:
        self._random, self._tally, self._mishaps = random_, tally, Mishaps()
        self._kernel_cache = kernel_cache
        torch.manual_seed(random_.randrange(2**31))
        self.model = Model()
        self._masters = offload.cast_compute_weights(self.model, torch.bfloat16, keep_fp32=r"\.0\.weight")
        self._named = dict(self.model.named_parameters())
        self._recorder = Recorder(self.model)
        self._reference = Reference({n: self._masters.get(n, p.detach()) for n, p in self._named.items()})
        self._has_late = False
        self._saved: tuple[bytes, dict[str, Tensor], dict[str, Any], bool] | None = None
        self._options: dict[str, Any] = {}
        self.optimizer: Any = None

    # Optimizers come and go -------------------------------------------------------------------------------------

    def renew(self) -> None:
        """A new optimizer of another make, from the checkpoint where there is one."""
        self.model.requires_grad_(True)  # an optimizer keeps no state of what is frozen when it is built
        choose = self._random.choice
        steps = choose([1, 1, 2, 3])
        mode = choose(MODES)
        self._options = {
            "mode": mode,
            "backend": "numba" if mode == "hybrid" else choose(["numba", "numba", "numba", "torch"]),
            "clip": choose(config.CLIP_POLICIES),
            "max_grad_norm": choose([None, None, 0.3, 3.0]),
            "nonfinite": choose(["propagate", "skip"]),
            "accumulation_steps": steps,
        }
        settings = offload.OffloadConfig(
            tile_numel=choose([1024, 2048, 8192]),
            ring_slots=choose([2, 3, 8]),
            backlog_tiles=choose([1, 4, 32]),
            threads=choose([1, 2]),
            timeout_s=TIMEOUT_S,
            kernel_cache_dir=self._kernel_cache,
        )
        self._tally[self._options["mode"]] += 1
        with lanes(self._random.randrange(2**31), self._mishaps):
            self.optimizer = offload.AdamW(
                self._groups(), masters=self._masters_now(), config=settings, **self._options
            )
        if self._saved is not None:
            self.optimizer.load_state_dict(torch.load(io.BytesIO(self._saved[0]), weights_only=True))

    def save(self) -> None:
        """A checkpoint, as a file would hold it."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        weights = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        self._saved = file.getvalue(), weights, self._reference.save(), self._has_late
        self._tally["checkpoints"] += 1

    def recover(self) -> None:
        """The optimizer cannot go on: back to the checkpoint, with a new one."""
        self._tally["recoveries"] += 1
        self._mishaps.disarm()
        self.optimizer.close()
        self._recorder.take()
        assert self._saved is not None
        _, weights, reference, self._has_late = self._saved
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.grad = None
                parameter.copy_(weights[name])
        self._reference.restore(reference)
        self.renew()

    def close(self) -> None:
        """Everything goes."""
        if self.optimizer is not None:
            self.optimizer.close()
        self._reference.close()

    def _groups(self) -> list[dict[str, Any]]:
        late = self._late() if self._has_late else []
        names = [name for name in self._named if not name.startswith("late")]
        groups = [
            {
                "params": [(n, self._named[n]) for n in names if ("weight" in n) is wanted],
                "weight_decay": decay,
            }
            for wanted, decay in ((True, 0.1), (False, 0.0))
        ]
        return [*groups, {"params": late}] if late else groups

    def _late(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._named.items() if name.startswith("late")]

    def _masters_now(self) -> Any:
        """Those of the cast serve the very first optimizer; afterwards they come with the checkpoint, but for `late`."""
        if self._saved is None:
            return self._masters
        late = {name for name, _ in self._late()}
        return self._masters.without(
            [p for name, p in self._named.items() if name not in late or self._has_late]
        )

    # Steps ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimizer step, with whatever befalls it."""
        self._before_step()
        event = self._random.choices(
            ["none", "drop", "interrupt", "fail", "nonfinite"], weights=[66, 6, 8, 10, 10]
        )[0]
        if event == "nonfinite" and self._options["nonfinite"] != "skip":
            event = "none"
        try:
            if event in ("drop", "interrupt"):
                self._lose_a_backward(interrupted=event == "interrupt")
            elif event == "fail":
                self._mishaps.arm(self._random.choice(["to_host", "to_device"]), self._random.randrange(12))
            self._backward_and_step(nonfinite=event == "nonfinite")
        except offload.WorkerError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._tally["failures"] += 1
            self.recover()
        finally:
            self._mishaps.disarm()

    def _before_step(self) -> None:
        draw = self._random.random
        if not self._has_late and draw() < 0.05:
            self.optimizer.add_param_group({"params": self._late(), "weight_decay": 0.02})
            self._has_late = True
            self._tally["groups added"] += 1
        if draw() < 0.05:
            layer = self._random.choice(list(self.model.layers))
            frozen = next(layer.parameters()).requires_grad
            layer.requires_grad_(not frozen)
            self._tally["frozen or unfrozen"] += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._random.choice([1e-3, 3e-3, 0.0, torch.tensor(2e-3)])
            group["betas"] = self._random.choice([(0.9, 0.95), (0.5, 0.999)])

    def _backward_and_step(self, *, nonfinite: bool) -> None:
        passes = self._options["accumulation_steps"]
        if self._random.random() < 0.2:  # otherwise than declared
            passes = self._random.choice([1, 2, 4])
            with self.optimizer.accumulate():
                for _ in range(passes - 1):
                    self._backward()
            self._backward(nonfinite=nonfinite)
        else:
            for index in range(passes):
                self._backward(nonfinite=nonfinite and index == passes - 1)
        gradients = self._known_gradients()
        self._apply()
        report = self.optimizer.last_step
        assert report.skipped is nonfinite, f"skipped={report.skipped} where nonfinite={nonfinite}"
        if nonfinite:
            self._tally["skipped"] += 1
        else:
            self._tally["clipped"] += report.clipped
            hyper = hyper_by_name(self.optimizer, self.model)
            self._reference.step(gradients, hyper, report.clip_coefficient)
        self._zero_grad()

    def _apply(self) -> None:
        """A step that did not begin is called again, as its message says."""
        try:
            self.optimizer.step()
        except offload.MidStepError:
            raise
        except offload.StateError:
            self._tally["begun again"] += 1
            self._mishaps.disarm()
            self.optimizer.step()

    def _backward(self, *, nonfinite: bool = False) -> None:
        x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
        loss = self.model.loss(x, with_expert=self._random.random() < 0.7)
        if nonfinite:
            loss = loss + self.model.scale.float() * self._random.choice([float("inf"), float("nan")])
        (loss * self._random.choice([0.1, 1.0, 10.0])).backward()

    def _lose_a_backward(self, *, interrupted: bool) -> None:
        """A backward that is dropped, or that raises half-way: taken back, or the checkpoint is loaded."""
        if interrupted:
            hook = self.model.shared.register_full_backward_hook(_raise)
            try:
                self._backward()
            except RuntimeError as error:
                if "on purpose" not in str(error):
                    raise
            finally:
                hook.remove()
        else:
            self._backward()
        self._tally["backward interrupted" if interrupted else "backward dropped"] += 1
        try:
            self._zero_grad()
            self._recorder.take()
        except offload.MidStepError:
            self.recover()

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for _, parameter in self._late():
            parameter.grad = None

    def _known_gradients(self) -> dict[str, list[Tensor]]:
        known = hyper_by_name(self.optimizer, self.model)
        return {name: parts for name, parts in self._recorder.take().items() if name in known}

    # What must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every bit of masters, moments, counts and weights.

        Raises:
            AssertionError: names the parameter.
        """
        for name in hyper_by_name(self.optimizer, self.model):
            parameter = self._named[name]
            state = self.optimizer.state[parameter]
            actual = {**state, "master": state.get("master", parameter.detach())}
            for kind, expected in self._reference.state(name).items():
                same = torch.equal(memory_order(actual[kind]).view(torch.int32), expected.view(torch.int32))
                assert same, f"{name}: {kind} differs from the reference; options {self._options}"
            assert int(state["step"]) == self._reference.num_steps(name), f"{name}: step count"
            rounded = memory_order(actual["master"]).to(parameter.dtype)
            assert torch.equal(memory_order(parameter), rounded), f"{name}: weight is not its rounded master"
        self._tally["checks"] += 1


@contextmanager
def lanes(seed: int, mishaps: Mishaps) -> Iterator[None]:
    """Optimizers built inside have copies that are asynchronous, late, and may fail."""
    before = assembly.make_transport

    def make(device: torch.device, config: offload.OffloadConfig) -> LaneTransport:
        return LaneTransport(
            device, delay=random_delays(seed, most_s=1e-3), fail=mishaps.fail, timeout_s=60.0
        )

    assembly.make_transport = make
    try:
        yield
    finally:
        assembly.make_transport = before


def _raise(*_: Any) -> None:
    raise RuntimeError("on purpose")
