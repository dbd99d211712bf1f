#!/bin/sh
# mlflow-skinny 3.17.0: `start_run` into a `file://` store fails if its folder exists and is empty, and works if there is
# no folder.
#
# Guess: an empty folder, as a temporary one or a mounted volume is, is a new store like one that has to be made.
# Seen: MlflowException, "Could not find experiment with ID 0": the default experiment is made together with the folder
# alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q mlflow-skinny==3.17.0 2>/dev/null
MLFLOW_ALLOW_FILE_STORE=true "$folder/venv/bin/python" -W ignore - "$folder" <<'PY' 2>/dev/null
import pathlib
import sys

import mlflow

seen = {}
for name in ("made", "missing"):
    store = pathlib.Path(sys.argv[1], name)
    if name == "made":
        store.mkdir()
    mlflow.set_tracking_uri(store.as_uri())
    try:
        with mlflow.start_run():
            mlflow.log_metric("loss", 1.0)
        seen[name] = "works"
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {error}"
    print(f"{name} folder: {seen[name]}")
assert "Could not find experiment with ID 0" in seen["made"], "it has changed"
assert seen["missing"] == "works", "it has changed"
PY
