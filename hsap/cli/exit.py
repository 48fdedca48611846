"""Exit codes of every command."""

OK, NOT_OK, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Fine; a plan that is not valid, or a reader that went away; input that can't be used; Ctrl-C."""
