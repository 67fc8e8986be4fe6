"""Lets stock SGLang run without an accelerator: one tweak at import, outside SGLang.

torchvision declares fakes of two operators unguarded, and the CUDA library that defines them cannot be loaded here.
"""

import importlib.abc
import sys

KEPT = []  # a Library that is collected takes its operators with it


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            KEPT.append(library)
        return None


sys.meta_path.insert(0, BeforeTorchvision())
