"""Lets stock SGLang run without an accelerator: a few tweaks at import, outside SGLang, each for one module that asks for one.

torchvision declares fakes of two operators unguarded, and the CUDA library that defines them cannot be loaded here. DP attention pads its
batches with a number that this attention backend does not name. HiCache pins host memory for CUDA, waits on streams, and copies with a
kernel; on a CPU there is nothing to pin or to wait for, and a plain copy does.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN003, ANN201, ANN202  stands in for code without types

import importlib.abc
import importlib.machinery
import sys

KEPT = []  # a Library that is collected takes its operators with it


def before_torchvision():
    import torch  # noqa: PLC0415  only in a process that is about to import torchvision

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(library)


def after_attention(module):
    if not hasattr(module.TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):
        module.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1


def after_host_pool(module):
    import torch  # noqa: PLC0415  as above

    torch.cpu.Stream.synchronize = lambda self: None
    for name, answer in (("query", True), ("synchronize", None), ("wait", None), ("record", None)):
        setattr(torch.cpu.Event, name, lambda self, stream=None, answer=answer: answer)
    module._cuda_host_register = lambda buffer, *_, **__: setattr(buffer, module._CUDA_HOST_REGISTERED_RANGES_ATTR, [])


def after_attention_host_pool(module):
    def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, **_):
        for source, destination in zip(src_layers, dst_layers, strict=True):
            destination[dst_indices] = source[src_indices]

    if not hasattr(module, "transfer_kv_direct"):
        module.transfer_kv_direct = transfer_kv_direct


BEFORE = {"torchvision": before_torchvision}
AFTER = {
    "sglang.srt.layers.attention.torch_native_backend": after_attention,
    "sglang.srt.mem_cache.pool_host.common": after_host_pool,
    "sglang.srt.mem_cache.pool_host.mha": after_attention_host_pool,
}


class Tweaks(importlib.abc.MetaPathFinder):
    """Runs each tweak once, before or after its module is executed."""

    def find_spec(self, name, path, target=None):
        if tweak := BEFORE.pop(name, None):
            tweak()
        tweak = AFTER.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if tweak else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_tweak(module):
            execute(module)
            tweak(module)

        spec.loader.exec_module = execute_and_tweak
        return spec


sys.meta_path.insert(0, Tweaks())
