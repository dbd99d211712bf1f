#!/bin/sh
# BERT, question answering on SQuAD v1.1; see ../../launch for METHOD, SIZE, DATA and the flags.
exec "$(dirname "$0")/../../launch" bert "$@"
