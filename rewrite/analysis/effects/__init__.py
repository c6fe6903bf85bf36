"""What code may do besides computing a value: the one analysis that every rule asks before it moves anything.

    effects = effects_of(module)                       # one for each `Module`, made on first use
    scope = effects.scope(method, owner)               # one for each method, made on first use

    scope.of(statement_or_expression)   -> Effect      what it binds, reads, writes, whether it leaves the block
    scope.value(expression).roots       -> roots       whose memory its value may share; none: it is a value of its own
    scope.root(local)                   -> root        equal for two locals that may share memory; `HEAP` for what code
                                                       outside the method can reach: parameters, weights, attributes
    between(scope, first, expression)   -> Effect      what runs from the start of `first` until the expression
    why_not_move(scope, moved, past)    -> str | None  None: code with the one effect is proven to compute the same
                                                       before code with the other; else what was missing, in words
                                                       for a skip's detail
    attribute(owner, name, names)       -> Attribute   everything the file assigns to `self.<name>`, and whether that
                                                       is all it can be
    why_not_plain(effects, function, owner) -> str     why a function may do something else than its text says, `""`
                                                       where nothing speaks for it: names bound again, decorators
    effects.names.means(name)           -> bool        whether a name at module level has the one meaning that its
                                                       definition gives it
    effects.names.resolved(expression)  -> str         dotted name with imports resolved, `""` if it may be another

It is conservative: an effect says `anything`, with the reason, as soon as something runs that is neither listed in
`known` nor followed in this file. `Effect.is_pure` is a proof, its opposite is not. Exceptions that torch raises by
itself are no effect: code that is moved may fail in another order, never compute something else.

What it takes for granted: operators (`+`, `[…]`) and attribute reads run no code, unless a class of the file defines
them; modules of torch have no hooks, which the runtime looks for itself; a class of transformers that a class of the
file is made from has no attribute of the name that the file assigns.
"""

from rewrite.analysis.effects import known
from rewrite.analysis.effects.analysis import Effects, effects_of
from rewrite.analysis.effects.attributes import Attribute, attribute
from rewrite.analysis.effects.effect import HEAP, Effect, Value, union
from rewrite.analysis.effects.meaning import own_names, why_not_plain, why_unsure
from rewrite.analysis.effects.name_bindings import Names
from rewrite.analysis.effects.order import before, between, why_not_move
from rewrite.analysis.effects.scope import Scope

__all__ = [
    "HEAP",
    "Attribute",
    "Effect",
    "Effects",
    "Names",
    "Scope",
    "Value",
    "attribute",
    "before",
    "between",
    "effects_of",
    "known",
    "own_names",
    "union",
    "why_not_move",
    "why_not_plain",
    "why_unsure",
]
