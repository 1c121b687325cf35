"""Moving tensors between device and host: pinned memory, rings of tiles, transports.

The scheduler sees the :class:`~offload.transfer.transport.Transport` protocol only. Behind it stand
the CUDA streams (``cuda``) and the fakes without a GPU (``host``).
"""
