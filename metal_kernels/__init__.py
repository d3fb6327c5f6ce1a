if __name__ != "mlxbatch.metal_kernels":  # one identity only: never `import metal_kernels` from the checkout's root
    raise ImportError("import this package as mlxbatch.metal_kernels")
