"""Guard: what makes a run stop rather than go wrong or hang."""
