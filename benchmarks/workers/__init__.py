"""One program a system, each run in its own environment; they share `protocol` and nothing of recjax."""
