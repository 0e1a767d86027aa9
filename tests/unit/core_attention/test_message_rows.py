"""Rows go into messages and out of them alike on every path, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.message import CHECKSUM_BYTES, MessageLayout, reply_layout, request_layout
from core_attention.message_rows import MessageRows, message_rows
from core_attention.message_views import message_views
from core_attention.routing import PairRoute
from core_attention.shape import AttentionShape, parse_shape

N_ROWS = 300
SHAPES = {
    "llama": parse_shape("32:8:128:bfloat16"),
    "one head": parse_shape("1:1:8:float16"),
    "mla": parse_shape("6:6:192/128:bfloat16"),
    "float32": parse_shape("4:2:16:float32"),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def make_route(q_lengths: list[int], kv_lengths: list[int]) -> PairRoute:
    """Runs of rows at random, in no order, that do not overlap among queries or among keys."""
    generator = np.random.default_rng(len(q_lengths) + 7 * len(kv_lengths))

    def begins(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        order = generator.permutation(len(lengths))
        begin, at = np.zeros(len(lengths), dtype=np.int64), 3
        for index in order:
            begin[index], at = at, at + lengths[index] + int(generator.integers(0, 4))
        assert at <= N_ROWS
        return begin

    columns = [np.array(lengths, dtype=np.int64) for lengths in (q_lengths, kv_lengths)]
    nothing = np.zeros(len(kv_lengths), dtype=np.int64)
    return PairRoute(
        rank=0,
        server=1,
        task=np.arange(len(q_lengths)),
        q_row=begins(q_lengths),
        q_length=columns[0],
        kv_document=nothing,
        kv_offset=nothing,
        kv_row=begins(kv_lengths),
        kv_length=columns[1],
    )


ROUTES = {
    "some of both": make_route([5, 40, 1, 17], [60, 1, 33]),
    "one row": make_route([1], [1]),
    "keys only": make_route([], [9, 20]),
    "queries only": make_route([30, 2], []),
    "nothing": make_route([], []),
}


def tensors(layout: MessageLayout, device: str) -> dict[str, torch.Tensor]:
    """Packed rows for every section, random bits of finite numbers."""
    generator = torch.Generator().manual_seed(1)
    return {
        section.name: torch.randn(N_ROWS, *section.shape[1:], generator=generator)
        .to(getattr(torch, section.dtype))
        .to(device)
        for section in layout.sections
    }


def as_chosen(
    request: MessageLayout, reply: MessageLayout, route: PairRoute, device: torch.device
) -> MessageRows:
    q_rows, kv_rows = (torch.from_numpy(each).to(device) for each in (route.q_rows, route.kv_rows))
    return message_rows(request, reply, q_rows, kv_rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_rows_are_packed_in_message_order_and_unpacked_in_their_places(
    device: str, phase: Phase, shape: AttentionShape, route: PairRoute
) -> None:
    request, reply = (layout(route, shape, phase) for layout in (request_layout, reply_layout))
    rows = as_chosen(request, reply, route, torch.device(device))
    inputs = tensors(request, device)
    message = torch.full((request.nbytes,), 255, dtype=torch.uint8, device=device)
    rows.pack(message, inputs)
    for name, view in message_views(message, request).items():
        at = torch.from_numpy(route.kv_rows if name in ("k", "v") else route.q_rows)
        assert torch.equal(view.cpu(), inputs[name].cpu()[at]), name
    if request.nbytes:
        assert bool((message[-CHECKSUM_BYTES:] == 255).all())
    message = torch.zeros(reply.nbytes, dtype=torch.uint8, device=device)
    sent = message_views(message, reply)
    for name, values in tensors(reply, device).items():
        sent[name].copy_(values[: len(sent[name])])
    before = tensors(reply, device)
    outputs = {name: each for name, each in before.items() if name not in ("dk", "dv")}
    gradients: dict[str, torch.Tensor] = {
        name: before[name].float() for name in ("dk", "dv") if name in before
    }
    want = {name: each.cpu().clone() for name, each in (outputs | gradients).items()}
    rows.unpack(message, outputs, gradients)
    for name, view in sent.items():
        at = torch.from_numpy(route.kv_rows if name in ("dk", "dv") else route.q_rows)
        if name in gradients:
            want[name][at] += view.cpu().float()
        else:
            want[name][at] = view.cpu()
    for name, each in (outputs | gradients).items():
        assert torch.equal(each.cpu(), want[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_no_kernel_can_read_by_address_are_packed_too(device: str) -> None:
    """A view that begins at an odd place, and one that is not contiguous."""
    shape, route = SHAPES["llama"], ROUTES["some of both"]
    request, reply = (f(route, shape, Phase.FORWARD) for f in (request_layout, reply_layout))
    inputs = tensors(request, device)
    odd = torch.empty(inputs["k"].numel() + 1, dtype=torch.bfloat16, device=device)[1:]
    odd = odd.view_as(inputs["k"]).copy_(inputs["k"])
    strided = torch.stack((inputs["v"], inputs["v"]), 1)[:, 1]
    message, other = (torch.zeros(request.nbytes, dtype=torch.uint8, device=device) for _ in "ab")
    rows = as_chosen(request, reply, route, torch.device(device))
    rows.pack(message, inputs)
    rows.pack(other, {"q": inputs["q"], "k": odd, "v": strided})
    assert torch.equal(message, other)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_between_places(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    source_rows = torch.randperm(N_ROWS, generator=generator)[:77]
    target_rows = torch.randperm(N_ROWS, generator=generator)[:77]
    copies = []
    for dim in (128, 8, 3):
        source = torch.randn(N_ROWS, 2, dim, generator=generator).to(dtype).to(device)
        copies.append((source, torch.zeros_like(source)))
    from core_attention.gpu_rows import move_rows

    move_rows(copies, source_rows.to(device), target_rows.to(device))
    for source, target in copies:
        want = torch.zeros_like(source.cpu())
        want[target_rows] = source.cpu()[source_rows]
        assert torch.equal(target.cpu(), want)
