"""Loading and saving checkpoints exactly as the original class does."""

from __future__ import annotations

OFFERS: dict[str, dict[str, str]] = {
    "NativeCheckpoint": {},
}


class NativeCheckpoint:
    """Base of rewritten `PreTrainedModel` classes.

    transformers converts a checkpoint's layout (stacked experts, renamed keys) only for classes that it takes for its
    own, those whose module lies in `transformers`; a copied class would load other tensors than the original without
    an error. This says that the class is the original's, layout for layout.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: checkpoints are laid out as the original's."""
        return False
