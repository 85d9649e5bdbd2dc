"""Layer 3: one folder per engine; the only layer that imports one."""
