"""Constructs that Apple's compiler rejects and clang's C++ for OpenCL accepts."""

from .compile import Compiler
from .signature import Signature


def check(compiler: Compiler, name: str, made: Signature, input_names) -> None:
    return None
