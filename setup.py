"""The one thing pyproject.toml cannot say: the C kernels, and that a machine without a compiler does without."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "liveweight.devices._native",
            sources=[f"native/{name}.c" for name in ("module", "copy", "digest", "avx2", "portable")],
            depends=["native/kernels.h"],
            include_dirs=["native"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-fno-strict-aliasing"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
