"""Lets torchvision's CUDA build be imported beside torch's CPU build: the operators that its library would define.

Installed with a `.pth` line, so that it comes before torchvision in every process.
"""

import importlib.abc
import sys
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    ),
)
KEPT: list[Any] = []


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing, but sees what is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and not KEPT:
            import torch

            if not torch.version.cuda:
                KEPT.append(torch.library.Library("torchvision", "DEF"))
                for schema in SCHEMAS:
                    KEPT[0].define(schema)


sys.meta_path.insert(0, Finder())
