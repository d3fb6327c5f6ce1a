if __name__ != "mlxbatch.models":  # one identity only: never `import models` from the checkout's root
    raise ImportError("import this package as mlxbatch.models")
