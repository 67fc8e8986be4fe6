"""Stands in for `nixl`, the package that finds NIXL's build for this machine's CUDA; it names the one that is there, `nixl_cu12`.

NIXL's progress thread is left out, which would spin on a core of its own in each engine: an engine with transfers under way polls anyway.
"""
