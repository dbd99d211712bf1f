#!/bin/sh
# ViT (SIZE=large is ViT-L/16), classification on ImageNet; see ../../launch for METHOD, SIZE, DATA and the flags.
exec "$(dirname "$0")/../../launch" vit "$@"
