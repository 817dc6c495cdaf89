"""`python -m recjax.models.smollm2`, the earlier name of `python -m recjax.hub.smollm2`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("recjax.hub.smollm2", run_name="__main__", alter_sys=True)
