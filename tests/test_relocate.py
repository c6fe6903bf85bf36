"""A modeling file that moved computes, loads and reads as before."""

import hashlib
from pathlib import Path

import pytest

from rewrite.codemod.relocate import is_rewritten, relocate
from rewrite.source.resolve import Source

TEXT = '''\
#                🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨
#           This file was automatically generated: do not edit it.
#                🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨🚨
# Copyright 2026 Somebody.
#
# Licensed under a licence.
"""Docstring."""
from ... import initialization as init
from ...modeling_utils import PreTrainedModel  # base
from ..auto import AutoModel
from ..other.modeling_other import OtherPreTrainedModel
from .configuration_toy import (
    ToyConfig,  # the config
)


class ToyPreTrainedModel(PreTrainedModel):
    config: ToyConfig


class ToyModel(ToyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.inner = AutoModel.from_config(config.inner, attn_implementation="eager")
        if config.late:
            from .helpers_toy import late


class Toy(OtherPreTrainedModel):
    pass
'''


def source(text, module="transformers.models.toy.modeling_toy"):
    return Source(
        "toy", Path("modeling_toy.py"), text, hashlib.sha256(text.encode()).hexdigest(), module, "toy", "5.9"
    )


def test_imports_classes_and_sub_models():
    moved = relocate(source(TEXT))
    assert moved.uses == ("OriginalCheckpoint", "from_config")
    body = moved.text.split('"""Docstring."""\n')[1]
    assert body == TEXT.split('"""Docstring."""\n')[1].replace("from ... import", "from transformers import").replace(
        "from ...modeling_utils", "from transformers.modeling_utils"
    ).replace("from ..auto", "from transformers.models.auto").replace(
        "from ..other.modeling_other", "from transformers.models.other.modeling_other"
    ).replace("from .", "from transformers.models.toy.").replace(
        "(PreTrainedModel):", "(OriginalCheckpoint, PreTrainedModel):"
    ).replace("(OtherPreTrainedModel):", "(OriginalCheckpoint, OtherPreTrainedModel):").replace(
        'AutoModel.from_config(config.inner, attn_implementation="eager")',
        'from_config(AutoModel, config.inner, attn_implementation="eager", module=__name__)',
    )


def test_header_names_the_origin_keeps_the_licence_and_drops_the_banner():
    moved = relocate(source(TEXT)).text
    head = moved.split('"""Docstring."""')[0]
    assert head.splitlines()[0].endswith("from transformers 5.9, models/toy/modeling_toy.py")
    assert hashlib.sha256(TEXT.encode()).hexdigest() in head
    assert "# Copyright 2026 Somebody.\n#\n# Licensed under a licence.\n" in head
    assert "🚨" not in moved
    assert is_rewritten(moved)
    assert not is_rewritten(TEXT)


def test_a_file_from_elsewhere_keeps_its_classes_and_its_neighbours():
    text = "from transformers import PreTrainedModel\n\n\nclass Toy(PreTrainedModel):\n    pass\n"
    assert relocate(source(text, None)).text.endswith(text)
    beside = "from .configuration_toy import ToyConfig\n"
    assert relocate(source(beside, None)).text.endswith(beside)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_newlines_stay(newline):
    text = TEXT.replace("\n", newline)
    moved = relocate(source(text)).text
    assert moved.count("\n") == moved.count(newline)
