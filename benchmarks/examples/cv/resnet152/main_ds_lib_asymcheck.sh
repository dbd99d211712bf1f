#!/bin/sh
# ResNet (SIZE=large is ResNet-152), classification on ImageNet; see ../../launch for METHOD, SIZE, DATA and the flags.
exec "$(dirname "$0")/../../launch" resnet "$@"
