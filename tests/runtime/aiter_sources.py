"""aiter's own unified attention, out of a checkout of its sources, called by the adapter: `aiter_sources.py CHECKOUT`.

The kernel is Triton: it runs under the interpreter on a CPU (`TRITON_INTERPRET=1`), and on an NVIDIA GPU. What its
package does besides, at import, needs ROCm: two files are taken, and what they ask of the machine is answered here.
Prints a JSON list of the largest error over the reference's own, by case.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ANSWERS = {
    "utils/device_info.py": "def get_num_sms():\n    return 304\n",
    "utils/_triton/arch_info.py": "def get_arch():\n    return 'gfx942'\n",
    "utils/_triton/kernel_repr.py": "def make_kernel_repr(name, keys):\n    return lambda specialization: name\n",
    "utils/types.py": "import torch\n\ne4m3_dtype = torch.float8_e4m3fnuz\n",
    "_triton_kernels/flash_attn_triton_amd/utils.py": (
        "from types import SimpleNamespace\n\n\ndef get_arch():\n"
        "    return SimpleNamespace(name='gfx942', is_rdna=False)\n"
    ),
}
MARKERS = ("jit/core.py", "ops/mha.py", "ops/rmsnorm.py")
# rows, query heads, key/value heads, slots, head_dim, window, bound of the scores, sinks
CASES: list[tuple[int, int, int, int, int, int | None, float | None, bool]] = [
    (1, 8, 2, 256, 64, None, None, False),
    (3, 8, 2, 256, 64, None, None, False),
    (2, 4, 4, 1024, 32, None, None, False),
    (2, 8, 2, 256, 64, 100, None, False),
    (3, 8, 2, 768, 64, None, 30.0, True),
    (1, 32, 2, 256, 16, None, None, True),
]
ON_GPU: list[tuple[int, int, int, int, int, int | None, float | None, bool]] = [
    (1, 32, 8, 8192, 128, None, None, False),
    (8, 32, 8, 2048, 128, None, None, False),
    (8, 64, 8, 1024, 64, 128, None, True),
    (4, 16, 8, 2048, 256, None, 50.0, False),
]


class Launched:
    """A kernel of aiter's, launched without the options that only AMD's GPUs take."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **given: Any) -> Any:
            if "waves_per_eu" not in self.kernel.arg_names:
                given.pop("waves_per_eu", None)
            return self.kernel[grid](*args, **given)

        return launch


def package(checkout: Path, folder: Path) -> str:
    """Write the part of aiter that is wanted; return its module."""
    triton = checkout / "aiter/ops/triton"
    inside = "attention/" if (triton / "attention/unified_attention.py").is_file() else ""
    texts = {f"aiter/{name}": "" for name in MARKERS} | {
        "aiter/dtypes.py": "import torch\n\nfp8 = torch.float8_e4m3fnuz\n"
    }
    texts |= {f"aiter/ops/triton/{name}": text for name, text in ANSWERS.items()}
    for name in (f"{inside}unified_attention.py", f"_triton_kernels/{inside}unified_attention.py"):
        texts[f"aiter/ops/triton/{name}"] = (triton / name).read_text()
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    return f"aiter.ops.triton.{inside.replace('/', '.')}unified_attention"


def measured(call: Any, device: torch.device) -> float | None:
    """µs of a call in a graph of ten, on a GPU: a hint, on a card that the kernel's sizes were not chosen for."""
    if device.type == "cpu":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e5)
    return sorted(times)[10]


def main(checkout: Path) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp())
    module = package(checkout, folder)
    sys.path.insert(0, str(folder))
    from hf_rewrite_runtime.aiter import aiter_calls, unified
    from hf_rewrite_runtime.attention import decode_attention
    from hf_rewrite_runtime.core import aiter_probe, backend

    aiter_probe.chip = lambda device=None: "gfx942"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = __import__(module, fromlist=["unified_attention"])
    for name in ("kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments"):
        setattr(loaded, name, Launched(getattr(loaded, name)))
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    found = []
    for rows, heads, kv_heads, slots, dim, window, softcap, sinks in CASES + ON_GPU * (device.type == "cuda"):
        torch.manual_seed(0)
        cases = SimpleNamespace(rows=rows, heads=heads, kv_heads=kv_heads, slots=slots, dim=dim)
        logits = torch.randn(heads, device=device, dtype=dtype) if sinks else None
        rule = decode_attention.ScoreRule(dim**-0.5, window, softcap, logits)
        k, v = (unified.allocate((rows, kv_heads, slots, dim), dtype, device) for _ in range(2))
        last = slots // 2 + 3
        for cache in (k, v):
            cache[:, :, : last + 1] = torch.randn(rows, kv_heads, last + 1, dim, device=device, dtype=dtype)
            cache[:, :, last + 1 :] = 64.0
        query = torch.randn(rows, heads, 1, dim, device=device, dtype=dtype)
        position, starts = torch.tensor([last], device=device), torch.arange(rows, device=device) * 5
        reference = functools.partial(decode_attention._reference, rule=rule)

        def call(given: Any = (query, k, v, position, starts), rule: Any = rule, reference: Any = reference) -> Any:
            return unified.unified_attention(*given, rule, reference)

        with backend.use_backend("aiter"):
            got = call()
            microseconds = measured(call, device) if got is not None else None
        exact = reference(*(x.double() for x in (query, k, v)), position, starts)
        own = (reference(query, k, v, position, starts).double() - exact).abs().max().item()
        error = None if got is None else (got.double() - exact).abs().max().item() / own
        line = vars(cases) | {"window": window, "softcap": softcap, "sinks": sinks, "error": error, "us": microseconds}
        if got is None:
            line["why"] = [str(reason) for reason in aiter_calls.states().values()] + [
                str(key) for key in backend.fallbacks()
            ]
        if device.type == "cuda":
            arrived = torch.zeros(4096, dtype=torch.int32, device=device)
            split = decode_attention.choose(rows, heads, kv_heads, slots, dim)
            line["ours_us"] = measured(
                lambda given=(query, k, v, position, starts, arrived, rule, split): decode_attention.launch(*given),
                device,
            )
        found.append(line)
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
