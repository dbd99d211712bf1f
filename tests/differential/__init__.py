"""Generated training scripts, played on shade and on plain PyTorch: the same result, or a refusal by name."""
