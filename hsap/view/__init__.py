"""Viewer: plans and runs as one page to look at, and as a trace for Perfetto.

    course    when a program's instructions ran and what ranks did meanwhile, simulated or measured
    measured  the reader of a run's `timeline-rank{r}.jsonl`
    scene     what the page shows of one plan, as typed columns
    columns   such columns as a few compressed characters
    page      the page: style, scripts and scenes in one file that needs no network
    events    the trace-event JSON that Perfetto and Chrome read
    static    the page's own scripts and style, one concern a file

Nothing here imports torch or a planner; it reads plans and timelines as everybody else does.

The drawing is ours because no plotting library draws what is asked: 100,000 boxes with culling, arrows between rows,
and one hover that lights four panels. The two panels that a library could draw, a heat map and a step curve, share the
time axis and the hover with the others, and plotly alone would make every page 4.5 MB larger.
"""

from hsap.view.course import Course
from hsap.view.events import trace_events
from hsap.view.measured import Run, read_run
from hsap.view.page import render
from hsap.view.scene import Scene

__all__ = ["Course", "Run", "Scene", "read_run", "render", "trace_events"]
