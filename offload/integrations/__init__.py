"""Ways into training frameworks. Nothing here is imported unless asked for, and each module needs its own library.

========================================  ======================================  =========================
module                                    for                                     installed by
========================================  ======================================  =========================
``offload.integrations.accelerate``       ``accelerate.Accelerator``              ``offload[hf]``
``offload.integrations.transformers``     Hugging Face ``Trainer``, TRL           ``offload[hf]``
``offload.integrations.lightning``        Lightning                               ``offload[lightning]``
========================================  ======================================  =========================

What a framework would do wrong with gradients that have left for the host (its own clipping, most of all) is taken
over or refused, never let through; docs/integrations.md says which.
"""
