"""Every environment flag of HSAP: its name and what it means."""

# Directory of this run, resolved once by the process that starts the ranks and inherited by them.
OUT = "HSAP_OUT"
# Set to 1 in ranks that HSAP itself started: such a rank never starts ranks again.
STARTED = "HSAP_STARTED"
# 1: print the full traceback of an error that would otherwise be one paragraph, and what torch's agent logs.
TRACEBACK = "HSAP_TRACEBACK"
# Where ranks that HSAP started note where they are, for the process that started them: a path of shared memory.
POSITIONS = "HSAP_POSITIONS"
# How often HSAP has restarted these ranks.
RESTARTS = "HSAP_RESTARTS"
