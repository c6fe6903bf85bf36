"""The errors this tool raises on purpose."""


class RewriteError(Exception):
    """The base of them all; the command line prints the message and exits with `exit_code`."""

    exit_code = 1


class VerificationError(RewriteError):
    """The verification could not be carried out, so nothing is known about the two files."""


class SideNotFound(VerificationError):
    """One of the two modeling files to compare is not there, or which one is meant is not clear."""

    def __init__(self, side: object, found: str) -> None:
        super().__init__(
            f"No modeling file at {str(side)!r}: {found}. "
            "Name a package folder with one modeling_*.py, a modeling_*.py file, or a dotted module name."
        )
