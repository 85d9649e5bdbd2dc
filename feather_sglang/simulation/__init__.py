"""Layer 2, beside scheduling: a simulated engine that the same scheduler and policies drive. No sglang, no torch."""
