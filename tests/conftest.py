"""Shared by all tests: MLX must find its BLAS before anything imports it."""

from mlxbatch.execution.backend import prepare_backend

prepare_backend()
