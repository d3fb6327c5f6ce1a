if __name__ != "mlxbatch.tui":  # one identity only: never `import tui` from the checkout's root
    raise ImportError("import this package as mlxbatch.tui")
