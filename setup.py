"""The one compiled part, which pyproject.toml cannot name stably yet: see stages/products.c.

Optional: without a compiler or Python's headers the installation goes on, and torch's kernels are
used. No flags for this very processor, so that what is built runs on any other.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "stages._draft",
            ["stages/products.c", "stages/draft_layers.c", "stages/outlook.c"],
            depends=[
                "stages/products.h",
                "stages/product_forms.h",
                "stages/product_tile.h",
                "stages/float_lanes.h",
                "stages/draft_attention.h",
            ],
            extra_compile_args=[] if sys.platform == "win32" else ["-O3"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
