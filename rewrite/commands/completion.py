"""`rewrite completion SHELL`: the script that makes a shell complete commands, model types and transforms."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_REWRITE_COMPLETE"


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    r"""Print the completion script of SHELL; what to do with it:

    \b
    bash  eval "$(rewrite completion bash)"       in ~/.bashrc
    zsh   eval "$(rewrite completion zsh)"        in ~/.zshrc
    fish  rewrite completion fish | source        in config.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, "rewrite", VARIABLE).source())
    return 0
