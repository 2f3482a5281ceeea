"""Where experts lie: planned from their loads, looked up in routing, moved between steps."""
