"""Where a caller's own code raises in `generate()`, cache and generator are left as transformers leaves them."""

from __future__ import annotations

import pytest
import torch
from test_generation import pair, prompt, state
from test_replayed_loop import Raises
from transformers import DynamicCache

from hf_rewrite_runtime.cache.cache_argument import passed_on
from hf_rewrite_runtime.generate import call_graphs


class Ends:
    """A streamer that raises at some token: what a client does that has gone, or a key that was pressed."""

    def __init__(self, at, error=KeyError):
        self.left, self.error = at, error

    def put(self, value):
        if self.left == 0:
            raise self.error("of the caller's")
        self.left -= 1

    def end(self):
        pass


def interrupted(model, error, **arguments):
    cache = DynamicCache()
    torch.manual_seed(5)
    with pytest.raises(error, match="of the caller's"):
        model.generate(**prompt(1), **{passed_on(): cache}, max_new_tokens=24, pad_token_id=0, **arguments)
    return cache, state()


def assert_left_alike(name, make, error=KeyError, **settings):
    ours, theirs = (interrupted(model, error, **{name: make()}, **settings) for model in pair())
    assert torch.equal(ours[1], theirs[1])
    assert ours[0].get_seq_length() == theirs[0].get_seq_length() > 8
    for mine, other in zip(ours[0].layers, theirs[0].layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_streamer_that_raises(at, settings):
    assert_left_alike("streamer", lambda: Ends(at), **settings)


def test_a_key_that_is_pressed():
    assert_left_alike("streamer", lambda: Ends(5, KeyboardInterrupt), error=KeyboardInterrupt, do_sample=False)


def test_behind_a_cache_that_has_grown(monkeypatch):
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 3)
    monkeypatch.setattr("hf_rewrite_runtime.decode.graph_cache.ROUNDING", 8)
    assert_left_alike("streamer", lambda: Ends(20), do_sample=False)


def test_a_processor_that_raises():
    assert_left_alike("logits_processor", lambda: [Raises()], do_sample=False)
