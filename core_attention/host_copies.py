"""Copies between the host and a GPU, made without holding CUDA's lock.

``tensor.cpu()`` and ``tensor.tolist()`` copy into pageable memory. Until the stream has come to
such a copy, no other thread of the process can launch a kernel: CUDA holds a lock. A stream that
waits for another rank, in a collective or a receive, may wait for this process's own server, and
then nobody goes on. Copies into pinned memory hold no lock. (PyTorch's ``item()`` is one.)
"""

from __future__ import annotations

import torch


class HostCopy:
    """A tensor on its way to the host, while the thread goes on.

    Args:
        tensor: of any shape; on a GPU it is copied behind what the current stream has.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor.detach()
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    @property
    def is_done(self) -> bool:
        """Returns whether :meth:`wait` returns at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> torch.Tensor:
        """The values, on the CPU; the tensor itself if it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """As ``tensor.detach().cpu()``; other threads can launch kernels meanwhile."""
    return HostCopy(tensor).wait()


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, of the CPU, on ``device``; nobody waits for what the device does."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
