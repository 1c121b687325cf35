"""A training loop under Accelerate, with accumulation and clipping: python scripts/examples/accelerate_loop.py"""

from __future__ import annotations

import torch
from accelerate import Accelerator

import offload
from offload.integrations.accelerate import take_over

STEPS, ACCUMULATION = 8, 2


def main() -> None:
    torch.manual_seed(0)
    accelerator = take_over(Accelerator(gradient_accumulation_steps=ACCUMULATION))

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    masters = offload.cast_compute_weights(model, torch.bfloat16)
    model = accelerator.prepare(model)  # on its device before the optimizer sees it
    optimizer = offload.AdamW(
        model.named_parameters(), masters=masters, lr=1e-2, mode="wavefront", max_grad_norm=1.0
    )
    x = torch.randn(4 * STEPS * ACCUMULATION, 64)
    data = torch.utils.data.TensorDataset(x, x.square().mean(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    optimizer, loader = accelerator.prepare(optimizer, loader)

    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)  # checked; the optimizer does it
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            print(f"loss {loss.item():.4f}, {optimizer.last_step}")
    optimizer.close()


if __name__ == "__main__":
    main()
