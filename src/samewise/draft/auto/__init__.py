"""`auto`: measure frames, drafters and acceptance, and draft only where that makes tokens come faster."""
