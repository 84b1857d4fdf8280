"""Exit codes of the program."""

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
