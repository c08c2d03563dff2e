"""Loads the plugin that chooses ``gpu`` and ``compile`` tests and records GPU runs; see its docstring."""

pytest_plugins = ("fe_runtime.testing.plugin",)
