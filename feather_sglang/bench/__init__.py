"""Layer 4: what the command line needs to run and compare real servers."""
