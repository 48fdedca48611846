"""`python -m hsap.cli`: the command line where the script `hsap` is not installed."""

import sys

from hsap.cli import main

sys.exit(main())
