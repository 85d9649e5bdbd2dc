"""SGLang: where Feather hooks in, its arguments, and the CPU platform.

``plugin`` and ``platform`` are what SGLang's entry points name; they import sglang only when asked to do something.
"""
