"""`rewrite completion SHELL`: the script that makes a shell complete commands, model types and transforms."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rewrite.options.shared_options import Command, common_options

VARIABLE = "_REWRITE_COMPLETE"


@click.command(
    cls=Command,
    short_help="Print the completion script of a shell.",
    examples=("rewrite completion bash >> ~/.bashrc",),
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@common_options
@click.pass_context
def completion(ctx: click.Context, shell: str, quiet: bool) -> int:
    """Print the script that makes SHELL complete commands, options, model types and transforms.

    To install it, run once, then open a new shell:

    \b
    bash  rewrite completion bash >> ~/.bashrc
    zsh   rewrite completion zsh >> ~/.zshrc
    fish  rewrite completion fish > ~/.config/fish/completions/rewrite.fish

    In ~/.zshrc `autoload -Uz compinit; compinit` has to stand before it; bash has to be 4.4 or newer. The script asks
    `rewrite` for the words, so it need not be made anew after an upgrade.
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "rewrite", VARIABLE).source())
    return 0
