"""Control: chooses density and batches from every rank's measurements, serves telemetry, and tunes offline."""
