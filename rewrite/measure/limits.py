"""What bounds a decode step: bytes that one token must read, and the bandwidths of this card in this run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def bandwidths(device: str) -> dict[str, float]:
    """Bytes per second of a device copy (read and written) and of a reduction (read), over 2 GiB; best of eight."""
    import torch

    free = torch.cuda.mem_get_info(device)[0]
    count = 2**29 if free > 6 * 2**30 else 2**27
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read, copied = _fastest(source.amax), _fastest(lambda: target.copy_(source))
    size = float(source.nbytes)
    return {"read": size / read, "copy": 2 * size / copied, "bytes": size}


def card(device: str, dtype: str) -> dict[str, float]:
    """What a device does in this run: bytes it reads a second (`read`), and operations of products (`arithmetic`).

    On a GPU a product of two matrices of 8,192 x 8,192 in `dtype`, on a CPU of 1,024 x 1,024, and a sum over 64 MiB.
    """
    import torch

    gpu = device != "cpu"
    size = 8192 if gpu else 1024
    left = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    seconds = _fastest(lambda: left @ left) if gpu else _fastest_on_host(lambda: left @ left)
    arithmetic = 2.0 * size**3 / seconds
    if gpu:
        return {**bandwidths(device), "arithmetic": arithmetic}
    memory = torch.ones(2**24, dtype=torch.float32)
    return {"read": memory.nbytes / _fastest_on_host(memory.sum), "arithmetic": arithmetic}


def _fastest_on_host(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of three calls, after one."""
    import time

    times = []
    for _ in range(4):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _fastest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of eight calls, after two."""
    import torch

    best = float("inf")
    for repeat in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if repeat > 1:
            best = min(best, start.elapsed_time(stop) / 1e3)
    return best


def weight_bytes(model: Any, batch: int = 1) -> float:
    """Bytes of weights that a step of `batch` tokens must read.

    The input embedding is left out unless it is the head too. Of experts it is the expected number of different ones
    that the batch is routed to.
    """
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    skipped = set() if head is not None and head.weight is table else {id(table)}
    config = model.config.get_text_config()
    count, active = experts(config)
    total = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in skipped:
            continue
        share = 1.0
        if count and ".experts." in f"{name}.":
            share = 1 - (1 - active / count) ** batch
        total += share * parameter.numel() * parameter.element_size()
    return total


def experts(config: Any) -> tuple[int, int]:
    """How many experts a layer has, and how many a token is routed to; zeros where there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    chosen = ("num_experts_per_tok", "moe_topk", "top_k")
    count = next((int(getattr(config, n)) for n in names if getattr(config, n, None)), 0)
    active = next((int(getattr(config, n)) for n in chosen if getattr(config, n, None)), 0)
    return (count, active) if count and active else (0, 0)


def cache_bytes(config: Any, batch: int, tokens: int, element_size: int) -> int:
    """Bytes of keys and values of `tokens` tokens in every layer, windows aside."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * batch * tokens * heads * head_dim * element_size)
