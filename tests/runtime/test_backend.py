"""Which form of an operator runs."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_rewrite_runtime.core import backend


def test_plain_operators_are_a_matter_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, elsewhere = torch.zeros(1), []

    def asked() -> None:
        with pytest.raises(backend.BackendUnavailable):
            backend.uses_triton(tensor)
        elsewhere.append(True)

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with backend.use_backend("triton"), backend.plainly():
        assert not backend.uses_triton(tensor)
        thread = threading.Thread(target=asked)
        thread.start()
        thread.join()
    assert elsewhere == [True]
