"""Odd but legal modules: whatever is rewritten in them computes what it did.

Each case is a module that a user could own, rewritten by all transforms (fp8 aside, which is approximate) and compared
with the original in fp64: two calls in evaluation, one with an odd batch, one in training with gradients. Compared are
results, exceptions, inputs written in place, attributes, buffers, weights and keys of the state dict, module-level
data, what shares memory with what, and the random numbers that come next. A case may be refused; it may not differ.

    pytest tests/soundness/test_cases.py                                       all cases
    pytest tests/soundness/test_cases.py -k hidden_writes                      one family
    pytest tests/soundness/test_cases.py -k "hidden_writes and gated"          its cases for one kind of place
    pytest "tests/soundness/test_cases.py::test_computes_what_it_did[aliases/projections.view]"       one case

A family is a file of `fixtures/soundness/cases`, a kind of place a file of `fixtures/soundness/scaffolds`: a module
with holes, each a line `<<name>>`. A case is

    == scaffold.name
    hole or field: one line (`\\n` breaks it)

    the text for the hole `body`; left out, the scaffold's own

    -- another_hole
    its text

The fields are those of `case.Case`. `inputs` is an expression over `b` (the batch), `randn`, `integers` and `torch`;
`run` one over `model`, `inputs`, `module`, `torch` and `rewritten`, where something else is done with the module than
to call it. A harmless case says `must_rewrite: <transform>, …`, so that refusing everything is seen; one that no
transform of a kind may touch says `must_not_rewrite: <transform>, …`. What fills a hole may have holes itself:
the `spelling` scaffold is a whole decoder, each class of which a case may write in another way.
"""
