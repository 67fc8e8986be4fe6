"""Stands in for `sgl-kernel`, of which there is no CPU wheel. Outside SGLang, which stays as it is.

What is merely imported resolves to a function that raises when called. The three operators that a dense model uses on a CPU without AMX,
where SGLang takes its plain torch paths, are written in plain torch.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN003, ANN201, ANN202  stands in for code without types

import torch

__version__ = "0.0.0+stub"

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.impl("init_cpu_threads_env", lambda cpu_ids: "no thread binding", "CompositeExplicitAutograd")
_library.define("initialize(int size, int rank) -> ()")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, *_):
    position = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = out_cache_loc[position : position + last - first].to(req_to_token.dtype)
        position += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"stand-in for sgl_kernel: {name}")

    missing.__name__ = name
    return missing
