"""The end of a decode step: the next token, drafts by prompt lookup, and when a row is finished."""
