"""The usual torchvision transforms in one fused pass, with the same random draws."""
