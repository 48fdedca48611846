"""One rank of a check: `python -m hsap.checks WHAT OPTIONS [overrides]`, started by `hsap.checks.launch`."""

import sys

from hsap.checks.launch import rank_main

if __name__ == "__main__":
    rank_main(sys.argv[1:])
