"""Lets stock SGLang run without an accelerator: one tweak at import, outside SGLang.

torchvision declares fakes of two operators unguarded, and the CUDA library that defines them cannot be loaded here.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201  stands in for code without types

import importlib.abc
import sys

KEPT = []  # a Library that is collected takes its operators with it


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch  # noqa: PLC0415  only in a process that is about to import torchvision

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(library)


sys.meta_path.insert(0, BeforeTorchvision())
