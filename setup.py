"""The one thing pyproject.toml cannot say: the C kernels, and that a machine without a compiler does without."""

from setuptools import Extension, setup


def kernels(module: str, sources: list[str], header: str) -> Extension:
    """An extension of native/ that is left out where it cannot be built."""
    return Extension(
        module,
        sources=[f"native/{name}.c" for name in sources],
        depends=[f"native/{header}"],
        include_dirs=["native"],
        libraries=["m"],
        extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", "-fno-strict-aliasing"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        optional=True,
    )


setup(
    ext_modules=[
        kernels("liveweight.devices._native", ["module", "copy", "digest", "avx2", "portable"], "kernels.h"),
        kernels(
            "liveweight.engine._attention",
            ["attention_module", "attention", "attention_avx2", "attention_portable"],
            "attention.h",
        ),
        kernels("liveweight.engine._shared", ["shared"], "attention.h"),
        kernels(
            "liveweight.engine._linear",
            ["linear_module", "linear", "linear_avx2", "linear_portable"],
            "linear.h",
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
