"""Let torchvision's Python be imported beside a CPU build of torch. For tests: put this folder on
PYTHONPATH.

PyPI's torchvision is a CUDA build. Beside a CPU torch its compiled ops cannot be loaded. Its import
dies with "operator torchvision::nms does not exist", and transformers' image processors and vLLM
die with it. Nothing here uses those ops. So it is enough to declare them by name, just before
torchvision is first imported.
"""

import importlib.abc
import sys

OPS = """
nms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward
ps_roi_pool _ps_roi_pool_backward qnms qroi_align deform_conv2d _deform_conv2d_backward
_cuda_version
"""


class _DeclareOps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if "+cpu" in torch.__version__ and not hasattr(sys, "torchvision_ops"):
                self.library = torch.library.Library("torchvision", "DEF")
                for op in OPS.split():
                    self.library.define(f"{op}() -> int")
                sys.torchvision_ops = self.library  # kept alive: the ops go with it
        return None


sys.meta_path.insert(0, _DeclareOps())
