#!/bin/sh
# GPT-2, causal language modelling on WikiText; see ../../launch for METHOD, SIZE, DATA and the flags.
exec "$(dirname "$0")/../../launch" gpt2 "$@"
