"""Reads answers and compares them: mathematics, numbers, choices, tool calls, the text after a reply's thoughts.

Imports no other file of recjax. Whatever needs a config, a task, worker processes or JAX stays in recjax.tasks.grading.
"""
